"""Safetensors as a source of tensors: one file, the files of an index, or a snapshot, in any store."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import cached_property
from typing import Self

import torch

from rfork.errors import CheckpointError
from rfork.image.layout import Layout
from rfork.settings import StorageSettings
from rfork.storage.abandonable_call import AbandonableCall
from rfork.storage.formats import relayout, streaming
from rfork.storage.formats.safetensors_file import Shard, TensorLocation
from rfork.storage.formats.tensor_blocks import aligned, bytes_of, group_into_blocks, tensors_in
from rfork.storage.io.gc_pause import gc_paused
from rfork.storage.io.reader import Extent, fill
from rfork.storage.tensors import StoredTensor

GAP, REMOTE_GAP = 64 << 10, 512 << 10
"""Bytes between two wanted tensors that are read with them: of a file here, of one behind a network."""


class SafetensorsSource:
    """Named tensors in safetensors files; see `TensorSource`. Made by `rfork.storage.formats.detect`."""

    def __init__(
        self,
        uri: str,
        shards: Sequence[Shard],
        settings: StorageSettings,
        *,
        files: Mapping[str, str] | None = None,
        index: bytes = b"",
    ) -> None:
        """`files` says which tensors count, and in which shard each lies; None: all do.

        `index` is the index file that says so. Raises CheckpointError where two shards hold a tensor of one
        name.
        """
        self.uri = uri
        self.shards = tuple(shards)
        self.index = index
        self._settings = settings
        self.remote = not uri.startswith("file:")
        self._gap = REMOTE_GAP if self.remote else GAP
        self._shard_order = {id(shard.blob): turn for turn, shard in enumerate(shards)}
        self._locations: dict[str, TensorLocation] = {}
        self._aliases: set[str] = set()
        for shard in shards:
            self._add(shard, files)
        self._owned = ExitStack()

    def _add(self, shard: Shard, files: Mapping[str, str] | None) -> None:
        locations = shard.locations
        if files is not None:
            # A tied tensor counts under its second name too, which an index leaves out.
            locations = {
                name: location
                for name, location in locations.items()
                if files.get(name, shard.name if name in shard.aliases else None) == shard.name
            }
        if twice := self._locations.keys() & locations.keys():
            raise CheckpointError(f"{self.uri}: {min(twice)} is in {shard.name} and in another file")
        self._locations |= locations
        self._aliases |= shard.aliases

    def take_ownership(self, opened: ExitStack) -> Self:
        """This source, which from now on closes what is open."""
        self._owned = opened.pop_all()
        return self

    @property
    def locations(self) -> Mapping[str, TensorLocation]:
        """Where each tensor lies, file by file, in the order of offsets."""
        return self._locations

    @property
    def aliases(self) -> Set[str]:
        """Second names of tied tensors."""
        return self._aliases

    @property
    def layout(self) -> Layout | None:
        """Of a snapshot, which holds all that a module serves with under the image's names; else None."""
        return self.shards[0].layout if len(self.shards) == 1 else None

    @cached_property
    def specs(self) -> Mapping[str, StoredTensor]:
        """See `TensorSource.specs`."""
        return {
            name: StoredTensor(
                location.dtype,
                location.shape,
                location.nbytes if location.stride is None else math.prod(location.shape) * location.dtype.itemsize,
            )
            for name, location in self._locations.items()
        }

    def read_into(self, tensors: Mapping[str, torch.Tensor], progress: Callable[[int], None] | None = None) -> None:
        """See `TensorSource.read_into`.

        What lies in memory as in storage is read straight into it; the rest by way of at most half of
        `settings.memory`.
        """
        extents: list[Extent] = []
        convert: list[tuple[TensorLocation, torch.Tensor]] = []
        with gc_paused(), torch.no_grad():
            for location, tensor in self._matched(tensors):
                if relayout.is_bytewise(location, tensor.dtype, tensor):
                    into = tensor if tensor.is_cpu else bytes_of(tensor)
                    extents.append(Extent(location.blob, location.offset, into))
                else:
                    convert.append((location, tensor))
        fill(extents, self._settings, progress=progress)
        relayout.fill_converted(convert, self._gap, self._settings, progress)

    def load(
        self,
        names: Collection[str] | None = None,
        device: torch.device | str = "cpu",
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """All tensors, or those of `names`, in fresh memory: one allocation for all that lie side by side.

        Whoever keeps one keeps the memory of its neighbours. Raises as `read_into` does.
        """
        plain, odd = self._split_matched(names, device)
        blocks = list(group_into_blocks(plain, self._gap if names is not None else 0))
        extents = [block.extent(device) for block in blocks]

        def views() -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = {}
            with gc_paused(), torch.no_grad():
                for block, extent in zip(blocks, extents, strict=True):
                    found.update(tensors_in(block, extent.into))
            return found

        # Made while they are read: views of many small tensors take as long as a good part of their bytes.
        making = AbandonableCall(self.uri, views, lambda _: None)
        fill(extents, self._settings, progress=progress)
        if odd:
            self.read_into(odd, progress)
        return making.result() | odd

    def stream(
        self, names: Collection[str] | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TensorSource.stream`: at most `settings.memory` bytes are ahead of the caller, or one tensor.

        A caller who stops early ends the reads. Raises CheckpointError, at once, where a name is not stored.
        """
        plain, odd = self._split_matched(names, device)
        max_block_bytes = self._settings.staging_bytes // streaming.PREFETCH_BLOCKS
        blocks = group_into_blocks(plain, self._gap if names is not None else 0, max_block_bytes)
        return self._arriving(streaming.stream_tensors(blocks, device, self._settings), odd)

    def _arriving(
        self, arriving: Iterator[tuple[str, torch.Tensor]], odd: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from arriving
        for name, tensor in odd.items():
            self.read_into({name: tensor})
            yield name, tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        """See `TensorSource.__getitem__`."""
        location = self._locations[name]
        tensor = _fresh(location, "cpu")
        self.read_into({name: tensor})
        return tensor

    def close(self) -> None:
        """See `TensorSource.close`."""
        self._owned.close()

    def _chosen(self, names: Collection[str] | None) -> Iterator[TensorLocation]:
        """The places of names, in the order in which they are stored. Raises CheckpointError."""
        if names is None:
            return iter(self._locations.values())
        wanted = frozenset(names)
        if unknown := sorted(wanted - self._locations.keys()):
            raise CheckpointError(f"{self.uri} lacks {unknown[0]} ({len(unknown)} such)")
        return (location for name, location in self._locations.items() if name in wanted)

    def _split_matched(
        self, names: Collection[str] | None, device: torch.device | str
    ) -> tuple[list[TensorLocation], dict[str, torch.Tensor]]:
        """What can be a view of its file's bytes, and fresh tensors for what lies crooked in them."""
        plain: list[TensorLocation] = []
        odd: dict[str, torch.Tensor] = {}
        for location in self._chosen(names):
            if aligned(location) and location.nbytes:
                plain.append(location)
            else:
                odd[location.name] = _fresh(location, device)
        return plain, odd

    def _matched(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[TensorLocation, torch.Tensor]]:
        """Places and tensors in the order of storage; of several for one memory, the last counts."""
        found: dict[tuple[torch.device | None, int, int], tuple[TensorLocation, torch.Tensor]] = {}
        get = self._locations.get
        for name, tensor in tensors.items():
            location = get(name)
            if location is None:
                raise CheckpointError(f"{self.uri} lacks {name}")
            _, _, _, nbytes, dtype, shape, stride = location
            if shape != tensor.shape:
                raise CheckpointError(
                    f"{self.uri}: {name} has shape {list(shape)}, the model's is {list(tensor.shape)}"
                )
            device = None if tensor.is_cpu else tensor.device
            if device is not None and tensor.is_meta:
                raise CheckpointError(f"{name} has no memory to be loaded into")
            own = tensor.dtype
            if dtype is not own and not torch.can_cast(dtype, own):
                raise CheckpointError(f"{self.uri}: {name} is {dtype}, and the model's {own}")
            if not nbytes:
                continue
            same = dtype is own and stride is None
            memory = device, tensor.data_ptr(), nbytes if same else tensor.nbytes
            pair = location, tensor
            first_pair = found.setdefault(memory, pair)
            if first_pair is not pair and self._read_order(first_pair[0]) < self._read_order(location):
                found[memory] = pair
        return sorted(found.values(), key=lambda pair: self._read_order(pair[0]))

    def _read_order(self, location: TensorLocation) -> tuple[int, int]:
        return self._shard_order[id(location.blob)], location.offset


def _fresh(location: TensorLocation, device: torch.device | str) -> torch.Tensor:
    return torch.empty(location.shape, dtype=location.dtype, device=device)
