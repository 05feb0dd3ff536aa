"""Storages of an image in column lists, as there may be a million of them. Tensors are created on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import overload

import torch

from rfork.image.host_memory import host_view

CPU = torch.device("cpu")


class StorageTable(Sequence[torch.Tensor]):
    """Runs of memory in image order, as uint8 tensors, 1-D, created on access.

    Keeps the storages, and so the memory, alive, whatever happens to the original tensors. Creating tens of
    thousands of regions as tensors would take longer than everything else about an image.
    """

    def __init__(
        self, storages: Sequence[torch.UntypedStorage], addresses: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Address and size in bytes of each region, and its storage."""
        self.storages = storages
        self.addresses = addresses
        self.lengths = lengths

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> StorageTable:
        """Return a table of these tensors (uint8, 1-D, contiguous)."""
        kept = list(tensors)
        return cls(
            [tensor.untyped_storage() for tensor in kept],
            [tensor.data_ptr() for tensor in kept],
            [tensor.numel() for tensor in kept],
        )

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """The devices of the storages."""
        return frozenset(map(attrgetter("device"), self.storages))

    @cached_property
    def device(self) -> torch.device:
        """The device of most of the bytes; the CPU if there are none."""
        if self.devices <= {CPU}:
            return CPU
        share: Counter[torch.device] = Counter()
        for storage, length in zip(self.storages, self.lengths, strict=True):
            share[storage.device] += length
        return share.most_common(1)[0][0]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        storage, length = self.storages[index], self.lengths[index]
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        with torch.no_grad():
            return memory.set_(storage, self.addresses[index] - storage.data_ptr(), (length,), (1,))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.__getitem__, range(len(self)))

    def coalesced(self) -> StorageTable:
        """Return the same memory without empty regions, with neighbours merged that are also adjacent in memory.

        On the CPU any two neighbours may be merged. On other devices only those of one storage (one
        allocation), because only those fit in one tensor. Keeps alive only the first storage of merged
        regions.
        """
        on_host = self.devices <= {CPU}
        storages: list[torch.UntypedStorage] = []
        addresses: list[int] = []
        lengths: list[int] = []
        reached = -1
        for storage, address, length in zip(self.storages, self.addresses, self.lengths, strict=True):
            if not length:
                continue
            if address == reached and (on_host or _is_adjacent(storages[-1], storage)):
                lengths[-1] += length
            else:
                storages.append(storage)
                addresses.append(address)
                lengths.append(length)
            reached = address + length
        return StorageTable(storages, addresses, lengths)

    def memory(self, index: int) -> torch.Tensor:
        """Return a region as one tensor. A region merged from several storages does not keep them alive."""
        storage, end = self.storages[index], self.addresses[index] + self.lengths[index]
        if end <= storage.data_ptr() + storage.nbytes():
            return self[index]
        return torch.frombuffer(self.view(index), dtype=torch.uint8)

    def view(self, index: int) -> memoryview:
        """Return the bytes of a CPU region."""
        return host_view(self.addresses[index], self.lengths[index])


def _is_adjacent(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    return one.device == other.device and (one.device == CPU or one.data_ptr() == other.data_ptr())
