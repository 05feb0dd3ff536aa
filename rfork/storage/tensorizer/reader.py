"""Reads tensors of ``.tensors`` files into memory and verifies each as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rfork.errors import StorageAccessDenied, StorageCorrupt
from rfork.image.host_memory import host_view
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob
from rfork.storage.io.reader import Extent, fill
from rfork.storage.tensorizer.encryption import Decryptor
from rfork.storage.tensorizer.format import TensorEntry
from rfork.storage.tensorizer.header import read_header


@dataclass(frozen=True, slots=True)
class StoredTensorRef:
    """A tensor and the file that contains it."""

    blob: Blob
    encrypted: bool
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class TensorRead:
    """A tensor to read, and host memory for it: uint8, 1-D, `spec.nbytes` long."""

    stored: StoredTensorRef
    into: torch.Tensor


def read_checked(
    reads: Sequence[TensorRead],
    decryptor: Decryptor | None,
    settings: StorageSettings,
    progress: Callable[[int], None] | None = None,
    on_complete: Callable[[int], None] | None = None,
) -> None:
    """Read, decrypt and verify; `on_complete` is called with the index of each valid tensor, on any thread.

    Raises StorageCorrupt or StorageAccessDenied with the tensor's name, and the blobs' errors.
    """
    sizes = [read.stored.entry.data - read.stored.entry.header for read in reads]
    header_buffer, at = torch.empty(sum(sizes), dtype=torch.uint8), 0
    headers: list[torch.Tensor] = []
    extents: list[Extent] = []
    for read, size in zip(reads, sizes, strict=True):
        stored, header = read.stored, header_buffer[at : at + size]
        headers.append(header)
        at += size
        extents.append(Extent(stored.blob, stored.entry.header, header))
        extents.append(Extent(stored.blob, stored.entry.data, read.into[: stored.entry.length]))
    incomplete = set(range(len(reads)))

    def filled(index: int) -> None:
        index //= 2
        try:
            # Header and data complete separately; the first one returns here. set.remove is atomic, so many
            # small tensors need no lock.
            incomplete.remove(index)
            return
        except KeyError:
            pass
        _check(reads[index], bytes(headers[index].numpy()), decryptor)
        if on_complete is not None:
            on_complete(index)

    total = sum(read.stored.entry.length for read in reads)
    report = _capped_progress(total, progress) if progress is not None else None
    fill(extents, settings, on_filled=filled, progress=report)


def _check(read: TensorRead, header: bytes, decryptor: Decryptor | None) -> None:
    blob, entry = read.stored.blob, read.stored.entry
    memory = host_view(read.into.data_ptr(), entry.length) if entry.length else memoryview(b"")
    try:
        header_info = read_header(entry, header, encrypted=read.stored.encrypted)
        if decryptor is not None:
            decryptor.open(header_info.crypt, memory)
        is_valid = header_info.fits(memory)
    except StorageAccessDenied as error:
        raise StorageAccessDenied(f"{blob.uri}: {entry.name}: {error}") from None
    except ValueError as error:
        raise StorageCorrupt(f"{blob.uri}: {entry.name}: {error}") from None
    if not is_valid:
        raise StorageCorrupt(f"{blob.uri}: {entry.name} does not match its hash")
    if not entry.length:
        read.into.zero_()  # saved from the meta device


def _capped_progress(total: int, progress: Callable[[int], None]) -> Callable[[int], None]:
    """Limit the bytes reported to `progress` to `total`, because headers are read too but must not count."""
    left = [total]

    def report(count: int) -> None:
        reported = min(count, left[0])
        left[0] -= reported
        progress(reported)

    return report
