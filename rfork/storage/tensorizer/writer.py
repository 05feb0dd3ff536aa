"""Writes tensors as a ``.tensors`` file that tensorizer and vLLM can load.

Implemented here as a stream, so that it can be written to an object store without a local copy. tensorizer's
own writer seeks back to the front of its file, accepts at most 2,500 tensors, and encrypts weights in the
model's own memory, which may be in use for serving.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from hashlib import sha256

import torch
from torch import nn

from rfork import settings as options
from rfork.errors import CheckpointError, StorageAccessDenied, UnsupportedTensor
from rfork.image.capture import image_from_tensors
from rfork.image.host_memory import host_view
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import BlobStore
from rfork.storage.location import Location
from rfork.storage.snapshots.repository import best_effort_remove
from rfork.storage.tensorizer.encryption import Encryptor, Secret
from rfork.storage.tensorizer.file_set import existing_files, set_names
from rfork.storage.tensorizer.format import (
    CRC32,
    END,
    ENTRY_TYPES,
    LONG_DIMENSION,
    SHA256,
    TensorEntry,
    type_and_shape,
    type_name,
    write_index,
)
from rfork.storage.tensors import EntryType, SaveReport, StoredTensor, TensorOutline

MAX_NAME_BYTES = 65535
MAX_THREADS = 8
"""Threads that hash and encrypt; each processes 1.2 GB/s."""
GROUP_BYTES = 4 << 20
"""Small tensors are grouped up to this size, hashed by one thread and written by one call."""


def write_tensors(
    tensors: Mapping[str, torch.Tensor] | nn.Module,
    uri: str,
    *,
    key: bytes | None = None,
    password: str | None = None,
    max_file_bytes: int | None = None,
    settings: StorageSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> SaveReport:
    """Write named tensors, or a module's parameters and persistent buffers, from any device.

    Tied tensors are written under each of their names, strided ones without gaps. They must not change
    meanwhile. `key` (32 bytes) or `password` encrypts; `max_file_bytes` writes a numbered set of files.
    `progress` receives the bytes of each tensor written. Nothing is visible at `uri` until everything is
    written; existing files are replaced then, except a set with the same number of files, which is removed
    first.

    Raises UnsupportedTensor, CheckpointError (no tensors) and StorageError subclasses.
    """
    chosen = settings or options.load(StorageSettings)
    if isinstance(tensors, nn.Module):
        named: Mapping[str, torch.Tensor] = module_tensors(tensors)
        entry_types: Mapping[str, EntryType] = {
            name: "parameter" if isinstance(tensor, nn.Parameter) else "buffer" for name, tensor in named.items()
        }
    else:
        named, entry_types = tensors, {}
    image_from_tensors(named)  # raises for tensors without plain bytes
    outlines = [
        TensorOutline(
            name,
            StoredTensor(tensor.dtype, tuple(tensor.shape), tensor.nbytes),
            entry_types.get(name, "entry"),
        )
        for name, tensor in named.items()
    ]
    secret = Secret.of(key, password)
    return write_stream(
        outlines, iter(named.values()), uri, chosen, secret, max_file_bytes=max_file_bytes, progress=progress
    )


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and persistent buffers; raises UnsupportedTensor for extra state."""
    named: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedTensor(name, f"it is extra state of type {type(value).__name__}, not a tensor")
        named[name] = value
    return named


