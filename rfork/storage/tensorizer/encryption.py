"""Encrypted ``.tensors`` files: keys, passwords, and libsodium's secretbox over blocks of each tensor.

A tensor is split into blocks of 2 MiB, each encrypted with XSalsa20 and authenticated with Poly1305; nonces
count up from the first. The key is derived from a password with Argon2id and a salt stored in the file.
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
"""libsodium's "moderate" costs for a password: half a second."""
MAX_OPERATIONS, MAX_MEMORY = 1000, 4 << 30
"""Files that demand higher costs are rejected."""


@dataclass(frozen=True)
class Secret:
    """Secret for an encrypted file: a key of 32 bytes, or a password. Neither appears in its repr."""

    key: bytes | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, key: bytes | None, password: str | None) -> Secret | None:
        """Create a secret from either; None from neither. Raises SettingsError for both, or an invalid one."""
        if key is None and password is None:
            return None
        if key is not None and password is not None:
            raise SettingsError("pass a key or a password, not both")
        if key is not None and len(key) != KEY_BYTES:
            raise SettingsError(f"an encryption key must have {KEY_BYTES} bytes, not {len(key)}")
        if password == "":
            raise SettingsError("the password is empty")
        return cls(key, password)

    @classmethod
    def from_files(cls, key: Path | None, password: Path | None) -> Secret | None:
        """Read a key (32 bytes, or 64 hex digits) or a password (the first line) from a file.

        Raises SettingsError if it cannot be read or is invalid.
        """
        password_lines = None if password is None else _read(password).decode("utf-8", "replace").splitlines()[:1]
        if password_lines is not None and not password_lines:
            raise SettingsError(f"{password} is empty")
        return cls.of(None if key is None else _parse_key(key), password_lines[0] if password_lines else None)


