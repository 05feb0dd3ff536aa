"""Converts one format of tensor files to another, on any storage."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

from rfork import settings as options
from rfork.errors import CheckpointError, SettingsError, StorageAccessDenied, StorageCorrupt, StorageNotFound
from rfork.image.capture import image_from_tensors
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import BlobStore, size_of
from rfork.storage.formats.detect import INDEX, INDEX_SUFFIX, SINGLE, open_source
from rfork.storage.formats.safetensors_file import header_of, in_file_order, write_safetensors
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.io.prefetch import group_by_size, read_ahead, start_thread
from rfork.storage.location import Location
from rfork.storage.snapshots.entry import (
    DATA_SUFFIX,
    MANIFEST_SUFFIX,
    SnapshotEntry,
    manifest_name,
    read_entry,
    snapshot_location,
    snapshot_name,
)
from rfork.storage.snapshots.repository import best_effort_remove
from rfork.storage.snapshots.verifier import SnapshotVerifier
from rfork.storage.snapshots.writer import OTHER_FORMATS, write_snapshot
from rfork.storage.tensorizer.encryption import Secret
from rfork.storage.tensorizer.file_set import SUFFIX, existing_files, is_template, resolve_template
from rfork.storage.tensorizer.writer import write_stream
from rfork.storage.tensors import SaveReport, StoredTensor, TensorOutline, TensorSource

OutputFormat = Literal["tensors", "safetensors", "checkpoint", "snapshot"]

_RANK_FILE = re.compile(
    rf"(?P<rank>(model|speculative)-rank-\d+(-ep-\d+)?)(-\d{{5}}-of-\d{{5}})?"
    rf"({re.escape(DATA_SUFFIX)}({re.escape(MANIFEST_SUFFIX)})?|{re.escape(SUFFIX)})"
)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def format_of(destination: Location, max_shard_bytes: int | None) -> OutputFormat:
    """Return the format for a destination.

    The suffix selects a ``.tensors`` or a ``.safetensors`` file. A folder becomes a Hugging Face folder of
    safetensors files if a shard size is given, otherwise a snapshot.
    """
    name = destination.name
    if destination.scheme in ("http", "https"):
        raise SettingsError(f"{destination.uri} is read-only: it is a web server", hint="write to s3:// or a path")
    if name.endswith(SUFFIX):
        return "tensors"
    if name.endswith(".safetensors"):
        if max_shard_bytes is not None:
            raise SettingsError(
                f"{destination.uri} is a single file and cannot be sharded",
                hint="pass a folder, or omit the shard size",
            )
        return "safetensors"
    if name.endswith(OTHER_FORMATS):
        raise SettingsError(
            f"{destination.uri}: this format cannot be written",
            hint=f"use a {SUFFIX} or .safetensors file, or a folder",
        )
    return "snapshot" if max_shard_bytes is None else "checkpoint"


def check_not_same(source: Location, destination: Location, output_format: OutputFormat) -> None:
    """Raise SettingsError if the destination is also the source."""
    one, other = _resolved(source), _resolved(destination)
    same = one == other
    if output_format in ("checkpoint", "snapshot"):
        same = same or _resolved(source.parent) == other
    elif output_format == "safetensors":
        # The file is in the folder that is read.
        same = same or one == _resolved(destination.parent)
    if same:
        raise SettingsError(f"{destination.uri} is also the source", hint="write to another name or folder")


def _resolved(location: Location) -> str:
    if location.scheme == "file":
        return Path(location.path).resolve().as_uri()
    return location.uri.rstrip("/")


def check_not_existing(
    destination: Location, output_format: OutputFormat, settings: StorageSettings, rank: Rank | None, *, force: bool
) -> None:
    """Raise SettingsError if the destination exists and must not be replaced.

    A snapshot is never written to a folder that contains a checkpoint, because loading that folder would load
    the checkpoint. It may join snapshots of other ranks if `rank` is set.
    """
    folder = output_format in ("checkpoint", "snapshot")
    with closing(registry.open_store(destination.folder if folder else destination.parent, settings)) as store:

        def is_there(*names: str) -> bool:
            return any(size_of(store, name) is not None for name in names)

        if output_format == "snapshot" and rank is not None:
            own = snapshot_name(rank)
            exists = is_there(own, manifest_name(own), INDEX, SINGLE)
        elif folder:
            exists = _first(store) is not None
        elif force:
            return
        elif output_format == "tensors":
            try:
                exists = bool(existing_files(store, destination.name))
            except StorageAccessDenied:  # not allowed to list, but perhaps to read one name
                exists = is_there(destination.name)
        else:
            exists = is_there(destination.name, manifest_name(destination.name))
        if exists and not force:
            raise SettingsError(f"{destination.uri} already exists", hint="use --force to replace it")
        if output_format == "snapshot" and exists and is_there(INDEX, SINGLE):
            raise SettingsError(
                f"{destination.uri} contains a checkpoint, which would be loaded instead of the snapshot",
                hint="use another folder",
            )


def _first(store: BlobStore) -> str | None:
    try:
        return next((entry.name for entry in store.list()), None)
    except StorageNotFound:
        return None


def rank_from_number(number: int) -> Rank:
    """Return a rank with this number in file names. Raises SettingsError if the number is out of range."""
    try:
        return Rank(tp=number, tp_size=number + 1)
    except ValidationError:
        raise SettingsError(f"{number} is not a valid rank") from None


@contextmanager
def open_input(
    source: str, settings: StorageSettings, rank: Rank | None, unlock: Secret | None
) -> Iterator[tuple[TensorSource, Rank | None]]:
    """Yield the tensors of `source` (of `rank` if it is a folder with several) and its rank, if known.

    Raises SettingsError if a folder contains several ranks and `rank` is None, or if `source` is a single
    file and `rank` is set.
    """
    location = Location.parse(source)
    of_one = location.name.endswith((SUFFIX, DATA_SUFFIX, INDEX_SUFFIX)) and not is_template(source)
    if of_one and rank is not None:
        raise SettingsError(
            f"{location.uri} already names the file of one rank", hint="pass its folder, or omit --rank"
        )
    key, password = (unlock.key, unlock.password) if unlock is not None else (None, None)
    with closing(open_source(source, settings, rank, key=key, password=password)) as input_source:
        if not of_one and rank is None:
            _reject_several(Location.parse(input_source.uri), settings)
        yield input_source, _manifest_rank(input_source, settings) or rank


def verify(
    source: str,
    input_source: TensorSource,
    settings: StorageSettings,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Compare a snapshot's bytes with its manifest. Other sources are accepted unchecked.

    Raises StorageCorrupt, and the store's errors. If a file is replaced after this check, reading it fails,
    because it was opened before.
    """
    location = Location.parse(source)
    # A signature is valid for one object only, so the manifest cannot be requested.
    if location.query or not isinstance(input_source, SafetensorsSource) or input_source.layout is None:
        return
    folder, name = snapshot_location(input_source.uri)
    try:
        result = SnapshotVerifier(settings, progress).verify(SnapshotEntry(folder, name, None))
    except CheckpointError:  # there is no manifest
        return
    if result.mismatches:
        raise StorageCorrupt(
            f"{result.mismatches[0]} ({len(result.mismatches)} in total)",
            hint="run `rfork snapshot verify` to list all damage; a converted file would appear intact",
        )


