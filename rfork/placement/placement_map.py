"""Placement map of one rank: which box of which checkpoint tensor lies where in its own tensors.

A map is immutable and kept in columns, as it may have a million rows. A row is one box: the checkpoint tensor and the
box's first index and sizes in it, and the own tensor with the byte offset of that index and a byte stride for each
dimension of the checkpoint tensor. A row without a checkpoint tensor names the operation that computed its elements:
they cannot be relocated. Rows never overlap in an own tensor. Elements without a row were never written.

Encoded, a map is a magic number, a format version, and a compressed JSON table of tensors and types followed by the
columns as little-endian integers. This module does not import torch, so the planner may use it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rfork.gc_pause import gc_paused

HEADER = struct.Struct("<II")
"""Format version, and size of the body before compression."""
COMPRESSION_LEVEL = 6
DECODING_ERRORS = (
    struct.error, AttributeError, KeyError, TypeError, IndexError, OverflowError, RecursionError, ValueError,
)  # fmt: skip
"""Errors that decoding a body of invalid bytes raises."""
FILL_OPERATIONS = frozenset({"fill_", "zero_"})
"""Operations that write a constant: padding, which each rank writes by itself."""

Column = npt.NDArray[np.int64]


class BinaryFormat(NamedTuple):
    """Versioned container of one compressed body."""

    description: str
    magic: bytes
    version: int
    max_body_bytes: int

    def packed(self, body: bytes) -> bytes:
        """Return the container of a body."""
        return self.magic + HEADER.pack(self.version, len(body)) + zlib.compress(body, COMPRESSION_LEVEL)

    def unpacked(self, data: bytes) -> bytes:
        """Return the body. Raises ValueError if it is damaged, too large, or of another version."""
        if not data.startswith(self.magic) or len(data) < len(self.magic) + HEADER.size:
            raise ValueError(f"no {self.description}")
        version, size = HEADER.unpack_from(data, len(self.magic))
        if version != self.version:
            raise ValueError(
                f"{self.description} of format version {version}; this version of rfork reads {self.version}"
            )
        if size > self.max_body_bytes:
            raise ValueError(f"{self.description} of {size} bytes; the limit is {self.max_body_bytes}")
        decompressor = zlib.decompressobj()
        try:
            body = decompressor.decompress(data[len(self.magic) + HEADER.size :], size + 1)
        except zlib.error as error:
            raise ValueError(f"invalid {self.description}: {error}") from error
        if len(body) != size or not decompressor.eof or decompressor.unused_data:
            raise ValueError(f"invalid {self.description}: truncated, or longer than announced")
        return body


MAP_FORMAT = BinaryFormat("placement map", b"rfork-placement\n", 1, 1 << 30)


class TensorType(NamedTuple):
    """Type of a checkpoint tensor, or of an own tensor. Strides are in bytes; a checkpoint tensor is contiguous."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()


class BoxType(NamedTuple):
    """Sizes of a box, and the byte stride in the own tensor along each of its dimensions."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class MapRow(NamedTuple):
    """One row of a map."""

    checkpoint: str
    """Name of the checkpoint tensor; empty if the elements were computed."""
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    own: str
    offset: int
    """Bytes from the first element of the own tensor."""
    strides: tuple[int, ...]
    operation: str = ""
    """Operation that computed the elements; empty if they are the checkpoint's."""


class RowBoxes(NamedTuple):
    """Boxes of a map's rows in columns, for checkpoint tensors with one number of dimensions."""

    rows: Column
    tensors: Column
    """Index of the checkpoint tensor."""
    starts: Column
    """First index, per dimension."""
    stops: Column
    """End of the indices, per dimension."""


class TensorTable:
    """Names of tensors and their types, each type once."""

    def __init__(self, names: Iterable[str] = (), types: Iterable[TensorType] = ()) -> None:
        self.names: list[str] = list(names)
        self.types: list[TensorType] = []
        self.type_indices: list[int] = []
        self._known: dict[TensorType, int] = {}
        for each in types:
            self._append_type(each)

    def append(self, name: str, tensor_type: TensorType) -> int:
        """Append a tensor and return its index. Only allowed while the table is built."""
        self.names.append(name)
        self._append_type(tensor_type)
        return len(self.names) - 1

    def _append_type(self, tensor_type: TensorType) -> None:
        index = self._known.get(tensor_type)
        if index is None:
            index = self._known[tensor_type] = len(self.types)
            self.types.append(tensor_type)
        self.type_indices.append(index)

    def type_of(self, index: int) -> TensorType:
        """Return the type of the tensor at an index."""
        return self.types[self.type_indices[index]]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Index of each name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def indices_of(self, other: TensorTable) -> Column:
        """Return the index of each tensor of another table, or -1 if this one has none of that name and type."""
        types = np.array([self._known.get(each, -1) for each in other.types], dtype=np.int64)
        indices = np.fromiter(map(self.positions.get, other.names, repeat(-1)), np.int64, len(other))
        own_types = np.array([*self.type_indices, -2], dtype=np.int64)  # the last one is that of an unknown name
        return np.where(own_types[indices] == types[other.type_indices], indices, -1)


