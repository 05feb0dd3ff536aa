"""Index of a ``.tensors`` file: its tensors and their locations. See `rfork.storage.tensorizer.format`."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rfork.errors import CheckpointError, StorageCorrupt
from rfork.storage.tensorizer.format import (
    END,
    ENTRY_TYPES,
    HEAD,
    MAGIC,
    ByteCursor,
    EntryType,
    TensorEntry,
    dtype_named,
    type_and_shape,
)
from rfork.storage.tensors import StoredTensor

ENCRYPTED, VERSIONED = 1, 2
MAX_HEADER_BYTES = 64 << 20
"""Maximum size of a tensor's header; longer ones are rejected."""


@dataclass(frozen=True, slots=True)
class Index:
    """Parsed front of a file."""

    encrypted: bool
    entries: Sequence[TensorEntry]


def index_length(uri: str, front: bytes) -> int:
    """Return the offset of the end of the index; `front` must have at least `HEAD.size` bytes.

    Raises StorageCorrupt if it is not a ``.tensors`` file.
    """
    if len(front) < HEAD.size or not front.startswith(MAGIC):
        raise StorageCorrupt(f"{uri} is not a .tensors file")
    return HEAD.size + int(HEAD.unpack_from(front)[5])


def read_index(uri: str, front: bytes, size: int) -> Index:
    """Parse the index from `front`, the first `index_length` bytes of a file of `size` bytes.

    Raises StorageCorrupt if it cannot be parsed, or refers to bytes beyond the end of the file.
    """
    _, version, flags, _, count, length = HEAD.unpack_from(front)
    if not 1 <= version <= 5:
        raise CheckpointError(f"{uri}: data version {version} of .tensors files is not supported")
    flag = int.from_bytes(flags, "little") if version >= 4 else 0
    encrypted = version == 3 or bool(flag & ENCRYPTED)
    cursor = ByteCursor(front, HEAD.size, HEAD.size + length)
    entries: list[TensorEntry] = []
    try:
        for _ in range(count):
            entries.append(_entry(cursor, versioned=bool(flag & VERSIONED)))
    except CheckpointError as error:
        raise CheckpointError(f"{uri}: {error}") from None
    except (ValueError, struct.error, IndexError, RecursionError) as error:
        raise StorageCorrupt(f"{uri}: the index cannot be parsed: {error}") from None
    begin = HEAD.size + length
    for entry in entries:
        if not begin <= entry.header <= entry.data - 8 or entry.data - entry.header > MAX_HEADER_BYTES:
            raise StorageCorrupt(f"{uri}: invalid offsets of {entry.name} in the index")
        needed = entry.data + entry.length + len(END)
        if needed > size:
            raise StorageCorrupt(f"{uri} is truncated: it has {size} bytes, but {entry.name} ends at {needed - 8}")
        if entry.length not in (0, entry.spec.nbytes):
            raise StorageCorrupt(f"{uri}: {entry.name} has {entry.length} bytes, not {entry.spec.nbytes}")
    if len({entry.name for entry in entries}) != len(entries):
        raise StorageCorrupt(f"{uri}: the index contains a name twice")
    return Index(encrypted, entries)


def write_index(entries: Sequence[TensorEntry], *, encrypted: bool) -> bytes:
    """Return the front of a file with these tensors, whose `header` and `data` are relative to the end of the
    index.
    """
    long = any(entry.long for entry in entries)
    opaque = any(b"\0" in entry.type_name for entry in entries)
    version = 5 if long else 3 if encrypted else 2 if opaque else 1
    flags = (ENCRYPTED * encrypted | VERSIONED) if long else 0
    sizes = [_entry_size(entry) + 4 * long for entry in entries]
    begin = HEAD.size + sum(sizes)
    parts = [
        HEAD.pack(
            MAGIC,
            version,
            flags.to_bytes(32, "little"),
            sum(entry.length for entry in entries),
            len(entries),
            sum(sizes),
        )
    ]
    for entry in entries:
        if long:
            parts.append(struct.pack("<I", 5 if entry.long else 1))
        parts.append(struct.pack("<H", len(entry.stored_name)) + entry.stored_name)
        parts.append(struct.pack("<B", ENTRY_TYPES.index(entry.entry_type)) + type_and_shape(entry))
        parts.append(struct.pack("<QQQ", begin + entry.header, begin + entry.data, entry.length))
    return b"".join(parts)


def _entry(cursor: ByteCursor, *, versioned: bool) -> TensorEntry:
    long = versioned and cursor.unpack("<I")[0] >= 5
    stored_name = cursor.next_bytes(cursor.unpack("<H")[0])
    entry_type = ENTRY_TYPES[cursor.unpack("<B")[0]]
    type_bytes = cursor.next_bytes(cursor.unpack("<B")[0])
    dimensions = cursor.unpack("<B")[0]
    shape = cursor.unpack(f"<{dimensions}{'Q' if long else 'I'}")
    header, data, length = cursor.unpack("<QQQ")
    name = _name_of(stored_name, entry_type)
    try:
        dtype = dtype_named(type_bytes)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    spec = StoredTensor(dtype, shape, math.prod(shape) * dtype.itemsize)
    return TensorEntry(name, stored_name, entry_type, type_bytes, spec, header, data, length, long)


def _name_of(stored: bytes, entry_type: EntryType) -> str:
    """Return the name as in a state dict: nested parts are joined by dots."""
    if stored.startswith(b"\x1e"):
        return ".".join(str(part) for part in json.loads(stored[1:]))
    name = stored.decode()
    # Tensors of the root module are stored with an empty module name.
    return name.removeprefix(".") if entry_type != "entry" else name


def _entry_size(entry: TensorEntry) -> int:
    return 2 + len(entry.stored_name) + 1 + len(type_and_shape(entry)) + 24
