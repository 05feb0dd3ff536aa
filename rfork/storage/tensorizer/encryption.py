"""Encrypted ``.tensors`` files: keys, passwords, and libsodium's secretbox over blocks of each tensor.

A tensor is cut in blocks of 2 MiB, each encrypted by XSalsa20 and authenticated by Poly1305; the nonces count
up from the first. A password becomes a key by Argon2id, with a salt that the file names.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rfork.errors import MissingExtra, SettingsError, StorageAccessDenied
from rfork.storage.tensorizer.format import ByteCursor

KEY_BYTES, NONCE_BYTES, TAG_BYTES, SALT_BYTES = 32, 24, 16, 16
BLOCK = 2 << 20
DERIVATION, IN_BLOCKS = 1, 2
ARGON2, ARGON2ID = 1, 2
MODERATE_OPERATIONS, MODERATE_MEMORY = 3, 256 << 20
"""libsodium's "moderate" costs of a password: half a second."""
MAX_OPERATIONS, MAX_MEMORY = 1000, 4 << 30
"""A password is not tried on a file that asks for more."""


@dataclass(frozen=True)
class Secret:
    """What opens an encrypted file: a key of 32 bytes, or a password. Neither shows in its repr."""

    key: bytes | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, key: bytes | None, password: str | None) -> Secret | None:
        """Take either; None for neither. Raises SettingsError for both, or for one that is none."""
        if key is None and password is None:
            return None
        if key is not None and password is not None:
            raise SettingsError("give a key or a password, not both")
        if key is not None and len(key) != KEY_BYTES:
            raise SettingsError(f"an encryption key has {KEY_BYTES} bytes; this one has {len(key)}")
        if password == "":
            raise SettingsError("an empty password protects nothing")
        return cls(key, password)

    @classmethod
    def from_files(cls, key: Path | None, password: Path | None) -> Secret | None:
        """Read a key (32 bytes, or 64 hex digits) or a password (the first line) from a file.

        Raises SettingsError where it cannot be read, or is neither.
        """
        password_lines = None if password is None else _read(password).decode("utf-8", "replace").splitlines()[:1]
        if password_lines is not None and not password_lines:
            raise SettingsError(f"{password} is empty")
        return cls.of(None if key is None else _key_in(key), password_lines[0] if password_lines else None)


