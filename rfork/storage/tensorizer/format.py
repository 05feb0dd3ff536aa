"""The bytes of a ``.tensors`` file: an index in front, then each tensor behind a header with its hashes.

The format is tensorizer's (https://github.com/coreweave/tensorizer), data versions 1 to 5. Little-endian:
``|TZR|``, u32 version, 32 bytes of flags, u64 bytes of tensors, 8 bytes unused, u64 count of tensors, u64
length of the index, the index, the tensors, and a u64 of 0 as the end. Nothing is aligned.
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
"""What stands before the index: magic, version, flags, bytes of tensors, their count, length of the index."""
FRONT = HEAD.size + (256 << 10)
"""What tensorizer leaves room for in front of the tensors."""
END = bytes(8)
"""Where the length of one more header would be."""

LONG_DIMENSION = 1 << 32
"""Shapes with such a dimension are written with 8 bytes a dimension, in data version 5."""

EntryType = Literal["parameter", "buffer", "entry"]
"""What tensorizer's own loader makes of a tensor: a module's parameter or buffer, or a state dict's entry."""
ENTRY_TYPES: tuple[EntryType, ...] = ("parameter", "buffer", "entry")

_TYPES: Mapping[torch.dtype, str] = {
    torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2",
    torch.int64: "<i8", torch.int32: "<i4", torch.int16: "<i2", torch.int8: "|i1",
    torch.uint64: "<u8", torch.uint32: "<u4", torch.uint16: "<u2", torch.uint8: "|u1",
    torch.bool: "|b1", torch.complex128: "<c16", torch.complex64: "<c8",
}  # fmt: skip
"""numpy's names; any other type is ``V`` with its size, and torch's name behind a zero byte."""
_BY_NAME = {name: dtype for dtype, name in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the index has it: `header` and `data` are file offsets, `length` its bytes there."""

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
    """How a file names a type."""
    plain = _TYPES.get(dtype)
    if plain is None:
        plain = f"{'|' if dtype.itemsize == 1 else '<'}V{dtype.itemsize}\0{dtype}"
    return plain.encode()


def dtype_named(name: bytes) -> torch.dtype:
    """The type of that name. Raises CheckpointError where torch has none."""
    text = name.decode("utf-8", "replace")
    plain, _, opaque = text.partition("\0")
    dtype = _BY_NAME.get(plain)
    if opaque:
        found = getattr(torch, opaque.removeprefix("torch."), None)
        if isinstance(found, torch.dtype) and plain in (f"<V{found.itemsize}", f"|V{found.itemsize}"):
            dtype = found
    if dtype is None:
        raise CheckpointError(f"a tensor of type {opaque or plain!r}, which torch has not on this machine")
    return dtype


class ByteCursor:
    """Fields of a buffer, from `at` on, none of them past `end`."""

    def __init__(self, buffer: bytes, at: int, end: int) -> None:
        self._buffer = buffer
        self.at = at
        self._end = min(end, len(buffer))

    def next_bytes(self, length: int) -> bytes:
        """The next bytes. Raises ValueError at the end."""
        if length < 0 or self.at + length > self._end:
            raise ValueError(f"it ends at byte {self._end}")
        self.at += length
        return self._buffer[self.at - length : self.at]

    def unpack(self, form: str) -> tuple[int, ...]:
        """The next numbers."""
        return struct.unpack(form, self.next_bytes(struct.calcsize(form)))


def type_and_shape(entry: TensorEntry) -> bytes:
    """The part that index and header have in common."""
    shape = entry.spec.shape
    return (
        struct.pack("<B", len(entry.type_name))
        + entry.type_name
        + struct.pack(f"<B{len(shape)}{'Q' if entry.long else 'I'}", len(shape), *shape)
    )
