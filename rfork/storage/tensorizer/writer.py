"""Write tensors as a ``.tensors`` file that tensorizer and vLLM load.

Saved by ourselves, as a stream, so that it goes to an object store without a copy on disk first:
tensorizer's own writer goes back to the front of its file, takes 2,500 tensors at most, and encrypts weights
in the model's own memory, where somebody may be serving with them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import nn

from rfork import settings as options
from rfork.errors import CheckpointError, StorageDenied, UnsupportedTensor
from rfork.image.capture import image_of
from rfork.image.host_memory import host_view
from rfork.settings import StorageSettings
from rfork.storage import stores
from rfork.storage.blob import Store
from rfork.storage.location import Location
from rfork.storage.modules.saved import Saved
from rfork.storage.snapshots.shared_chunks import clear_away
from rfork.storage.tensorizer.crypt import Secret, SecretLock
from rfork.storage.tensorizer.format import END, LONG_DIMENSION, Kind, TensorEntry, type_name
from rfork.storage.tensorizer.header import Lock, header_size, write_header
from rfork.storage.tensorizer.index import write_index
from rfork.storage.tensorizer.names import same_name, set_names
from rfork.storage.tensors import StoredTensor

LONGEST_NAME = 65535
MOST_THREADS = 8
"""That hash and encrypt; each takes 1.2 GB/s."""
GROUP_BYTES = 4 << 20
"""Of small tensors that are hashed by one thread in one go, and written by one call."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A tensor that is going to be written."""

    name: str
    spec: StoredTensor
    kind: Kind = "entry"


