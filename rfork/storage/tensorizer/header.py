"""Header of one tensor in a ``.tensors`` file: metadata, hashes and encryption parameters."""

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
    """Encrypts the tensors of a file. Thread-safe."""

    def seal(self, data: memoryview) -> bytes:
        """Encrypt host memory in place; return the parameters for the tensor's header."""
        ...

    def sealed_size(self, length: int) -> int:
        """Return the size of the result of `seal` for `length` bytes."""
        ...


def header_size(entry: TensorEntry, encryptor: EncryptorProtocol | None) -> int:
    """Return the size of a tensor's header."""
    hashes, crypt = (40, 0) if encryptor is None else (34, encryptor.sealed_size(entry.length))
    return 13 + len(entry.stored_name) + len(type_and_shape(entry)) + 3 + hashes + crypt + 8


def write_header(entry: TensorEntry, data: memoryview, encryptor: EncryptorProtocol | None) -> bytes:
    """Return a tensor's header; encrypts `data` in place if `encryptor` is given.

    The hashes cover the header, with zeros in place of the hashes and without the encryption parameters, and
    the data.
    """
    before = struct.pack(
        "<QHBH", header_size(entry, encryptor), 0, ENTRY_TYPES.index(entry.entry_type), len(entry.stored_name)
    )
    before += entry.stored_name + type_and_shape(entry)
    length_field = struct.pack("<q", entry.length)

    def hashed(crc: int, sha: bytes) -> bytes:
        strong = struct.pack("<BB32s", SHA256, 32, sha)
        if encryptor is None:
            return struct.pack("<HBBBI", 41, 2, CRC32, 4, crc) + strong
        return struct.pack("<HB", 35, 1) + strong

    blank = before + hashed(0, bytes(32)) + length_field
    state = sha256(blank)
    state.update(data)
    # A CRC of encrypted data would leak information about its content.
    crc = zlib.crc32(data, zlib.crc32(blank)) if encryptor is None else 0
    crypt = encryptor.seal(data) if encryptor is not None else b""
    return before + hashed(crc, state.digest()) + crypt + length_field


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
