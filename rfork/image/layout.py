"""Layout of an image: its tensors, their byte offsets, and what else must be equal on source and target.

Specs of tensors are kept in column lists, as there may be a million of them. A layout also states facts that no
tensor's name and shape show: plain values of the module (`rfork.image.module_tensors`), and *compatibility tags*.
Two engines, two versions of one engine, or two choices of kernels may use the same tensor names and shapes for
different weights. So an engine package attaches an empty tensor to the model for each fact that must be equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from json.encoder import encode_basestring_ascii as quoted
from operator import itemgetter
from typing import NamedTuple, overload

import torch
from typing_extensions import Self

from rfork.errors import UnsupportedTensor
from rfork.image.chunks import Chunks

SpecType = tuple[str, tuple[int, ...], tuple[int, ...]]
"""dtype, shape and stride. Most tensors of a model share a few of these."""
LAYOUT_DOMAIN = b"rfork-layout-v1\n"
HASH_BATCH_SPECS = 4096
"""Number of specs per update of the hash, so that their complete text never exists in memory."""
WEIGHTS_DOMAIN = b"rfork-weights-v1\n"
ATTRIBUTE = "rfork"
"""Attribute of an engine's model: the dict of what its plug-in attaches."""
PREFIX = "rfork.is."
"""Name prefix of the tensors that state facts: ``rfork.is.engine vllm 0.32.0``."""