def write_tensors(
    tensors: Mapping[str, torch.Tensor] | nn.Module,
    uri: str,
    *,
    key: bytes | None = None,
    password: str | None = None,
    max_file_bytes: int | None = None,
    settings: StorageSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> Saved:
    """Write named tensors, or a module's parameters and persistent buffers, on any device, as they are now.

    Tied tensors are written under each of their names, those with gaps without the gaps. They must not change
    meanwhile. `key` (32 bytes) or `password` encrypts; `max_file_bytes` makes a numbered set of files.
    `progress` is told the bytes of each tensor written. Nothing is seen at `uri` before all of it is there;
    what was there is replaced by then, but a set of as many files, which is removed before.

    Raises UnsupportedTensor, CheckpointError (there are none) and StorageError kinds.
    """
    chosen = settings or options.load(StorageSettings)
    if isinstance(tensors, nn.Module):
        named: Mapping[str, torch.Tensor] = module_tensors(tensors)
        kinds: Mapping[str, Kind] = {
            name: "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            for name, tensor in named.items()
        }
    else:
        named, kinds = tensors, {}
    image_of(named)  # raises for what has no plain bytes
    outlines = [
        Outline(
            name, StoredTensor(tensor.dtype, tuple(tensor.shape), tensor.nbytes), kinds.get(name, "entry")
        )
        for name, tensor in named.items()
    ]
    secret = Secret.of(key, password)
    return write_stream(
        outlines, iter(named.values()), uri, chosen, secret, max_file_bytes=max_file_bytes, progress=progress
    )


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and persistent buffers; raises UnsupportedTensor for extra state."""
    named: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedTensor(name, f"it is extra state of type {type(value).__name__}, not a tensor")
        named[name] = value
    return named


def write_stream(
    outlines: Sequence[Outline],
    tensors: Iterator[torch.Tensor],
    uri: str,
    settings: StorageSettings,
    secret: Secret | None = None,
    *,
    max_file_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Saved:
    """As `write_tensors`, of tensors that come one after the other, in the order of `outlines`.

    At most `settings.memory` bytes of them are held at once, or two tensors.
    """
    if not outlines:
        raise CheckpointError(f"{uri}: there is no tensor to write")
    began = time.monotonic()
    lock = SecretLock(secret) if secret is not None else None
    location = Location.parse(uri)
    files = _files(outlines, max_file_bytes)
    names = [location.name] if len(files) == 1 else set_names(location.name, len(files))
    entries = [_entries(file, lock) for file in files]
    with closing(stores.open_store(location.parent, settings)) as store:
        # Looked at before hours of writing; who may not list knows nothing of other names.
        old = _before(store, location.name)
        if len(names) > 1:
            # Of a set of as many files: new ones and old ones would read as one.
            for name in names:
                store.remove(name)
        kept: list[str] = []
        try:
            for name, file in zip(names, entries, strict=True):
                kept.append(name)
                _write(store, name, file, tensors, lock, settings, progress)
        except BaseException:
            # A set that lacks a file is none; the file under way is not there anyhow.
            for name in kept[:-1]:
                clear_away(store, name)
            raise
        # What stood for this name before: the file would hide the set, or one set the other.
        for name in old:
            if name not in names:
                store.remove(name)
    nbytes = sum(outline.spec.nbytes for outline in outlines)
    return Saved(location.uri, len(outlines), nbytes, time.monotonic() - began)


def _before(store: Store, name: str) -> list[str]:
    try:
        return same_name(store, name)
    except StorageDenied:
        return []


def _files(outlines: Sequence[Outline], most: int | None) -> list[list[Outline]]:
    """Which tensors go into which file: in order, none larger than `most` bytes unless one tensor is."""
    files: list[list[Outline]] = []
    held = 0
    for outline in outlines:
        if not files or (most is not None and held + outline.spec.nbytes > most):
            files.append([])
            held = 0
        files[-1].append(outline)
        held += outline.spec.nbytes
    return files


def _write(
    store: Store,
    name: str,
    entries: Sequence[TensorEntry],
    tensors: Iterator[torch.Tensor],
    lock: Lock | None,
    settings: StorageSettings,
    progress: Callable[[int], None] | None,
) -> None:
    with store.write(name) as writer:
        writer.write([memoryview(write_index(entries, encrypted=lock is not None))])
        for group in _prepared(entries, tensors, lock, settings.memory):
            views = [_view(memory) for _, memory in group]
            headers = (memoryview(header) for header, _ in group)
            writer.write([view for pair in zip(headers, views, strict=True) for view in pair])
            if progress is not None:
                progress(sum(view.nbytes for view in views))
        writer.write([memoryview(END)])


def _prepared(
    entries: Iterable[TensorEntry], tensors: Iterator[torch.Tensor], lock: Lock | None, most: int
) -> Iterator[list[tuple[bytes, torch.Tensor]]]:
    """Headers and bytes, in order; those of the next tensors are made while others are written."""
    waiting: deque[tuple[int, Future[list[tuple[bytes, torch.Tensor]]]]] = deque()
    held = 0
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="rfork-hash") as pool:
        for group in _groups(entries):
            came = [_promised(entry, next(tensors, None)) for entry in group]
            nbytes = sum(entry.length for entry in group)
            while waiting and held + nbytes > most:
                length, future = waiting.popleft()
                held -= length
                yield future.result()
            held += nbytes
            waiting.append((nbytes, pool.submit(_prepare_all, group, came, lock)))
            del came
        for _, future in waiting:
            yield future.result()


def _groups(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Small tensors that follow one another together; a large one by itself."""
    group: list[TensorEntry] = []
    held = 0
    for entry in entries:
        if group and held + entry.length > GROUP_BYTES:
            yield group
            group, held = [], 0
        group.append(entry)
        held += entry.length
    if group:
        yield group


def _promised(entry: TensorEntry, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None or (tuple(tensor.shape), tensor.dtype) != (entry.spec.shape, entry.spec.dtype):
        raise ValueError(f"what came for {entry.name} is not what was promised")
    return tensor


def _prepare_all(
    entries: Sequence[TensorEntry], tensors: Sequence[torch.Tensor], lock: Lock | None
) -> list[tuple[bytes, torch.Tensor]]:
    return [_prepare(entry, tensor, lock) for entry, tensor in zip(entries, tensors, strict=True)]


def _prepare(entry: TensorEntry, tensor: torch.Tensor, lock: Lock | None) -> tuple[bytes, torch.Tensor]:
    """The header of a tensor and its bytes, which are a copy where they are going to be encrypted."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        host = tensor.detach().to("cpu").contiguous()
        if lock is not None and host.data_ptr() == tensor.data_ptr():
            host = host.clone()
    return write_header(entry, _view(host), lock), host


def _view(host: torch.Tensor) -> memoryview:
    return host_view(host.data_ptr(), host.nbytes) if host.nbytes else memoryview(b"")


def _entries(outlines: Sequence[Outline], lock: Lock | None) -> list[TensorEntry]:
    """Where each tensor lies behind the index."""
    entries: list[TensorEntry] = []
    at = 0
    for outline in outlines:
        # tensorizer's loader takes the part up to the last dot for the module, which may have no name.
        stored = outline.name if outline.kind == "entry" or "." in outline.name else f".{outline.name}"
        raw = stored.encode()
        if not raw or raw.startswith(b"\x1e") or len(raw) > LONGEST_NAME:
            raise UnsupportedTensor(outline.name, "a .tensors file cannot have this name")
        spec = outline.spec
        long = any(size >= LONG_DIMENSION for size in spec.shape)
        entry = TensorEntry(
            outline.name, raw, outline.kind, type_name(spec.dtype), spec, at, 0, spec.nbytes, long
        )
        entry = replace(entry, data=at + header_size(entry, lock))
        entries.append(entry)
        at = entry.data + entry.length
    return entries