class Encryptor:
    """Encrypts the tensors of a file. Thread-safe."""

    def __init__(self, secret: Secret) -> None:
        """Raises MissingExtra if libsodium is not installed; takes half a second for a password."""
        self._sodium = _load_libsodium()
        self._derivation = b""
        if secret.key is not None:
            self._key = secret.key
        else:
            salt, costs = os.urandom(SALT_BYTES), (MODERATE_OPERATIONS, MODERATE_MEMORY, ARGON2ID)
            self._key = _derive_key(self._sodium, secret.password or "", Derivation(*costs, salt))
            self._derivation = _sized(struct.pack("<HHQQiH", DERIVATION, ARGON2, *costs, SALT_BYTES) + salt)

    def seal(self, data: memoryview) -> bytes:
        """Encrypt host memory in place; return the parameters for the tensor's header."""
        if not data.nbytes:
            return _sized(struct.pack("<H", 0))
        nonce = os.urandom(NONCE_BYTES)
        tags = b""
        for step, block in enumerate(_blocks(data, BLOCK)):
            buffer, tag = _address(block), (ctypes.c_ubyte * TAG_BYTES)()
            length, at = ctypes.c_ulonglong(block.nbytes), _nonce(nonce, step)
            self._sodium.crypto_secretbox_detached(buffer, tag, buffer, length, at, self._key)
            tags += bytes(tag)
        params = struct.pack("<HQ24sQ", IN_BLOCKS, BLOCK, nonce, len(tags) // TAG_BYTES) + tags
        return _sized(struct.pack("<H", 1 + bool(self._derivation)) + self._derivation + _sized(params))

    def sealed_size(self, length: int) -> int:
        """Return the size of the result of `seal` for `length` bytes."""
        if not length:
            return 10
        return 10 + len(self._derivation) + 8 + 42 + TAG_BYTES * -(-length // BLOCK)


class Decryptor:
    """Decrypts tensors that were encrypted with one secret. Thread-safe."""

    def __init__(self, secret: Secret) -> None:
        """Raises MissingExtra if libsodium is not installed."""
        self._sodium = _load_libsodium()
        self._secret = secret
        self._keys: dict[Derivation, bytes] = {}
        self._lock = threading.Lock()

    def open(self, crypt: bytes, data: memoryview) -> None:
        """Decrypt host memory in place, using the parameters in the tensor's header.

        Raises StorageAccessDenied for a wrong key or password (or modified data: the two are
        indistinguishable), ValueError if `crypt` cannot be parsed.
        """
        params = _parse_params(crypt, data.nbytes)
        if not data.nbytes:
            return
        key = self._key(params.derivation)
        for step, block in enumerate(_blocks(data, params.block)):
            buffer, tag = _address(block), params.tags[step * TAG_BYTES : (step + 1) * TAG_BYTES]
            length, nonce = ctypes.c_ulonglong(block.nbytes), _nonce(params.nonce, step)
            if self._sodium.crypto_secretbox_open_detached(buffer, buffer, tag, length, nonce, key):
                raise StorageAccessDenied("wrong key or password, or the data was modified")

    def _key(self, derivation: Derivation | None) -> bytes:
        if self._secret.key is not None:
            return self._secret.key
        if self._secret.password is None or derivation is None:
            raise StorageAccessDenied("encrypted with a key, not with a password")
        # All tensors of a file use the same key, and deriving it takes half a second.
        with self._lock:
            key = self._keys.get(derivation)
            if key is None:
                key = self._keys[derivation] = _derive_key(self._sodium, self._secret.password, derivation)
            return key


@dataclass(frozen=True, slots=True)
class Derivation:
    """Key derivation from a password: Argon2id's costs and salt."""

    operations: int
    memory: int
    algorithm: int
    salt: bytes


@dataclass(frozen=True, slots=True)
class _EncryptionParams:
    """Encryption parameters of one tensor: `tags` has 16 bytes per block of `block` bytes."""

    derivation: Derivation | None
    block: int
    nonce: bytes
    tags: bytes


def _parse_params(crypt: bytes, length: int) -> _EncryptionParams:
    """Parse the parameters for a tensor of `length` bytes. Raises ValueError."""
    derivation, block, nonce, tags = None, 0, b"", b""
    cursor = ByteCursor(crypt, 0, len(crypt))
    for _ in range(cursor.unpack("<H")[0]):
        part = cursor.next_bytes(cursor.unpack("<Q")[0])
        inner = ByteCursor(part, 2, len(part))
        match int.from_bytes(part[:2], "little"):
            case 1:
                method, operations, memory, algorithm, salt = inner.unpack("<HQQiH")
                if method != ARGON2:
                    raise ValueError("unknown key derivation")
                derivation = Derivation(operations, memory, algorithm, inner.next_bytes(salt))
            case 2:
                (block,) = inner.unpack("<Q")
                nonce = inner.next_bytes(NONCE_BYTES)
                tags = inner.next_bytes(TAG_BYTES * inner.unpack("<Q")[0])
            case 3:
                block, nonce, tags = length, inner.next_bytes(NONCE_BYTES), inner.next_bytes(TAG_BYTES)
    # A single tag covers the complete tensor, regardless of the block size.
    block = length if len(tags) == TAG_BYTES else block
    if length and (block <= 0 or len(tags) != TAG_BYTES * -(-length // block)):
        raise ValueError("the encryption parameters are missing or invalid")
    return _EncryptionParams(derivation, block, nonce, tags)


class _Sodium(Protocol):
    """The libsodium functions that are called; each returns 0 on success."""

    crypto_secretbox_detached: Callable[..., int]
    crypto_secretbox_open_detached: Callable[..., int]
    crypto_pwhash: Callable[..., int]


def _load_libsodium() -> _Sodium:
    try:
        import libnacl  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:
        raise MissingExtra("libsodium (for encrypted .tensors files)", extra="tensorizer", reason=str(error)) from None
    library: _Sodium = libnacl.nacl
    return library


def _derive_key(sodium: _Sodium, password: str, derivation: Derivation) -> bytes:
    """Derive the key from a password. Raises ValueError if that fails."""
    operations, memory = derivation.operations, derivation.memory
    if (
        derivation.algorithm != ARGON2ID
        or len(derivation.salt) != SALT_BYTES
        or operations > MAX_OPERATIONS
        or memory > MAX_MEMORY
    ):
        raise ValueError("unknown key derivation")
    key = ctypes.create_string_buffer(KEY_BYTES)
    password_bytes = password.encode()
    failed = sodium.crypto_pwhash(
        key, ctypes.c_ulonglong(KEY_BYTES), password_bytes, ctypes.c_ulonglong(len(password_bytes)), derivation.salt,
        ctypes.c_ulonglong(operations), ctypes.c_size_t(memory), ARGON2ID,
    )  # fmt: skip
    if failed:
        raise ValueError(
            "the key cannot be derived from the password: not enough memory, or its costs are out of range"
        )
    return key.raw


def _blocks(data: memoryview, size: int) -> list[memoryview]:
    return [data[at : at + size] for at in range(0, data.nbytes, size)]


def _nonce(first: bytes, step: int) -> bytes:
    """Return the nonce of a block: the first nonce plus `step`, little-endian."""
    return ((int.from_bytes(first, "little") + step) % (1 << 8 * NONCE_BYTES)).to_bytes(NONCE_BYTES, "little")


def _address(block: memoryview) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * block.nbytes).from_buffer(block)


def _sized(part: bytes) -> bytes:
    return struct.pack("<Q", len(part)) + part


def _parse_key(path: Path) -> bytes:
    raw = _read(path)
    if len(raw) == KEY_BYTES:
        return raw
    try:
        return bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        raise SettingsError(f"{path} does not contain a key of 32 bytes or 64 hex digits") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(1 << 16)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from None
