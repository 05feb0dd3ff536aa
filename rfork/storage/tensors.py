"""Tensor source interface: named tensors in storage, independent of the file format.

Runs wherever weights are loaded. `rfork.storage.formats.detect` opens the right implementation for a URI.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Metadata of one stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


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