def byte_extent(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Return the bytes from a tensor's first element to the end of its last; 0 if it has none."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of `shape`."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


class TensorSpec(NamedTuple):
    """One named tensor of an image.

    `dtype` is torch's name without the ``torch.`` prefix; `shape` and `stride` count elements; `offset` is
    the image offset, in bytes, of the element at index (0, …, 0). Specs whose bytes overlap are aliases of
    one storage (tied weights, views).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def describe(self) -> str:
        """Return a one-line description for people."""
        return f"{self.dtype}{list(self.shape)} stride {list(self.stride)} at byte {self.offset}"


class TensorSpecTable(Sequence[TensorSpec]):
    """Sequence of specs, created on iteration.

    It takes 150 bytes per spec and, except for the spec types, contains nothing that the garbage collector
    traverses. As objects, a million specs would take twice that, and seconds of garbage collection in every
    process.
    """

    def __init__(self, specs: Iterable[TensorSpec] = ()) -> None:
        self._names: list[str] = []
        self._spec_types: list[SpecType] = []
        self._offsets: list[int] = []
        self._known: dict[SpecType, SpecType] = {}
        self.extend(specs)

    @classmethod
    def of_columns(cls, names: list[str], spec_types: Sequence[SpecType], offsets: list[int]) -> Self:
        """Return a table of these columns of equal length. The lists are not copied."""
        specs = cls()
        # Few of them are different objects, and hashing each would take most of the time.
        different = {id(spec_type): spec_type for spec_type in spec_types}
        shared = {key: specs._known.setdefault(spec_type, spec_type) for key, spec_type in different.items()}
        specs._names = names
        specs._spec_types = [shared[id(spec_type)] for spec_type in spec_types]
        specs._offsets = offsets
        return specs

    def extend(self, specs: Iterable[TensorSpec]) -> None:
        """Append specs. Only allowed while the table is being built."""
        for name, dtype, shape, stride, offset in specs:
            spec_type = dtype, shape, stride
            self._names.append(name)
            self._spec_types.append(self._known.setdefault(spec_type, spec_type))
            self._offsets.append(offset)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[TensorSpec]:
        return self._walk(slice(None))

    def _walk(self, part: slice) -> Iterator[TensorSpec]:
        spec_types = self._spec_types[part]
        dtypes, shapes, strides = (map(itemgetter(field_index), spec_types) for field_index in range(3))
        return map(TensorSpec, self._names[part], dtypes, shapes, strides, self._offsets[part])

    @overload
    def __getitem__(self, index: int) -> TensorSpec: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorSpec]: ...

    def __getitem__(self, index: int | slice) -> TensorSpec | Sequence[TensorSpec]:
        if isinstance(index, slice):
            return tuple(self._walk(index))
        return TensorSpec(self._names[index], *self._spec_types[index], self._offsets[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpecTable):
            return NotImplemented
        return self._columns == other._columns

    def __hash__(self) -> int:
        return hash((len(self), *self._names[:1]))

    @property
    def _columns(self) -> tuple[list[str], list[SpecType], list[int]]:
        return self._names, self._spec_types, self._offsets

    def differences(self, other: TensorSpecTable) -> Iterator[tuple[TensorSpec | None, TensorSpec | None]]:
        """Yield pairs of specs with equal names that differ, own ones first; None for a missing spec."""
        ours, theirs = self._names, other._names
        if ours == theirs:  # the common case, without an index of names
            pairs: Iterable[tuple[int, int | None]] = ((position, position) for position in range(len(self)))
        else:
            positions = {name: position for position, name in enumerate(theirs)}
            pairs = ((position, positions.get(name)) for position, name in enumerate(ours))
        for here, there in pairs:
            if there is None:
                yield self[here], None
            elif self._offsets[here] != other._offsets[there] or self._spec_types[here] != other._spec_types[there]:
                yield self[here], other[there]
        if ours != theirs:
            known = set(ours)
            yield from ((None, other[position]) for position, name in enumerate(theirs) if name not in known)

    def json_lines(self, comma: str) -> Iterator[str]:
        """Yield each spec as a JSON array (name, dtype, shape, stride, offset) with the separator `comma`.

        The output is that of `json.dumps`, several times as fast.
        """
        texts = {id(spec_type): json.dumps(spec_type, separators=(comma, ":"))[1:-1] for spec_type in self._known}
        for name, spec_type, offset in zip(self._names, self._spec_types, self._offsets, strict=True):
            yield f"[{quoted(name)}{comma}{texts[id(spec_type)]}{comma}{offset}]"

    def __repr__(self) -> str:
        return f"Specs({list(self)!r})"


@dataclass(frozen=True, init=False)
class Layout:
    """The ordered tensor specs of one image and its size in bytes.

    Two images with the same `layout_id` can be copied into one another byte by byte, whatever addresses their
    allocators chose.
    """

    tensors: TensorSpecTable
    image_bytes: int
    attributes: tuple[str, ...]
    """Plain values that must be equal on both sides: see `rfork.image.module_tensors.Attributes`."""

    def __init__(self, tensors: Iterable[TensorSpec], image_bytes: int, attributes: Iterable[str] = ()) -> None:
        """A `TensorSpecTable` is kept without a copy and must not be extended afterwards."""
        object.__setattr__(
            self, "tensors", tensors if isinstance(tensors, TensorSpecTable) else TensorSpecTable(tensors)
        )
        object.__setattr__(self, "image_bytes", image_bytes)
        object.__setattr__(self, "attributes", tuple(attributes))

    @cached_property
    def layout_id(self) -> str:
        """SHA-256 over the size, all specs and all attributes, as 32 hex digits."""
        state = hashlib.sha256(LAYOUT_DOMAIN)
        state.update(b"%d\n" % self.image_bytes)
        lines = self.tensors.json_lines(", ")
        while batch := list(islice(lines, HASH_BATCH_SPECS)):
            state.update("\n".join([*batch, ""]).encode())
        if self.attributes:
            state.update(json.dumps(self.attributes).encode())
        return state.hexdigest()[:32]

    @cached_property
    def chunks(self) -> Chunks:
        """Division of this image into chunks."""
        return Chunks.of(self.image_bytes)

    def differences(self, other: Layout) -> Iterator[str]:
        """Yield each difference to `other` on one line, in canonical order; "here" is self, "there" is other."""
        for here, there in self.tensors.differences(other.tensors):
            yield _line(here, there)
        if self.image_bytes != other.image_bytes:
            yield f"image size: here {self.image_bytes} bytes, there {other.image_bytes} bytes"
        if self.attributes != other.attributes:
            for key, ours, theirs in _differing_values(self.attributes, other.attributes, "="):
                yield f"attribute {key}: here {'; '.join(ours)}, there {'; '.join(theirs)}"

    def first_difference(self, other: Layout) -> str | None:
        """Return the difference that explains the mismatch best, or None if the layouts are equal.

        A tensor of another dtype or shape shifts the offsets of all following tensors, so a difference in
        type is preferred to one in offset alone.
        """
        for here, there in self.tensors.differences(other.tensors):
            if here is None or there is None or here[1:4] != there[1:4]:
                return _line(here, there)
        return next(self.differences(other), None)


def _line(here: TensorSpec | None, there: TensorSpec | None) -> str:
    name = here.name if here is not None else there.name if there is not None else ""
    descriptions = [spec.describe() if spec is not None else "no such tensor" for spec in (here, there)]
    return f"{name}: here {descriptions[0]}, there {descriptions[1]}"


def _differing_values(
    own: Iterable[str], other: Iterable[str], separator: str
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each key whose values (of texts ``key``, separator, ``value``) differ, with those of one side only."""
    sides: list[dict[str, list[str]]] = []
    for texts, excluded in ((own, other), (other, own)):
        grouped: dict[str, list[str]] = {}
        for text in sorted(set(texts).difference(excluded)):
            key, _, value = text.partition(separator)
            grouped.setdefault(key, []).append(value)
        sides.append(grouped)
    for key in sorted(sides[0].keys() | sides[1].keys()):
        yield key, sides[0].get(key, ["nothing"]), sides[1].get(key, ["nothing"])


def weights_id(layout_id: str, digests: tuple[bytes, ...]) -> str:
    """Return SHA-256 over a layout_id and its chunk digests, as 32 hex digits."""
    state = hashlib.sha256(WEIGHTS_DOMAIN)
    state.update(layout_id.encode())
    for digest in digests:
        state.update(digest)
    return state.hexdigest()[:32]


@dataclass(frozen=True)
class Manifest:
    """Required content of an image: one digest (16 bytes) per chunk, in chunk order."""

    layout: Layout
    digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.digests) != len(self.layout.chunks):
            raise ValueError(f"{len(self.digests)} digests for {len(self.layout.chunks)} chunks")

    @cached_property
    def weights_id(self) -> str:
        """Two images with the same `weights_id` have the same bytes."""
        return weights_id(self.layout.layout_id, self.digests)


