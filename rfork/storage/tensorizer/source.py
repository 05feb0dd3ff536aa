"""Tensor source for a ``.tensors`` file, or a numbered set of them.

Reads with rfork's own reader, directly into the tensors. tensorizer's loader uses one thread unless it is
given a path, keeps everything it has read, and accepts a truncated file unless verification is enabled. Here
every tensor is verified against its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from typing_extensions import Self

from rfork import settings as options
from rfork.errors import CheckpointError, StorageAccessDenied, StorageCorrupt
from rfork.image.host_memory import host_view
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob, read_range
from rfork.storage.formats.tensor_blocks import bytes_of
from rfork.storage.io.prefetch import group_by_size, read_ahead
from rfork.storage.io.reader import Extent, fill
from rfork.storage.location import Location
from rfork.storage.tensorizer.encryption import Decryptor, Secret
from rfork.storage.tensorizer.file_set import opened_files, resolve_template
from rfork.storage.tensorizer.format import FRONT, TensorEntry, index_length, read_header, read_index
from rfork.storage.tensors import StoredTensor

ALIGNMENT = 64
"""Alignment of tensors that share an allocation."""


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


class TensorizerSource:
    """See `rfork.storage.tensors.TensorSource`."""

    def __init__(
        self,
        uri: str,
        blobs: Sequence[Blob],
        settings: StorageSettings,
        secret: Secret | None = None,
    ) -> None:
        """Take ownership of open blobs, unless this raises; they are closed with the source."""
        self.uri = uri
        self._settings = settings
        self._blobs = tuple(blobs)
        self._tensors: dict[str, StoredTensorRef] = {}
        for blob in blobs:
            self._add(blob, secret)
        self._specs = {name: stored.entry.spec for name, stored in self._tensors.items()}
        self._decryptor = Decryptor(secret) if secret is not None else None
        self._owned = ExitStack()
        for blob in blobs:
            self._owned.callback(blob.close)

    @classmethod
    def open(
        cls,
        uri: str,
        *,
        key: bytes | None = None,
        password: str | None = None,
        rank: Rank | None = None,
        settings: StorageSettings | None = None,
    ) -> Self:
        """Open a file, a numbered set (``NAME-00001-of-00008.tensors``), or a folder with either.

        In a template such as ``model-rank-%03d.tensors`` the number is that of `rank`.

        Reads only the index. Raises StorageCorrupt (not a ``.tensors`` file, or truncated),
        StorageAccessDenied (encrypted, but neither `key` (32 bytes) nor `password` is given), StorageNotFound
        and others.
        """
        chosen = settings or options.load(StorageSettings)
        secret = Secret.of(key, password)
        with ExitStack() as resources:
            blobs = opened_files(resolve_template(uri, rank or Rank()), chosen, resources)
            display_uri = blobs[0].uri if len(blobs) == 1 else Location.parse(uri).uri
            source = cls(display_uri, blobs, chosen, secret)
            source._owned = resources.pop_all()
        return source

    @property
    def specs(self) -> Mapping[str, StoredTensor]:
        """See `TensorSource.specs`."""
        return self._specs

    def read_into(self, tensors: Mapping[str, torch.Tensor], progress: Callable[[int], None] | None = None) -> None:
        """See `TensorSource.read_into`; StorageCorrupt names the tensor whose hash does not match.

        Tensors with another dtype, on a GPU or with gaps are read through staging memory: at most
        `settings.staging_bytes` bytes, or the size of the largest of them.
        """
        self._check(tensors)
        direct, staged = self._split(tensors)
        self._fill(direct, progress)
        for group in group_by_size(staged, [self._specs[name].nbytes for name in staged], self._settings.staging_bytes):
            reads = self._allocate(group)
            self._fill(reads, progress)
            # Parameters are written in place, inference tensors too.
            with torch.inference_mode():
                for name, read in zip(group, reads, strict=True):
                    tensors[name].copy_(self._as_tensor(read))

    def stream(
        self, names: Collection[str] | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TensorSource.stream`. Two groups of half of `settings.staging_bytes` each are in memory."""
        wanted = self._named(names)
        sizes = [self._specs[name].nbytes for name in wanted]
        groups = group_by_size(wanted, sizes, self._settings.staging_bytes // 2)

        def read(group: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
            reads, arrived = self._allocate(group), list[int]()
            self._fill(reads, None, arrived.append)
            return [(group[index], self._as_tensor(reads[index]).to(device)) for index in arrived]

        return read_ahead(groups, read)

    def __getitem__(self, name: str) -> torch.Tensor:
        """See `TensorSource.__getitem__`."""
        if name not in self._tensors:
            raise KeyError(name)
        reads = self._allocate([name])
        self._fill(reads, None)
        return self._as_tensor(reads[0])

    def close(self) -> None:
        """See `TensorSource.close`."""
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, blob: Blob, secret: Secret | None) -> None:
        front = read_range(blob, 0, min(blob.size, FRONT))
        length = index_length(blob.uri, front)
        if length > blob.size:
            raise StorageCorrupt(
                f"{blob.uri} is truncated: its index ends at byte {length}, but the file has {blob.size} bytes"
            )
        front += read_range(blob, len(front), max(0, length - len(front)))
        index = read_index(blob.uri, front, blob.size)
        if index.encrypted and secret is None:
            raise StorageAccessDenied(f"{blob.uri} is encrypted", hint="pass its key or password")
        if secret is not None and not index.encrypted:
            raise CheckpointError(f"{blob.uri} is not encrypted, but a key or password was given")
        for entry in index.entries:
            if entry.name in self._tensors:
                raise CheckpointError(f"{blob.uri} contains {entry.name}, which is also in another file of the set")
            self._tensors[entry.name] = StoredTensorRef(blob, index.encrypted, entry)

    def _named(self, names: Collection[str] | None) -> list[str]:
        """Return all names, or the given ones, in storage order."""
        if names is None:
            return list(self._tensors)
        wanted = set(names)
        unknown = sorted(wanted - self._tensors.keys())
        if unknown:
            raise CheckpointError(f"{self.uri} lacks {unknown[0]} ({len(unknown)} in total)")
        return [name for name in self._tensors if name in wanted]

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name in self._named(tensors.keys()):
            shape, wanted = self._specs[name].shape, tuple(tensors[name].shape)
            if shape != wanted:
                raise CheckpointError(f"{self.uri}: {name} has shape {list(shape)}, but {list(wanted)} in the model")
            if tensors[name].is_meta:
                raise CheckpointError(f"cannot load into {name}: it has no memory")
            stored, wished = self._specs[name].dtype, tensors[name].dtype
            if not torch.can_cast(stored, wished):
                raise CheckpointError(f"{self.uri}: {name} is {stored}, but {wished} in the model")

    def _split(self, tensors: Mapping[str, torch.Tensor]) -> tuple[list[TensorRead], list[str]]:
        """Return the tensors to read in place, and the names of those to read through staging memory."""
        ordered = self._named(tensors.keys())
        addresses = {name: tensors[name].data_ptr() for name in ordered}
        direct: list[TensorRead] = []
        staged: set[str] = set()
        end = 0
        for name in sorted(ordered, key=addresses.__getitem__):
            tensor, spec = tensors[name], self._specs[name]
            # Of tensors that share memory, only one is read in place: concurrent reads would mix their bytes.
            fits = addresses[name] >= end and tensor.device.type == "cpu" and tensor.dtype == spec.dtype
            if fits and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                direct.append(TensorRead(self._tensors[name], bytes_of(tensor)))
                end = max(end, addresses[name] + spec.nbytes)
            else:
                staged.add(name)
        return direct, [name for name in ordered if name in staged]

    def _allocate(self, names: Sequence[str]) -> list[TensorRead]:
        """Allocate memory for these tensors, in one allocation."""
        sizes = [self._specs[name].nbytes for name in names]
        buffer = torch.empty(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), dtype=torch.uint8)
        reads: list[TensorRead] = []
        at = 0
        for name, size in zip(names, sizes, strict=True):
            reads.append(TensorRead(self._tensors[name], buffer[at : at + size]))
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return reads

    def _as_tensor(self, read: TensorRead) -> torch.Tensor:
        """Return the memory of a read as its tensor."""
        spec = read.stored.entry.spec
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=spec.dtype)
        return read.into.view(spec.dtype).view(spec.shape)

    def _fill(
        self,
        reads: Sequence[TensorRead],
        progress: Callable[[int], None] | None,
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
            _check(reads[index], bytes(headers[index].numpy()), self._decryptor)
            if on_complete is not None:
                on_complete(index)

        total = sum(read.stored.entry.length for read in reads)
        report = _capped_progress(total, progress) if progress is not None else None
        fill(extents, self._settings, on_filled=filled, progress=report)