@dataclass
class PlacementMapBuilder:
    """Rows of a map that is being built."""

    checkpoint: TensorTable = field(default_factory=TensorTable)
    own: TensorTable = field(default_factory=TensorTable)
    aliases: dict[str, str] = field(default_factory=dict)
    """Own tensors that lie within another own tensor, and its name. They have no rows."""
    operations: dict[str, int] = field(default_factory=dict)
    box_types: dict[BoxType, int] = field(default_factory=dict)
    read_completely: list[str] = field(default_factory=list)
    """Checkpoint tensors with elements that flow into computed values."""
    only_copies: bool = False
    sources: list[int] = field(default_factory=list)
    owns: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    box_type_indices: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def append(self, checkpoint: int, start: Sequence[int], own: int, offset: int, box_type: BoxType) -> None:
        """Append a box of a checkpoint tensor."""
        self.sources.append(checkpoint)
        self.starts.extend(start)
        self._append_region(own, offset, box_type)

    def append_computed(self, operation: str, own: int, offset: int, box_type: BoxType) -> None:
        """Append a box of elements that an operation computed."""
        self.sources.append(-1 - self.operations.setdefault(operation, len(self.operations)))
        self._append_region(own, offset, box_type)

    def _append_region(self, own: int, offset: int, box_type: BoxType) -> None:
        self.owns.append(own)
        self.offsets.append(offset)
        self.box_type_indices.append(self.box_types.setdefault(box_type, len(self.box_types)))

    def build(self) -> PlacementMap:
        """Return the map. The builder must not be used afterwards."""
        columns = (self.sources, self.owns, self.offsets, self.box_type_indices, self.starts)
        return PlacementMap(
            self.checkpoint,
            self.own,
            dict(self.aliases),
            tuple(self.operations),
            tuple(self.box_types),
            tuple(self.read_completely),
            *(_column(values) for values in columns),
            only_copies=self.only_copies,
        )


def _column(values: Sequence[int] | Column) -> Column:
    column = np.array(values, dtype=np.int64)
    column.flags.writeable = False
    return column


