"""Converts one format of tensor files to another, on any storage."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase

import torch

from rfork import settings as options
from rfork.errors import CheckpointError, SettingsError
from rfork.image.capture import image_from_tensors
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import BlobStore
from rfork.storage.convert.input import open_input, rank_from_number, verify
from rfork.storage.convert.output import check_not_existing, check_not_same, format_of
from rfork.storage.formats.detect import INDEX, SINGLE
from rfork.storage.formats.safetensors_writer import header_of, in_file_order, write_safetensors
from rfork.storage.io.prefetch import group_by_size, read_ahead, start_thread
from rfork.storage.location import Location
from rfork.storage.module_io.save_report import SaveReport
from rfork.storage.snapshots.chunk_refs import best_effort_remove
from rfork.storage.snapshots.files import manifest_name
from rfork.storage.snapshots.writer import write_snapshot
from rfork.storage.tensorizer.encryption import Secret
from rfork.storage.tensorizer.file_set import SUFFIX, is_template, resolve_template
from rfork.storage.tensorizer.writer import TensorOutline, write_stream
from rfork.storage.tensors import StoredTensor, TensorSource

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def convert(
    source: str,
    destination: str,
    *,
    dtype: torch.dtype | None = None,
    only: Sequence[str] = (),
    rank: int | None = None,
    unlock: Secret | None = None,
    lock: Secret | None = None,
    max_shard_bytes: int | None = None,
    force: bool = False,
    settings: StorageSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SaveReport:
    """Write the tensors of `source` (all, or those whose names match a pattern in `only`) to `destination`.

    The name of `destination` selects the format: see `format_of`. `dtype` converts floating-point tensors.
    `rank` selects the files of a rank in a folder, or in a template such as ``model-rank-%03d.tensors``, on
    both sides. `unlock` and `lock` decrypt and encrypt ``.tensors`` files. A snapshot is verified before it
    is converted, which reads it twice, unless it is given by a presigned URL.

    At most `settings.staging_bytes` bytes of tensors, or two tensors, are in memory at a time, and as much
    again while they are written; when writing a snapshot, the complete image is, because its digests come
    first. `progress` receives the bytes written and the total.

    An existing destination is replaced only with `force`. A single file is replaced when the new one is
    complete; a set of files is removed before the first new one is written, but only after the source was
    opened and its first tensors were read.

    Raises SettingsError, CheckpointError and StorageError subclasses. A failed conversion leaves no new file
    at `destination`, but a set of files that was being replaced is lost.
    """
    began = time.monotonic()
    chosen = settings or options.load(StorageSettings)
    requested_rank = rank_from_number(rank) if rank is not None else None
    for uri in (source, destination):
        if requested_rank is None and is_template(uri):
            raise SettingsError(f"{uri} is a template for the files of several ranks", hint="select one with --rank")
    if requested_rank is not None:
        destination = resolve_template(destination, requested_rank)
    target = Location.parse(destination)
    output_format = format_of(target, max_shard_bytes)
    if lock is not None and output_format != "tensors":
        raise SettingsError(f"{target.uri}: only {SUFFIX} files can be encrypted")
    check_not_same(Location.parse(resolve_template(source, requested_rank or Rank())), target, output_format)
    check_not_existing(target, output_format, chosen, requested_rank, force=force)
    with open_input(source, chosen, requested_rank, unlock) as (input_source, own):
        outlines = _output_specs(input_source, dtype, only)
        verify(source, input_source, chosen)
        total, done = sum(outline.spec.nbytes for outline in outlines), 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        match output_format:
            case "tensors":
                with _prefetched(input_source, outlines, chosen) as tensors:
                    write_stream(
                        outlines, tensors, destination, chosen, lock,
                        max_file_bytes=max_shard_bytes, progress=on_bytes,
                    )  # fmt: skip
            case "snapshot":
                _write_snapshot(input_source, outlines, destination, own or Rank(), chosen, on_bytes)
            case "safetensors":
                _write_file(input_source, outlines, target, chosen, on_bytes)
            case _:
                _write_checkpoint(input_source, outlines, target, max_shard_bytes or 0, force, chosen, on_bytes)
    return SaveReport(target.uri, len(outlines), total, time.monotonic() - began)


def _output_specs(source: TensorSource, dtype: torch.dtype | None, only: Sequence[str]) -> list[TensorOutline]:
    """Return what will be written. Raises CheckpointError if a pattern matches no name."""
    specs = source.specs
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in specs):
            raise CheckpointError(f"{source.uri} contains no tensor that matches {pattern!r}")
    outlines: list[TensorOutline] = []
    for name, spec in specs.items():
        if only and not any(fnmatchcase(name, pattern) for pattern in only):
            continue
        if dtype is not None and spec.dtype.is_floating_point:
            spec = StoredTensor(dtype, spec.shape, math.prod(spec.shape) * dtype.itemsize)
        outlines.append(TensorOutline(name, spec))
    if not outlines:
        raise CheckpointError(f"{source.uri} contains no tensors")
    return outlines


def _in_order(
    source: TensorSource, outlines: Sequence[TensorOutline], settings: StorageSettings
) -> Generator[torch.Tensor, None, None]:
    """Iterate over the tensors in the given order and dtypes, reading ahead."""
    specs = {outline.name: outline.spec for outline in outlines}

    def read(names: Sequence[str]) -> list[torch.Tensor]:
        tensors = {name: torch.empty(specs[name].shape, dtype=specs[name].dtype) for name in names}
        source.read_into(tensors)
        return [tensors[name] for name in names]

    sizes = [spec.nbytes for spec in specs.values()]
    return read_ahead(group_by_size(list(specs), sizes, settings.staging_bytes // 2), read)


@contextmanager
def _prefetched(
    source: TensorSource, outlines: Sequence[TensorOutline], settings: StorageSettings
) -> Iterator[Iterator[torch.Tensor]]:
    """Like `_in_order`, but reads the first tensors on entry: a source that cannot be read fails here."""
    with closing(_in_order(source, outlines, settings)) as tensors:
        first = [next(tensors)]

        def resumed() -> Iterator[torch.Tensor]:
            while first:
                yield first.pop()
            yield from tensors

        yield resumed()


def _write_snapshot(
    source: TensorSource,
    outlines: Sequence[TensorOutline],
    destination: str,
    rank: Rank,
    settings: StorageSettings,
    on_bytes: Callable[[int], None],
) -> None:
    tensors = {outline.name: torch.empty(outline.spec.shape, dtype=outline.spec.dtype) for outline in outlines}
    # On a thread that can be abandoned: a read may hang when the user interrupts.
    start_thread(lambda: source.read_into(tensors))()
    image = image_from_tensors(tensors)
    write_snapshot(image, image.manifest(), destination, rank=rank, settings=settings, progress=on_bytes)


def _write_file(
    source: TensorSource,
    outlines: Sequence[TensorOutline],
    target: Location,
    settings: StorageSettings,
    on_bytes: Callable[[int], None],
) -> None:
    ordered = in_file_order(outlines)
    with (
        closing(registry.open_store(target.parent, settings)) as store,
        closing(_in_order(source, ordered, settings)) as tensors,
    ):
        write_safetensors(store, target.name, ordered, tensors, on_bytes)
        store.remove(manifest_name(target.name))  # left by a snapshot of the same name


def _write_checkpoint(
    source: TensorSource,
    outlines: Sequence[TensorOutline],
    target: Location,
    max_shard_bytes: int,
    force: bool,
    settings: StorageSettings,
    on_bytes: Callable[[int], None],
) -> None:
    """Write a folder of safetensors files, the index last: without an index, no reader accepts the shards."""
    by_name = {outline.name: outline for outline in outlines}
    sizes = [outline.spec.nbytes for outline in outlines]
    shards = [
        in_file_order([by_name[tensor] for tensor in shard])
        for shard in group_by_size(list(by_name), sizes, max_shard_bytes)
    ]
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else [SINGLE]
    for shard in shards:
        header_of(shard)  # raises for what safetensors cannot express
    with closing(registry.open_store(target.folder, settings)) as store, _rollback_on_error(store) as keep:
        for name, shard in zip(names, shards, strict=True):
            with _prefetched(source, shard, settings) as tensors:
                if force and not keep:
                    _remove_old(store)
                write_safetensors(store, name, shard, tensors, on_bytes)
            keep.append(name)
        if count > 1:
            text = json.dumps(_index(names, shards, sum(sizes)), indent=2, sort_keys=True).encode()
            with store.write(INDEX) as writer:
                writer.write([memoryview(text)])


def _remove_old(store: BlobStore) -> None:
    """Remove a checkpoint, its index first, so that no reader mixes new and old shards."""
    old = [entry.name for entry in store.list("model-") if _SHARD.fullmatch(entry.name)]
    for name in (INDEX, SINGLE, manifest_name(SINGLE), *old):
        store.remove(name)


def _index(names: Sequence[str], shards: Sequence[Sequence[TensorOutline]], total: int) -> dict[str, object]:
    weight_map = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


@contextmanager
def _rollback_on_error(store: BlobStore) -> Iterator[list[str]]:
    """Yield a list of blob names that are removed if the block ends with an exception."""
    names: list[str] = []
    try:
        yield names
    except BaseException:
        for name in names:
            best_effort_remove(store, name)
        raise