def _manifest_rank(input_source: TensorSource, settings: StorageSettings) -> Rank | None:
    """Return the rank recorded in a snapshot's manifest."""
    location = Location.parse(input_source.uri)
    if not isinstance(input_source, SafetensorsSource) or input_source.layout is None or location.query:
        return None
    try:
        manifest_file = read_entry(*snapshot_location(input_source.uri), settings).manifest_file
    except (
        StorageNotFound,
        StorageCorrupt,
        StorageAccessDenied,
    ):  # not a snapshot, or `verify` reports the problem
        return None
    return manifest_file.rank if manifest_file is not None else None


def _reject_several(chosen: Location, settings: StorageSettings) -> None:
    if not _RANK_FILE.fullmatch(chosen.name):
        return
    with closing(registry.open_store(chosen.parent, settings)) as store:
        try:
            ranks_found = [match["rank"] for entry in store.list() if (match := _RANK_FILE.fullmatch(entry.name))]
        except (SettingsError, StorageAccessDenied):  # storage that cannot be listed
            return
    ranks = sorted(set(ranks_found))
    if len(ranks) > 1:
        raise SettingsError(
            f"{chosen.parent.uri} contains {len(ranks)} ranks: {ranks[0]}, {ranks[1]}" + " …" * (len(ranks) > 2),
            hint="select one with --rank, or pass its file",
        )


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
