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
from rfork.storage.attempt import Attempt
from rfork.storage.formats import arrival, converting
from rfork.storage.formats.blocks import aligned, blocks_of, bytes_of, tensors_in
from rfork.storage.formats.safetensors_file import Place, Shard
from rfork.storage.reading.collection import held_off
from rfork.storage.reading.engine import Extent, fill
from rfork.storage.tensors import StoredTensor

GAP, REMOTE_GAP = 64 << 10, 512 << 10
"""Bytes between two wanted tensors that are read with them: of a file here, of one behind a network."""


class SafetensorsSource:
    """Named tensors in safetensors files; see `TensorSource`. Made by `rfork.storage.formats.choice`."""

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
        self._turns = {id(shard.blob): turn for turn, shard in enumerate(shards)}
        self._places: dict[str, Place] = {}
        self._aliases: set[str] = set()
        for shard in shards:
            self._add(shard, files)
        self._owned = ExitStack()

    def _add(self, shard: Shard, files: Mapping[str, str] | None) -> None:
        places = shard.places
        if files is not None:
            # A tied tensor counts under its second name too, which an index leaves out.
            places = {
                name: place
                for name, place in places.items()
                if files.get(name, shard.name if name in shard.aliases else None) == shard.name
            }
        if twice := self._places.keys() & places.keys():
            raise CheckpointError(f"{self.uri}: {min(twice)} is in {shard.name} and in another file")
        self._places |= places
        self._aliases |= shard.aliases

    def owning(self, opened: ExitStack) -> Self:
        """This source, which from now on closes what is open."""
        self._owned = opened.pop_all()
        return self

    @property
    def places(self) -> Mapping[str, Place]:
        """Where each tensor lies, file by file, in the order of offsets."""
        return self._places

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
                place.dtype,
                place.shape,
                place.nbytes if place.stride is None else math.prod(place.shape) * place.dtype.itemsize,
            )
            for name, place in self._places.items()
        }

    def read_into(
        self, tensors: Mapping[str, torch.Tensor], progress: Callable[[int], None] | None = None
    ) -> None:
        """See `TensorSource.read_into`.

        What lies in memory as in storage is read straight into it; the rest by way of at most half of
        `settings.memory`.
        """
        extents: list[Extent] = []
        convert: list[tuple[Place, torch.Tensor]] = []
        with held_off(), torch.no_grad():
            for place, tensor in self._matched(tensors):
                if converting.as_stored(place, tensor.dtype, tensor):
                    into = tensor if tensor.is_cpu else bytes_of(tensor)
                    extents.append(Extent(place.blob, place.offset, into))
                else:
                    convert.append((place, tensor))
        fill(extents, self._settings, progress=progress)
        converting.fill(convert, self._gap, self._settings, progress)

    def load(
        self,
        names: Collection[str] | None = None,
        device: torch.device | str = "cpu",
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """All tensors, or those of `names`, in fresh memory: one allocation for all that lie side by side.

        Whoever keeps one keeps the memory of its neighbours. Raises as `read_into` does.
        """
        plain, odd = self._parted(names, device)
        blocks = list(blocks_of(plain, self._gap if names is not None else 0))
        extents = [block.extent(device) for block in blocks]

        def views() -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = {}
            with held_off(), torch.no_grad():
                for block, extent in zip(blocks, extents, strict=True):
                    found.update(tensors_in(block, extent.into))
            return found

        # Made while they are read: views of many small tensors take as long as a good part of their bytes.
        making = Attempt(self.uri, views, lambda _: None)
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
        plain, odd = self._parted(names, device)
        most = self._settings.memory // arrival.AHEAD
        blocks = blocks_of(plain, self._gap if names is not None else 0, most)
        return self._arriving(arrival.arrive(blocks, device, self._settings), odd)

    def _arriving(
        self, arriving: Iterator[tuple[str, torch.Tensor]], odd: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from arriving
        for name, tensor in odd.items():
            self.read_into({name: tensor})
            yield name, tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        """See `TensorSource.__getitem__`."""
        place = self._places[name]
        tensor = _fresh(place, "cpu")
        self.read_into({name: tensor})
        return tensor

    def close(self) -> None:
        """See `TensorSource.close`."""
        self._owned.close()

    def _chosen(self, names: Collection[str] | None) -> Iterator[Place]:
        """The places of names, in the order in which they are stored. Raises CheckpointError."""
        if names is None:
            return iter(self._places.values())
        wanted = frozenset(names)
        if unknown := sorted(wanted - self._places.keys()):
            raise CheckpointError(f"{self.uri} lacks {unknown[0]} ({len(unknown)} such)")
        return (place for name, place in self._places.items() if name in wanted)

    def _parted(
        self, names: Collection[str] | None, device: torch.device | str
    ) -> tuple[list[Place], dict[str, torch.Tensor]]:
        """What can be a view of its file's bytes, and fresh tensors for what lies crooked in them."""
        plain: list[Place] = []
        odd: dict[str, torch.Tensor] = {}
        for place in self._chosen(names):
            if aligned(place) and place.nbytes:
                plain.append(place)
            else:
                odd[place.name] = _fresh(place, device)
        return plain, odd

    def _matched(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[Place, torch.Tensor]]:
        """Places and tensors in the order of storage; of several for one memory, the last counts."""
        found: dict[tuple[torch.device | None, int, int], tuple[Place, torch.Tensor]] = {}
        get = self._places.get
        for name, tensor in tensors.items():
            place = get(name)
            if place is None:
                raise CheckpointError(f"{self.uri} lacks {name}")
            _, _, _, nbytes, dtype, shape, stride = place
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
            pair = place, tensor
            held = found.setdefault(memory, pair)
            if held is not pair and self._turn(held[0]) < self._turn(place):
                found[memory] = pair
        return sorted(found.values(), key=lambda pair: self._turn(pair[0]))

    def _turn(self, place: Place) -> tuple[int, int]:
        return self._turns[id(place.blob)], place.offset


def _fresh(place: Place, device: torch.device | str) -> torch.Tensor:
    return torch.empty(place.shape, dtype=place.dtype, device=device)