class Encryptor:
    """See `rfork.storage.tensorizer.header.EncryptorProtocol`."""

    def __init__(self, secret: Secret) -> None:
        """Raises MissingExtra where libsodium is not there; takes half a second for a password."""
        self._load_libsodium = _load_libsodium()
        self._derivation = b""
        if secret.key is not None:
            self._key = secret.key
        else:
            salt, costs = os.urandom(SALT_BYTES), (MODERATE_OPERATIONS, MODERATE_MEMORY, ARGON2ID)
            self._key = _derived(self._load_libsodium, secret.password or "", Derivation(*costs, salt))
            self._derivation = _sized(struct.pack("<HHQQiH", DERIVATION, ARGON2, *costs, SALT_BYTES) + salt)

    def seal(self, data: memoryview) -> bytes:
        """See `EncryptorProtocol.seal`."""
        if not data.nbytes:
            return _sized(struct.pack("<H", 0))
        nonce = os.urandom(NONCE_BYTES)
        tags = b""
        for step, block in enumerate(_blocks(data, BLOCK)):
            buffer, tag = _address(block), (ctypes.c_ubyte * TAG_BYTES)()
            length, at = ctypes.c_ulonglong(block.nbytes), _nonce(nonce, step)
            self._load_libsodium.crypto_secretbox_detached(buffer, tag, buffer, length, at, self._key)
            tags += bytes(tag)
        how = struct.pack("<HQ24sQ", IN_BLOCKS, BLOCK, nonce, len(tags) // TAG_BYTES) + tags
        return _sized(struct.pack("<H", 1 + bool(self._derivation)) + self._derivation + _sized(how))

    def sealed_size(self, length: int) -> int:
        """See `EncryptorProtocol.sealed_size`."""
        if not length:
            return 10
        return 10 + len(self._derivation) + 8 + 42 + TAG_BYTES * -(-length // BLOCK)


class Decryptor:
    """Decrypts what was encrypted under one secret. Thread-safe."""

    def __init__(self, secret: Secret) -> None:
        """Raises MissingExtra where libsodium is not there."""
        self._load_libsodium = _load_libsodium()
        self._secret = secret
        self._keys: dict[Derivation, bytes] = {}
        self._lock = threading.Lock()

    def open(self, crypt: bytes, data: memoryview) -> None:
        """Decrypt host memory in place, by what the tensor's header says of it.

        Raises StorageAccessDenied for a wrong key or password (or bytes that are not what was written: the two
        cannot be told apart), ValueError where `crypt` cannot be read.
        """
        how = _parse_params(crypt, data.nbytes)
        if not data.nbytes:
            return
        key = self._key(how.derivation)
        for step, block in enumerate(_blocks(data, how.block)):
            buffer, tag = _address(block), how.tags[step * TAG_BYTES : (step + 1) * TAG_BYTES]
            length, nonce = ctypes.c_ulonglong(block.nbytes), _nonce(how.nonce, step)
            if self._load_libsodium.crypto_secretbox_open_detached(buffer, buffer, tag, length, nonce, key):
                raise StorageAccessDenied("wrong key or password, or its bytes were changed")

    def _key(self, derivation: Derivation | None) -> bytes:
        if self._secret.key is not None:
            return self._secret.key
        if self._secret.password is None or derivation is None:
            raise StorageAccessDenied("it was encrypted with a key, not with a password")
        # All tensors of a file ask for the same key, and making it takes half a second.
        with self._lock:
            key = self._keys.get(derivation)
            if key is None:
                key = self._keys[derivation] = _derived(self._load_libsodium, self._secret.password, derivation)
            return key


@dataclass(frozen=True, slots=True)
class Derivation:
    """How a password becomes a key: Argon2id's costs and salt."""

    operations: int
    memory: int
    algorithm: int
    salt: bytes


@dataclass(frozen=True, slots=True)
class _EncryptionParams:
    """How one tensor is encrypted: `tags` has 16 bytes a block of `block` bytes."""

    derivation: Derivation | None
    block: int
    nonce: bytes
    tags: bytes


def _parse_params(crypt: bytes, length: int) -> _EncryptionParams:
    """Take that apart, for a tensor of `length` bytes. Raises ValueError."""
    derivation, block, nonce, tags = None, 0, b"", b""
    cursor = ByteCursor(crypt, 0, len(crypt))
    for _ in range(cursor.unpack("<H")[0]):
        part = cursor.next_bytes(cursor.unpack("<Q")[0])
        inner = ByteCursor(part, 2, len(part))
        match int.from_bytes(part[:2], "little"):
            case 1:
                method, operations, memory, algorithm, salt = inner.unpack("<HQQiH")
                if method != ARGON2:
                    raise ValueError("its key was made in a way that is not known here")
                derivation = Derivation(operations, memory, algorithm, inner.next_bytes(salt))
            case 2:
                (block,) = inner.unpack("<Q")
                nonce = inner.next_bytes(NONCE_BYTES)
                tags = inner.next_bytes(TAG_BYTES * inner.unpack("<Q")[0])
            case 3:
                block, nonce, tags = length, inner.next_bytes(NONCE_BYTES), inner.next_bytes(TAG_BYTES)
    # One tag is over the whole tensor, whatever the block.
    block = length if len(tags) == TAG_BYTES else block
    if length and (block <= 0 or len(tags) != TAG_BYTES * -(-length // block)):
        raise ValueError("it does not say how it is encrypted")
    return _EncryptionParams(derivation, block, nonce, tags)


class _Sodium(Protocol):
    """The functions of libsodium that are called; each returns 0 where it worked."""

    crypto_secretbox_detached: Callable[..., int]
    crypto_secretbox_open_detached: Callable[..., int]
    crypto_pwhash: Callable[..., int]


def _load_libsodium() -> _Sodium:
    try:
        import libnacl  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:
        raise MissingExtra("libsodium, for encrypted .tensors files,", extra="tensorizer", why=str(error)) from None
    library: _Sodium = libnacl.nacl
    return library


def _derived(sodium: _Sodium, password: str, derivation: Derivation) -> bytes:
    """The key of a password. Raises ValueError where it cannot be made."""
    operations, memory = derivation.operations, derivation.memory
    if (
        derivation.algorithm != ARGON2ID
        or len(derivation.salt) != SALT_BYTES
        or operations > MAX_OPERATIONS
        or memory > MAX_MEMORY
    ):
        raise ValueError("its key was made in a way that is not known here")
    key = ctypes.create_string_buffer(KEY_BYTES)
    password_bytes = password.encode()
    failed = sodium.crypto_pwhash(
        key, ctypes.c_ulonglong(KEY_BYTES), password_bytes, ctypes.c_ulonglong(len(password_bytes)), derivation.salt,
        ctypes.c_ulonglong(operations), ctypes.c_size_t(memory), ARGON2ID,
    )  # fmt: skip
    if failed:
        raise ValueError("no key could be made of the password: memory is short, or its costs are out of range")
    return key.raw


def _blocks(data: memoryview, size: int) -> list[memoryview]:
    return [data[at : at + size] for at in range(0, data.nbytes, size)]


def _nonce(first: bytes, step: int) -> bytes:
    """The nonce of a block: the first one, counted up as a little-endian number."""
    return ((int.from_bytes(first, "little") + step) % (1 << 8 * NONCE_BYTES)).to_bytes(NONCE_BYTES, "little")


def _address(block: memoryview) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * block.nbytes).from_buffer(block)


def _sized(part: bytes) -> bytes:
    return struct.pack("<Q", len(part)) + part


def _key_in(path: Path) -> bytes:
    raw = _read(path)
    if len(raw) == KEY_BYTES:
        return raw
    try:
        return bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        raise SettingsError(f"{path} holds no key: that is 32 bytes, or 64 hex digits") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(1 << 16)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from None
