"""The header of one tensor in a ``.tensors`` file: what it is, its hashes, how it is encrypted."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from rfork.storage.tensorizer.format import ENTRY_TYPES, ByteCursor, TensorEntry, type_and_shape

CRC32, SHA256 = 0, 1


class EncryptorProtocol(Protocol):
    """What a file is encrypted under. Thread-safe."""

    def seal(self, data: memoryview) -> bytes:
        """Encrypt host memory in place; how that was done, for the tensor's header."""
        ...

    def sealed_size(self, length: int) -> int:
        """The length of what `seal` returns for so many bytes."""
        ...


def header_size(entry: TensorEntry, lock: EncryptorProtocol | None) -> int:
    """The length of a tensor's own header."""
    hashes, crypt = (40, 0) if lock is None else (34, lock.sealed_size(entry.length))
    return 13 + len(entry.stored_name) + len(type_and_shape(entry)) + 3 + hashes + crypt + 8


def write_header(entry: TensorEntry, data: memoryview, lock: EncryptorProtocol | None) -> bytes:
    """A tensor's own header; `data` is encrypted in place where there is a lock.

    The hashes are over the header, with zeros in their places and without how it is encrypted, and the data.
    """
    before = struct.pack(
        "<QHBH", header_size(entry, lock), 0, ENTRY_TYPES.index(entry.entry_type), len(entry.stored_name)
    )
    before += entry.stored_name + type_and_shape(entry)
    length_field = struct.pack("<q", entry.length)

    def hashed(crc: int, sha: bytes) -> bytes:
        strong = struct.pack("<BB32s", SHA256, 32, sha)
        if lock is None:
            return struct.pack("<HBBBI", 41, 2, CRC32, 4, crc) + strong
        return struct.pack("<HB", 35, 1) + strong

    blank = before + hashed(0, bytes(32)) + length_field
    state = sha256(blank)
    state.update(data)
    # A CRC of what is encrypted would tell of its content.
    crc = zlib.crc32(data, zlib.crc32(blank)) if lock is None else 0
    crypt = lock.seal(data) if lock is not None else b""
    return before + hashed(crc, state.digest()) + crypt + length_field


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor's own header: `blank` is what the hashes cover of it, `crypt` how the data is encrypted."""

    blank: bytes
    hashes: Mapping[int, bytes]
    crypt: bytes

    def fits(self, data: memoryview) -> bool:
        """Whether header and (decrypted) data have the hash that the header names.

        SHA-256 is the one that counts, where there is one; it takes the time of the CRC over again.
        """
        if SHA256 in self.hashes:
            state = sha256(self.blank)
            state.update(data)
            return state.digest() == self.hashes[SHA256]
        return zlib.crc32(data, zlib.crc32(self.blank)) == int.from_bytes(self.hashes[CRC32], "little")


def read_header(entry: TensorEntry, header: bytes, *, encrypted: bool) -> TensorHeader:
    """Take a tensor's own header apart.

    Raises ValueError where it cannot be read, has no hash, or is of another tensor than the index says.
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
        raise ValueError("its header is not the one that the index tells of")
    if not hashes.keys() & {CRC32, SHA256}:
        raise ValueError("it has no hash")
    return TensorHeader(bytes(blank), hashes, crypt)
