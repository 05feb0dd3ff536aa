"""Tensor source for safetensors: one file, the shards of an index, or a snapshot, in any store."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import cached_property

import torch
from typing_extensions import Self

from rfork.cuda.device import device_of
from rfork.errors import CheckpointError
from rfork.gc_pause import gc_paused
from rfork.image.layout import Layout
from rfork.image.staging import CPU
from rfork.settings import StorageSettings
from rfork.storage.abandonable_call import AbandonableCall
from rfork.storage.formats import relayout, tensor_blocks
from rfork.storage.formats.safetensors_file import Shard, TensorLocation
from rfork.storage.formats.tensor_blocks import aligned, bytes_of, group_into_blocks, tensors_in
from rfork.storage.io.extents import ExtentTable
from rfork.storage.io.reader import Extent, fill
from rfork.storage.tensors import StoredTensor

MAX_GAP_BYTES, MAX_REMOTE_GAP_BYTES = 64 << 10, 512 << 10
"""Largest gap in bytes between two requested tensors that is read along: local, and remote."""


class SafetensorsSource:
    """Named tensors in safetensors files; see `TensorSource`. Created by `rfork.storage.formats.detect`."""

    def __init__(
        self,
        uri: str,
        shards: Sequence[Shard],
        settings: StorageSettings,
        *,
        files: Mapping[str, str] | None = None,
        index: bytes = b"",
    ) -> None:
        """`files` maps each tensor that counts to its shard; None: all tensors count.

        `index` is the content of the index file. Raises CheckpointError if two shards contain a tensor of the
        same name.
        """
        self.uri = uri
        self.shards = tuple(shards)
        self.index = index
        self._settings = settings
        self.remote = not uri.startswith("file:")
        self._gap = MAX_REMOTE_GAP_BYTES if self.remote else MAX_GAP_BYTES
        self._shard_order = {id(shard.blob): turn for turn, shard in enumerate(shards)}
        self._locations: dict[str, TensorLocation] = {}
        self._aliases: set[str] = set()
        for shard in shards:
            self._add(shard, files)
        self._owned = ExitStack()

    def _add(self, shard: Shard, files: Mapping[str, str] | None) -> None:
        locations = shard.locations
        if files is not None and not (len(self.shards) == 1 and locations.keys() <= files.keys()):
            # The second name of a tied tensor counts too, although an index omits it.
            locations = {
                name: location
                for name, location in locations.items()
                if files.get(name, shard.name if name in shard.aliases else None) == shard.name
            }
        if twice := self._locations.keys() & locations.keys():
            raise CheckpointError(f"{self.uri}: {min(twice)} is in {shard.name} and in another file")
        self._locations |= locations
        self._aliases |= shard.aliases

    def adopt(self, opened: ExitStack) -> Self:
        """Take over the resources in `opened`, which `close` will release, and return self."""
        self._owned = opened.pop_all()
        return self

    @property
    def locations(self) -> Mapping[str, TensorLocation]:
        """Location of each tensor, by file and then by offset."""
        return self._locations

    @property
    def aliases(self) -> Set[str]:
        """Second names of tied tensors."""
        return self._aliases

    @property
    def layout(self) -> Layout | None:
        """Layout of a snapshot, which covers the module's complete state under the image's names; None for
        other files.
        """
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

        Tensors with the stored dtype and layout are read in place; the others are converted in at most half
        of `settings.staging_bytes`.
        """
        extents: list[Extent] = []
        convert: list[tuple[TensorLocation, torch.Tensor]] = []
        with gc_paused(), torch.no_grad():
            for location, tensor in self._matched(tensors):
                if relayout.is_bytewise(location, tensor.dtype, tensor):
                    into = tensor if device_of(tensor) == CPU else bytes_of(tensor)
                    extents.append(Extent(location.blob, location.offset, into))
                else:
                    convert.append((location, tensor))
        fill(extents, self._settings, progress=progress)
        relayout.fill_converted(convert, self._gap, self._settings, progress)

    def fill(self, extents: ExtentTable, progress: Callable[[int], None] | None = None) -> None:
        """Read extents of this source; see `rfork.storage.io.reader.fill`."""
        fill(extents, self._settings, progress=progress)

    def load(
        self,
        names: Collection[str] | None = None,
        device: torch.device | str = "cpu",
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Load all tensors, or those in `names`, into new memory: one allocation for each run of adjacent
        tensors.

        Keeping one tensor keeps the memory of its run. Raises the same errors as `read_into`.
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

        # Created during the read: creating many small views can take almost as long as reading their bytes.
        making = AbandonableCall(self.uri, views, lambda _: None)
        fill(extents, self._settings, progress=progress)
        if odd:
            self.read_into(odd, progress)
        return making.result() | odd

    def stream(
        self, names: Collection[str] | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TensorSource.stream`: reads ahead at most `settings.staging_bytes` bytes, or one tensor.

        Stopping early ends the reads. Raises CheckpointError immediately if a name is not stored.
        """
        plain, odd = self._split_matched(names, device)
        max_block_bytes = self._settings.staging_bytes // tensor_blocks.PREFETCH_BLOCKS
        blocks = group_into_blocks(plain, self._gap if names is not None else 0, max_block_bytes)
        return self._arriving(tensor_blocks.stream_tensors(blocks, device, self._settings), odd)

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
        """Iterate over the locations of names in storage order. Raises CheckpointError."""
        if names is None:
            return iter(self._locations.values())
        wanted = frozenset(names)
        if unknown := sorted(wanted - self._locations.keys()):
            raise CheckpointError(f"{self.uri} lacks {unknown[0]} ({len(unknown)} in total)")
        return (location for name, location in self._locations.items() if name in wanted)

    def _split_matched(
        self, names: Collection[str] | None, device: torch.device | str
    ) -> tuple[list[TensorLocation], dict[str, torch.Tensor]]:
        """Return locations that can be views of the file's bytes, and new tensors for unaligned or empty
        ones.
        """
        plain: list[TensorLocation] = []
        odd: dict[str, torch.Tensor] = {}
        for location in self._chosen(names):
            if aligned(location) and location.nbytes:
                plain.append(location)
            else:
                odd[location.name] = _fresh(location, device)
        return plain, odd

    def _matched(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[TensorLocation, torch.Tensor]]:
        """Return locations and tensors in storage order; if several share memory, only the last one."""
        found: dict[tuple[torch.device | None, int, int], tuple[TensorLocation, torch.Tensor]] = {}
        get = self._locations.get
        for name, tensor in tensors.items():
            location = get(name)
            if location is None:
                raise CheckpointError(f"{self.uri} lacks {name}")
            _, _, _, nbytes, dtype, shape, stride = location
            if shape != tensor.shape:
                raise CheckpointError(
                    f"{self.uri}: {name} has shape {list(shape)}, but {list(tensor.shape)} in the model"
                )
            device = None if tensor.is_cpu else tensor.device
            if device is not None and tensor.is_meta:
                raise CheckpointError(f"cannot load into {name}: it has no memory")
            own = tensor.dtype
            if dtype is not own and not torch.can_cast(dtype, own):
                raise CheckpointError(f"{self.uri}: {name} is {dtype}, but {own} in the model")
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
