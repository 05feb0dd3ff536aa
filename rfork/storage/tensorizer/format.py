"""Binary format of a ``.tensors`` file: an index, then each tensor after a header with its hashes.

The format is tensorizer's (https://github.com/coreweave/tensorizer), data versions 1 to 5. Little-endian:
``|TZR|``, u32 version, 32 bytes of flags, u64 bytes of tensors, 8 bytes unused, u64 number of tensors, u64
length of the index, the index, the tensors, and a u64 of 0 at the end. Nothing is aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from rfork.errors import CheckpointError
from rfork.storage.tensors import StoredTensor

MAGIC = b"|TZR|"
HEAD = struct.Struct("<5sI32sQ8xQQ")
"""Fields before the index: magic, version, flags, bytes of tensors, their number, length of the index."""
FRONT = HEAD.size + (256 << 10)
"""Space that tensorizer reserves before the tensors."""
END = bytes(8)
"""Zero in the position of the next header's length."""

LONG_DIMENSION = 1 << 32
"""From this size of a dimension, shapes are written with 8 bytes per dimension, in data version 5."""

EntryType = Literal["parameter", "buffer", "entry"]
"""Type of a tensor in tensorizer's own loader: a module's parameter or buffer, or a state dict's entry."""
ENTRY_TYPES: tuple[EntryType, ...] = ("parameter", "buffer", "entry")

_TYPES: Mapping[torch.dtype, str] = {
    torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2",
    torch.int64: "<i8", torch.int32: "<i4", torch.int16: "<i2", torch.int8: "|i1",
    torch.uint64: "<u8", torch.uint32: "<u4", torch.uint16: "<u2", torch.uint8: "|u1",
    torch.bool: "|b1", torch.complex128: "<c16", torch.complex64: "<c8",
}  # fmt: skip
"""numpy's names; other dtypes are ``V`` with their size, a zero byte and torch's name."""
_BY_NAME = {name: dtype for dtype, name in _TYPES.items()}


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