def write_stream(
    outlines: Sequence[TensorOutline],
    tensors: Iterator[torch.Tensor],
    uri: str,
    settings: StorageSettings,
    secret: Secret | None = None,
    *,
    max_file_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> SaveReport:
    """Like `write_tensors`, for tensors from an iterator in the order of `outlines`.

    At most `settings.staging_bytes` bytes of them, or two tensors, are in memory at a time.
    """
    if not outlines:
        raise CheckpointError(f"{uri}: no tensors to write")
    began = time.monotonic()
    encryptor = Encryptor(secret) if secret is not None else None
    location = Location.parse(uri)
    files = _files(outlines, max_file_bytes)
    names = [location.name] if len(files) == 1 else set_names(location.name, len(files))
    entries = [_entries(file, encryptor) for file in files]
    with closing(registry.open_store(location.parent, settings)) as store:
        # List before hours of writing; without permission to list, other names are unknown.
        old = _previous_files(store, location.name)
        if len(names) > 1:
            # A set with the same number of files: new and old files would be read as one.
            for name in names:
                store.remove(name)
        kept: list[str] = []
        try:
            for name, file in zip(names, entries, strict=True):
                kept.append(name)
                _write(store, name, file, tensors, encryptor, settings, progress)
        except BaseException:
            # A set with a missing file is invalid; the file that failed is not visible anyway.
            for name in kept[:-1]:
                best_effort_remove(store, name)
            raise
        # Previous files of this name: a single file would hide the set, or one set the other.
        for name in old:
            if name not in names:
                store.remove(name)
    nbytes = sum(outline.spec.nbytes for outline in outlines)
    return SaveReport(location.uri, len(outlines), nbytes, time.monotonic() - began)


def _previous_files(store: BlobStore, name: str) -> list[str]:
    try:
        return existing_files(store, name)
    except StorageAccessDenied:
        return []


def _files(outlines: Sequence[TensorOutline], max_bytes: int | None) -> list[list[TensorOutline]]:
    """Distribute tensors to files, in order, each at most `max_bytes` bytes or one tensor."""
    files: list[list[TensorOutline]] = []
    pending_bytes = 0
    for outline in outlines:
        if not files or (max_bytes is not None and pending_bytes + outline.spec.nbytes > max_bytes):
            files.append([])
            pending_bytes = 0
        files[-1].append(outline)
        pending_bytes += outline.spec.nbytes
    return files


def _write(
    store: BlobStore,
    name: str,
    entries: Sequence[TensorEntry],
    tensors: Iterator[torch.Tensor],
    encryptor: Encryptor | None,
    settings: StorageSettings,
    progress: Callable[[int], None] | None,
) -> None:
    with store.write(name) as writer:
        writer.write([memoryview(write_index(entries, encrypted=encryptor is not None))])
        for group in _prepared(entries, tensors, encryptor, settings.staging_bytes):
            views = [_view(memory) for _, memory in group]
            headers = (memoryview(header) for header, _ in group)
            writer.write([view for pair in zip(headers, views, strict=True) for view in pair])
            if progress is not None:
                progress(sum(view.nbytes for view in views))
        writer.write([memoryview(END)])


def _prepared(
    entries: Iterable[TensorEntry],
    tensors: Iterator[torch.Tensor],
    encryptor: Encryptor | None,
    max_bytes: int,
) -> Iterator[list[tuple[bytes, torch.Tensor]]]:
    """Iterate over headers and bytes, in order; the next ones are prepared while others are written."""
    waiting: deque[tuple[int, Future[list[tuple[bytes, torch.Tensor]]]]] = deque()
    pending_bytes = 0
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="rfork-hash") as pool:
        for group in _groups(entries):
            checked = [_check_spec(entry, next(tensors, None)) for entry in group]
            nbytes = sum(entry.length for entry in group)
            while waiting and pending_bytes + nbytes > max_bytes:
                length, future = waiting.popleft()
                pending_bytes -= length
                yield future.result()
            pending_bytes += nbytes
            waiting.append((nbytes, pool.submit(_prepare_all, group, checked, encryptor)))
            del checked
        for _, future in waiting:
            yield future.result()


def _groups(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Group adjacent small tensors; a large one forms its own group."""
    group: list[TensorEntry] = []
    pending_bytes = 0
    for entry in entries:
        if group and pending_bytes + entry.length > GROUP_BYTES:
            yield group
            group, pending_bytes = [], 0
        group.append(entry)
        pending_bytes += entry.length
    if group:
        yield group


def _check_spec(entry: TensorEntry, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None or (tuple(tensor.shape), tensor.dtype) != (entry.spec.shape, entry.spec.dtype):
        raise ValueError(f"{entry.name} does not match its outline")
    return tensor


def _prepare_all(
    entries: Sequence[TensorEntry], tensors: Sequence[torch.Tensor], encryptor: Encryptor | None
) -> list[tuple[bytes, torch.Tensor]]:
    return [_prepare(entry, tensor, encryptor) for entry, tensor in zip(entries, tensors, strict=True)]


def _prepare(entry: TensorEntry, tensor: torch.Tensor, encryptor: Encryptor | None) -> tuple[bytes, torch.Tensor]:
    """Return a tensor's header and its bytes, as a copy if they will be encrypted."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        host = tensor.detach().to("cpu").contiguous()
        if encryptor is not None and host.data_ptr() == tensor.data_ptr():
            host = host.clone()
    return write_header(entry, _view(host), encryptor), host


def _view(host: torch.Tensor) -> memoryview:
    return host_view(host.data_ptr(), host.nbytes) if host.nbytes else memoryview(b"")


def _entries(outlines: Sequence[TensorOutline], encryptor: Encryptor | None) -> list[TensorEntry]:
    """Compute each tensor's position after the index."""
    entries: list[TensorEntry] = []
    at = 0
    for outline in outlines:
        # tensorizer's loader uses the part up to the last dot as the module's name, which may be empty.
        stored = outline.name if outline.entry_type == "entry" or "." in outline.name else f".{outline.name}"
        raw = stored.encode()
        if not raw or raw.startswith(b"\x1e") or len(raw) > MAX_NAME_BYTES:
            raise UnsupportedTensor(outline.name, "a .tensors file cannot have this name")
        spec = outline.spec
        long = any(size >= LONG_DIMENSION for size in spec.shape)
        entry = TensorEntry(
            outline.name, raw, outline.entry_type, type_name(spec.dtype), spec, at, 0, spec.nbytes, long
        )
        entry = replace(entry, data=at + header_size(entry, encryptor))
        entries.append(entry)
        at = entry.data + entry.length
    return entries


def header_size(entry: TensorEntry, encryptor: Encryptor | None) -> int:
    """Return the size of a tensor's header."""
    hashes, crypt = (40, 0) if encryptor is None else (34, encryptor.sealed_size(entry.length))
    return 13 + len(entry.stored_name) + len(type_and_shape(entry)) + 3 + hashes + crypt + 8


def write_header(entry: TensorEntry, data: memoryview, encryptor: Encryptor | None) -> bytes:
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
