"""Named tensors, independent of the file format: the interface of a source, and descriptions of tensors.

Runs wherever weights are loaded or saved. `rfork.storage.formats.detect` opens the right source for a URI.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

EntryType = Literal["parameter", "buffer", "entry"]
"""Type of a tensor in tensorizer's own loader: a module's parameter or buffer, or a state dict's entry."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of a save or a conversion; `nbytes` counts the bytes of the tensors."""

    uri: str
    tensors: int
    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Rate in 10^9 bytes per second."""
        return self.nbytes / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def line(self) -> str:
        """Return the report as one line."""
        return (
            f"{self.uri}: {self.tensors} tensors, {self.nbytes / 1e6:,.1f} MB in {self.seconds:.2f} s, "
            f"{self.gb_per_s:.2f} GB/s"
        )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Metadata of one stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """Name and metadata of a tensor to write."""

    name: str
    spec: StoredTensor
    entry_type: EntryType = "entry"


class TensorSource(Protocol):
    """Named tensors in one file or folder: safetensors, a snapshot, ``.tensors``. Thread-safe."""

    @property
    def uri(self) -> str:
        """Location."""
        ...

    @property
    def specs(self) -> Mapping[str, StoredTensor]:
        """Metadata of all tensors by name, in storage order, including the names of tied tensors."""
        ...

    def read_into(self, tensors: Mapping[str, torch.Tensor], progress: Callable[[int], None] | None = None) -> None:
        """Fill each tensor, on any device, with the stored tensor of its name, converting the dtype.

        `progress` receives byte counts. Raises CheckpointError, before any byte is written, if a name is not
        stored or has another shape; StorageError subclasses, after which the tensors are undefined.
        """
        ...

    def stream(
        self, names: Collection[str] | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the tensors (all, or those in `names`) in order of arrival.

        The caller owns the tensors; those of one block may share an allocation.
        """
        ...

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read and return one tensor. Raises KeyError."""
        ...

    def close(self) -> None:
        """Close open files; a `stream` in progress ends."""
        ...
