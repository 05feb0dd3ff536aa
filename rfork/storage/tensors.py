"""What every format is once it is open: named tensors in storage, any of which can be read.

Runs wherever weights are loaded. `rfork.storage.formats.detect` opens the right kind for a URI.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What storage says of one tensor before its bytes are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


class TensorSource(Protocol):
    """Named tensors in one file or folder: safetensors, a snapshot, ``.tensors``. Thread-safe."""

    @property
    def uri(self) -> str:
        """Where it lies."""
        ...

    @property
    def specs(self) -> Mapping[str, StoredTensor]:
        """What it holds, by name, in the order in which it is stored; names of tied tensors too."""
        ...

    def read_into(self, tensors: Mapping[str, torch.Tensor], progress: Callable[[int], None] | None = None) -> None:
        """Fill each tensor, on any device, with the stored one of its name, converting its dtype.

        `progress` is told bytes as they come. Raises CheckpointError, before a byte is written, where a
        name is not stored or has another shape; StorageError kinds; the tensors are undefined then.
        """
        ...

    def stream(
        self, names: Collection[str] | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor (all, or those of `names`) as soon as it is there: in order of arrival.

        The tensors are the caller's own; those of one block may share an allocation.
        """
        ...

    def __getitem__(self, name: str) -> torch.Tensor:
        """One tensor, read now. Raises KeyError."""
        ...

    def close(self) -> None:
        """Close what is open; a `stream` under way ends."""
        ...