def tag_tensors(facts: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return an empty tensor for each fact, to be attached to a module as ``module.rfork["is"]``.

    A fact is a one-word subject and its value: ``engine vllm 0.32.0``.
    """
    return {fact: torch.empty(0, dtype=torch.uint8) for fact in facts}


def tags_of(layout: Layout) -> frozenset[str]:
    """Return the facts of a layout."""
    return frozenset(spec.name.removeprefix(PREFIX) for spec in layout.tensors if spec.name.startswith(PREFIX))


def tag_differences(own: Layout, other: Layout) -> Iterator[str]:
    """Yield a description of each subject whose facts differ between two layouts."""
    for subject, here, there in _differing_values(tags_of(own), tags_of(other), " "):
        yield f"{subject}: here {', '.join(here)}; there {', '.join(there)}"


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the torch dtype of a spec. Raises UnsupportedTensor if this torch has no such dtype."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedTensor(spec.name, f"this torch has no dtype {spec.dtype!r}")
    return dtype


def tensor_views(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return every tensor of `layout` by name, as a view of `buffer` (uint8, 1-D, `image_bytes` long).

    Aliases share memory again, and nothing is copied. A tensor whose offset is not a multiple of its item
    size (possible only if tensors of different item sizes overlap) is still a view on the CPU; other devices
    cannot read it.

    Raises ValueError if the buffer does not fit, and UnsupportedTensor for a tensor that cannot be created.
    """
    if buffer.dtype != torch.uint8 or buffer.shape != (layout.image_bytes,) or not buffer.is_contiguous():
        actual = f"{buffer.dtype} {tuple(buffer.shape)}"
        raise ValueError(f"needs a flat uint8 buffer of {layout.image_bytes} bytes, got {actual}")
    return {spec.name: _view(spec, buffer) for spec in layout.tensors}


def allocate_buffer(layout: Layout, device: torch.device | str = "cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return an uninitialised buffer for the image on `device`, and its `tensor_views`."""
    buffer = torch.empty(layout.image_bytes, dtype=torch.uint8, device=device)
    return buffer, tensor_views(layout, buffer)


def allocate_tensors(layout: Layout, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return uninitialised tensors for the image on `device`, by name.

    Tensors that overlap share an allocation, and all others have their own, as in a model: processes with the same
    allocator place large ones at the same offset within a page.
    """
    tensors: dict[str, torch.Tensor] = {}
    group: list[TensorSpec] = []
    begin = end = 0

    def allocate() -> None:
        buffer = torch.empty(end - begin, dtype=torch.uint8, device=device)
        for spec in group:
            tensors[spec.name] = _view(spec._replace(offset=spec.offset - begin), buffer)

    for spec in layout.tensors:
        length = byte_extent(spec.shape, spec.stride, dtype_of(spec).itemsize)
        if group and spec.offset >= end:
            allocate()
            group = []
        if not group:
            begin = end = spec.offset
        group.append(spec)
        end = max(end, spec.offset + length)
    if group:
        allocate()
    return tensors


def _view(spec: TensorSpec, buffer: torch.Tensor) -> torch.Tensor:
    dtype = dtype_of(spec)
    tensor = torch.empty(0, dtype=dtype, device=buffer.device)
    begin, length = spec.offset, byte_extent(spec.shape, spec.stride, dtype.itemsize)
    if begin < 0 or min((*spec.shape, *spec.stride), default=0) < 0 or begin + length > buffer.numel():
        raise UnsupportedTensor(spec.name, f"{spec.describe()} is not within {buffer.numel()} bytes")
    storage, begin = buffer.untyped_storage(), int(buffer.storage_offset()) + begin
    if (storage.data_ptr() + begin) % dtype.itemsize or begin % dtype.itemsize:
        if buffer.device.type != "cpu":
            raise UnsupportedTensor(spec.name, f"byte {spec.offset} is not a multiple of the item size")
        # A new storage over the same memory, because storage offsets count complete items.
        storage, begin = storage[begin : begin + length], 0
    return tensor.set_(storage, begin // dtype.itemsize, spec.shape, spec.stride)