@dataclass(frozen=True, eq=False)
class PlacementMap:
    """Immutable map. Iterating it creates a `MapRow` per row; `rows_of_checkpoint` and the columns create none."""

    checkpoint: TensorTable
    own: TensorTable
    aliases: Mapping[str, str]
    operations: tuple[str, ...]
    box_types: tuple[BoxType, ...]
    read_completely: tuple[str, ...]
    """Checkpoint tensors with elements that flow into computed values: the loader needs all of their elements."""
    sources: Column
    """Index of each row's checkpoint tensor, or -1 minus the index of the operation that computed its elements."""
    owns: Column
    offsets: Column
    box_type_indices: Column
    starts: Column
    """First index of each row in its checkpoint tensor, one after another; none for computed rows."""
    only_copies: bool = field(default=False, kw_only=True)
    """True if the rows may also be filled after the loader has run without their values: it reads no own tensor, and
    writes none once it has read the last checkpoint tensor. Known where the map was recorded; not encoded.
    """

    def __len__(self) -> int:
        return len(self.sources)

    def __eq__(self, other: object) -> bool:
        return self.to_bytes() == other.to_bytes() if isinstance(other, PlacementMap) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    @cached_property
    def start_positions(self) -> Column:
        """Position in `starts` of each row's first index."""
        ranks = np.array([len(box_type.sizes) for box_type in self.box_types], dtype=np.int64)
        used = np.where(self.sources >= 0, ranks[self.box_type_indices] if len(ranks) else 0, 0)
        return _column(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(used)]))

    def row_boxes(self, rank: int) -> RowBoxes:
        """Return the boxes of the rows for checkpoint tensors of `rank` dimensions."""
        begins = self.start_positions[:-1]
        rows = np.flatnonzero((self.sources >= 0) & (np.diff(self.start_positions) == rank))
        starts = self.starts[begins[rows][:, None] + np.arange(rank)]
        of_rank = [(each.sizes if len(each.sizes) == rank else (0,) * rank) for each in self.box_types]
        sizes = np.array(of_rank, dtype=np.int64).reshape(len(of_rank), rank)[self.box_type_indices[rows]]
        return RowBoxes(rows, self.sources[rows], starts, starts + sizes)

    def __iter__(self) -> Iterator[MapRow]:
        positions = self.start_positions.tolist()
        starts = self.starts.tolist()
        for row, (source, own, offset, box_type) in enumerate(
            zip(*(column.tolist() for column in self._row_columns), strict=True)
        ):
            sizes, strides = self.box_types[box_type]
            name = self.checkpoint.names[source] if source >= 0 else ""
            operation = "" if source >= 0 else self.operations[-1 - source]
            start = tuple(starts[positions[row] : positions[row + 1]])
            yield MapRow(name, start, sizes, self.own.names[own], offset, strides, operation)

    @property
    def _row_columns(self) -> tuple[Column, Column, Column, Column]:
        return self.sources, self.owns, self.offsets, self.box_type_indices

    def only(self, own: Collection[str], reason: str) -> PlacementMap:
        """Return the map in which the elements of own tensors that are not named are computed, for a reason.

        Its tables are the same.
        """
        is_named = np.array([name in own for name in self.own.names], dtype=bool)
        kept = is_named[self.owns] | (self.sources < 0)
        if kept.all():
            return self
        operations = self.operations if reason in self.operations else (*self.operations, reason)
        counts = np.diff(self.start_positions)
        return replace(
            self,
            operations=operations,
            sources=_column(np.where(kept, self.sources, -1 - operations.index(reason))),
            starts=_column(self.starts[np.repeat(kept, counts)]),
        )

    @cached_property
    def rows_of_checkpoint(self) -> Mapping[int, Sequence[int]]:
        """Rows of each checkpoint tensor that has any."""
        rows: dict[int, list[int]] = {}
        for row, source in enumerate(self.sources.tolist()):
            if source >= 0:
                rows.setdefault(source, []).append(row)
        return rows

    @cached_property
    def unwritten_elements(self) -> Mapping[str, int]:
        """Number of elements of each own tensor that loading never wrote or filled with a constant, if any."""
        counts = np.array([prod(box_type.sizes) for box_type in self.box_types], dtype=np.int64)
        fills = np.array([operation in FILL_OPERATIONS for operation in self.operations] or [False])
        is_filled = (self.sources < 0) & fills[np.clip(-1 - self.sources, 0, None)]
        written = np.zeros(len(self.own), dtype=np.int64)
        kept = ~is_filled
        if len(counts):
            np.add.at(written, self.owns[kept], counts[self.box_type_indices[kept]])
        return {
            name: prod(self.own.type_of(index).shape) - count
            for index, (name, count) in enumerate(zip(self.own.names, written.tolist(), strict=True))
            if count < prod(self.own.type_of(index).shape)
        }

    @cached_property
    def computed(self) -> Mapping[str, str]:
        """Own tensors with elements that were computed from other values than constants, and the first operation."""
        found: dict[str, str] = {}
        for row in np.flatnonzero(self.sources < 0).tolist():
            operation = self.operations[-1 - int(self.sources[row])]
            if operation not in FILL_OPERATIONS:
                found.setdefault(self.own.names[int(self.owns[row])], operation)
        return found

    def to_bytes(self) -> bytes:
        """Return the encoded map. Equal maps have equal bytes."""
        header = {
            "checkpoint": _encoded_table(self.checkpoint),
            "own": _encoded_table(self.own),
            "aliases": dict(self.aliases),
            "operations": self.operations,
            "box_types": self.box_types,
            "read_completely": self.read_completely,
            "rows": len(self),
            "starts": len(self.starts),
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        columns = [column.astype("<i8").tobytes() for column in (*self._row_columns, self.starts)]
        indices = [np.array(table.type_indices, dtype="<i8").tobytes() for table in (self.checkpoint, self.own)]
        body = b"".join([struct.pack("<Q", len(text)), text, *indices, *columns])
        return MAP_FORMAT.packed(body)

    @classmethod
    @gc_paused()
    def from_bytes(cls, data: bytes) -> PlacementMap:
        """Return the map that was encoded. Raises ValueError if the bytes are no valid map of this format version."""
        body = MAP_FORMAT.unpacked(data)
        try:
            decoded = _decoded(body)
            decoded._validate()
        except DECODING_ERRORS as error:
            raise ValueError(f"invalid placement map: {error}") from error
        return decoded

    def _validate(self) -> None:
        """Raise ValueError if an index or a box is outside its table or tensor."""
        if not self.checkpoint.positions.keys() >= set(self.read_completely):
            raise ValueError("a checkpoint tensor that is not in its table")
        rows = len(self)
        if any(len(column) != rows for column in self._row_columns):
            raise ValueError("columns differ in length")
        if not rows:
            if len(self.starts):
                raise ValueError("first indices without rows")
            return
        _require_within(self.sources, -len(self.operations), len(self.checkpoint))
        _require_within(self.owns, 0, len(self.own))
        _require_within(self.box_type_indices, 0, len(self.box_types))
        if len(self.starts) != self.start_positions[-1]:
            raise ValueError("the number of first indices does not match the rows")
        for box_type in self.box_types:
            if len(box_type.sizes) != len(box_type.strides) or min((*box_type.sizes, 1)) < 1:
                raise ValueError("a box without elements")
            if min((*box_type.strides, 0)) < 0:
                raise ValueError("a negative stride")
        own_bytes = np.array([_extent(self.own.type_of(index)) for index in range(len(self.own))], dtype=np.int64)
        own_itemsizes = np.array([each.itemsize for each in self.own.types], dtype=np.int64)[self.own.type_indices]
        spans = np.array(
            [sum((n - 1) * step for n, step in zip(*each, strict=True)) for each in self.box_types], dtype=np.int64
        )
        ends = self.offsets + spans[self.box_type_indices] + own_itemsizes[self.owns]
        if self.offsets.min() < 0 or np.any(ends > own_bytes[self.owns]):
            raise ValueError("a box outside its own tensor")
        starts = self.starts.tolist()
        positions = self.start_positions.tolist()
        for row, source in enumerate(self.sources.tolist()):
            if source >= 0:
                shape = self.checkpoint.type_of(source).shape
                sizes = self.box_types[int(self.box_type_indices[row])].sizes
                start = starts[positions[row] : positions[row + 1]]
                for first, size, limit in zip(start, sizes, shape, strict=True):
                    if first < 0 or first + size > limit:
                        raise ValueError("a box outside its checkpoint tensor")


def _require_within(column: Column, minimum: int, end: int) -> None:
    if column.min() < minimum or column.max() >= end:
        raise ValueError("an index outside its table")


def _extent(tensor_type: TensorType) -> int:
    if 0 in tensor_type.shape:
        return 0
    steps = zip(tensor_type.shape, tensor_type.strides, strict=True)
    return sum((size - 1) * step for size, step in steps) + tensor_type.itemsize


def _encoded_table(table: TensorTable) -> dict[str, Any]:
    return {"names": table.names, "types": table.types}


def _decoded(body: bytes) -> PlacementMap:
    (text_size,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + text_size])
    position = 8 + text_size

    def column(length: int) -> Column:
        nonlocal position
        values = np.frombuffer(body, dtype="<i8", count=length, offset=position)
        position += values.nbytes
        return _column(values)

    tables = []
    for name in ("checkpoint", "own"):
        encoded = header[name]
        names = [_text(each) for each in encoded["names"]]
        types = [
            TensorType(_text(dtype), _positive(itemsize), _sizes(shape), _sizes(strides))
            for dtype, itemsize, shape, strides in encoded["types"]
        ]
        indices = column(len(names))
        if len(names):
            _require_within(indices, 0, len(types))
        tables.append(TensorTable(names, (types[index] for index in indices.tolist())))
    rows = _size(header["rows"])
    columns = [column(length) for length in (rows, rows, rows, rows, _size(header["starts"]))]
    if position != len(body):
        raise ValueError("bytes after the columns")
    return PlacementMap(
        tables[0],
        tables[1],
        {_text(name): _text(owner) for name, owner in header["aliases"].items()},
        tuple(_text(each) for each in header["operations"]),
        tuple(BoxType(_sizes(sizes), _sizes(strides)) for sizes, strides in header["box_types"]),
        tuple(_text(each) for each in header["read_completely"]),
        *columns,
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise TypeError("not a size")
    return value


def _positive(value: object) -> int:
    if not _size(value):
        raise ValueError("an item size of 0")
    return _size(value)


def _sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError("not a list of sizes")
    return tuple(_size(value) for value in values)
