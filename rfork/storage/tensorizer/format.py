"""Binary format of a ``.tensors`` file: an index, then each tensor after a header with its hashes.

The format is tensorizer's (https://github.com/coreweave/tensorizer), data versions 1 to 5. Little-endian:
``|TZR|``, u32 version, 32 bytes of flags, u64 bytes of tensors, 8 bytes unused, u64 number of tensors, u64
length of the index, the index, the tensors, and a u64 of 0 at the end. Nothing is aligned.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from rfork.errors import CheckpointError, StorageCorrupt
from rfork.storage.tensors import EntryType, StoredTensor

MAGIC = b"|TZR|"
HEAD = struct.Struct("<5sI32sQ8xQQ")
"""Fields before the index: magic, version, flags, bytes of tensors, their number, length of the index."""
FRONT = HEAD.size + (256 << 10)
"""Space that tensorizer reserves before the tensors."""
END = bytes(8)
"""Zero in the position of the next header's length."""

LONG_DIMENSION = 1 << 32
"""From this size of a dimension, shapes are written with 8 bytes per dimension, in data version 5."""

ENTRY_TYPES: tuple[EntryType, ...] = ("parameter", "buffer", "entry")

_TYPES: Mapping[torch.dtype, str] = {
    torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2",
    torch.int64: "<i8", torch.int32: "<i4", torch.int16: "<i2", torch.int8: "|i1",
    torch.uint64: "<u8", torch.uint32: "<u4", torch.uint16: "<u2", torch.uint8: "|u1",
    torch.bool: "|b1", torch.complex128: "<c16", torch.complex64: "<c8",
}  # fmt: skip
"""numpy's names; other dtypes are ``V`` with their size, a zero byte and torch's name."""
_BY_NAME = {name: dtype for dtype, name in _TYPES.items()}


CRC32, SHA256 = 0, 1
ENCRYPTED, VERSIONED = 1, 2
MAX_HEADER_BYTES = 64 << 20
"""Maximum size of a tensor's header; longer ones are rejected."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in the index: `header` and `data` are file offsets, `length` its size in bytes."""

    name: str
    stored_name: bytes
    entry_type: EntryType
    type_name: bytes
    spec: StoredTensor
    header: int
    data: int
    length: int
    long: bool = False


def type_name(dtype: torch.dtype) -> bytes:
    """Return the name of a dtype in a file."""
    plain = _TYPES.get(dtype)
    if plain is None:
        plain = f"{'|' if dtype.itemsize == 1 else '<'}V{dtype.itemsize}\0{dtype}"
    return plain.encode()


def dtype_named(name: bytes) -> torch.dtype:
    """Return the dtype of this name. Raises CheckpointError if torch has none."""
    text = name.decode("utf-8", "replace")
    plain, _, opaque = text.partition("\0")
    dtype = _BY_NAME.get(plain)
    if opaque:
        found = getattr(torch, opaque.removeprefix("torch."), None)
        if isinstance(found, torch.dtype) and plain in (f"<V{found.itemsize}", f"|V{found.itemsize}"):
            dtype = found
    if dtype is None:
        raise CheckpointError(f"a tensor has dtype {opaque or plain!r}, which this torch does not support")
    return dtype


class ByteCursor:
    """Cursor over the fields of a buffer, from `at`, bounded by `end`."""

    def __init__(self, buffer: bytes, at: int, end: int) -> None:
        self._buffer = buffer
        self.at = at
        self._end = min(end, len(buffer))

    def next_bytes(self, length: int) -> bytes:
        """Return the next bytes. Raises ValueError at the end."""
        if length < 0 or self.at + length > self._end:
            raise ValueError(f"unexpected end at byte {self._end}")
        self.at += length
        return self._buffer[self.at - length : self.at]

    def unpack(self, form: str) -> tuple[int, ...]:
        """Return the next numbers."""
        return struct.unpack(form, self.next_bytes(struct.calcsize(form)))


def type_and_shape(entry: TensorEntry) -> bytes:
    """Encode dtype and shape, as in the index and in the header."""
    shape = entry.spec.shape
    return (
        struct.pack("<B", len(entry.type_name))
        + entry.type_name
        + struct.pack(f"<B{len(shape)}{'Q' if entry.long else 'I'}", len(shape), *shape)
    )


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Parsed header of a tensor: `blank` is the part that the hashes cover, `crypt` the encryption
    parameters.
    """

    blank: bytes
    hashes: Mapping[int, bytes]
    crypt: bytes

    def fits(self, data: memoryview) -> bool:
        """Return True if header and (decrypted) data match the hash in the header.

        Checks SHA-256 if present, otherwise the CRC, because checking both would double the time.
        """
        if SHA256 in self.hashes:
            state = sha256(self.blank)
            state.update(data)
            return state.digest() == self.hashes[SHA256]
        return zlib.crc32(data, zlib.crc32(self.blank)) == int.from_bytes(self.hashes[CRC32], "little")


def read_header(entry: TensorEntry, header: bytes, *, encrypted: bool) -> TensorHeader:
    """Parse a tensor's header.

    Raises ValueError if it cannot be parsed, has no hash, or belongs to another tensor than in the index.
    """
    try:
        cursor = ByteCursor(header, 0, len(header))
        size, _, entry_type_code, length = cursor.unpack("<QHBH")
        same = (size, ENTRY_TYPES[entry_type_code], cursor.next_bytes(length)) == (
            len(header),
            entry.entry_type,
            entry.stored_name,
        )
        expected = type_and_shape(entry)
        same = same and cursor.next_bytes(len(expected)) == expected
        (block,) = cursor.unpack("<H")
        begin, end = cursor.at, cursor.at + block
        blank = bytearray(header)
        hashes: dict[int, bytes] = {}
        (count,) = cursor.unpack("<B")
        for _ in range(count):
            which, long = cursor.unpack("<BB")
            blank[cursor.at : cursor.at + long] = bytes(long)
            hashes[which] = cursor.next_bytes(long)
        same = same and cursor.at == end and begin < end
        crypt = b""
        if encrypted:
            start = cursor.at
            (long,) = cursor.unpack("<Q")
            crypt = cursor.next_bytes(long)
            del blank[start : cursor.at]
        (length,) = cursor.unpack("<q")
        same = same and length == entry.length and cursor.at == len(header)
    except (struct.error, IndexError) as error:
        raise ValueError(str(error)) from None
    if not same:
        raise ValueError("the header does not match the index")
    if not hashes.keys() & {CRC32, SHA256}:
        raise ValueError("the header has no hash")
    return TensorHeader(bytes(blank), hashes, crypt)


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
