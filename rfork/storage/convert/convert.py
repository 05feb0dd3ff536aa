"""From one format of tensor files to another, on any storage."""

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
from rfork.image.capture import image_of
from rfork.settings import StorageSettings
from rfork.storage import stores
from rfork.storage.blob import Store
from rfork.storage.convert.target import check_apart, check_free, format_of
from rfork.storage.formats.choice import INDEX, SINGLE, open_source
from rfork.storage.formats.safetensors_writer import in_file_order, write_safetensors
from rfork.storage.location import Location
from rfork.storage.modules.saved import Saved
from rfork.storage.reading.ahead import begun, groups_of, read_ahead
from rfork.storage.snapshots.files import manifest_name
from rfork.storage.snapshots.writer import write_snapshot
from rfork.storage.tensorizer.crypt import Secret
from rfork.storage.tensorizer.names import SUFFIX
from rfork.storage.tensorizer.writer import Outline, write_stream
from rfork.storage.tensors import StoredTensor, TensorSource

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def convert(
    source: str,
    destination: str,
    *,
    dtype: torch.dtype | None = None,
    only: Sequence[str] = (),
    unlock: Secret | None = None,
    lock: Secret | None = None,
    max_shard_bytes: int | None = None,
    force: bool = False,
    settings: StorageSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Saved:
    """Write what `source` holds (all, or the names that match a pattern of `only`) to `destination`.

    The name of `destination` says what is written: `format_of`. `dtype` converts floating-point tensors.
    `unlock` and `lock` open and encrypt ``.tensors`` files. What is there is replaced with `force` only.
    At most `settings.memory` bytes of tensors, or two of them, are in memory at once, and as much again
    while they are written; of a snapshot the whole image, whose digests stand at the front.
    `progress` is told the bytes that are written and their sum.

    Raises SettingsError, CheckpointError and StorageError kinds; nothing is left at `destination` then
    that was not there.
    """
    began = time.monotonic()
    chosen = settings or options.load(StorageSettings)
    target = Location.parse(destination)
    kind = format_of(target, max_shard_bytes)
    if lock is not None and kind != "tensors":
        raise SettingsError(f"{target.uri}: only {SUFFIX} files are encrypted")
    check_apart(Location.parse(source), target, kind)
    check_free(target, kind, chosen, force=force)
    key, password = (unlock.key, unlock.password) if unlock is not None else (None, None)
    with closing(open_source(source, chosen, key=key, password=password)) as opened:
        outlines = _outlines(opened, dtype, only)
        total, done = sum(outline.spec.nbytes for outline in outlines), 0

        def tell(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        match kind:
            case "tensors":
                with closing(_in_order(opened, outlines, chosen)) as tensors:
                    write_stream(
                        outlines, tensors, destination, chosen, lock,
                        max_file_bytes=max_shard_bytes, progress=tell,
                    )  # fmt: skip
            case "snapshot":
                _write_snapshot(opened, outlines, destination, chosen, tell)
            case _:
                _write_checkpoint(opened, outlines, target, max_shard_bytes, chosen, tell)
    return Saved(target.uri, len(outlines), total, time.monotonic() - began)


def _outlines(source: TensorSource, dtype: torch.dtype | None, only: Sequence[str]) -> list[Outline]:
    """What is going to be written. Raises CheckpointError for a pattern that no name matches."""
    specs = source.specs
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in specs):
            raise CheckpointError(f"{source.uri} holds no tensor that matches {pattern!r}")
    outlines: list[Outline] = []
    for name, spec in specs.items():
        if only and not any(fnmatchcase(name, pattern) for pattern in only):
            continue
        if dtype is not None and spec.dtype.is_floating_point:
            spec = StoredTensor(dtype, spec.shape, math.prod(spec.shape) * dtype.itemsize)
        outlines.append(Outline(name, spec))
    if not outlines:
        raise CheckpointError(f"{source.uri} holds no tensors")
    return outlines


def _in_order(
    source: TensorSource, outlines: Sequence[Outline], settings: StorageSettings
) -> Generator[torch.Tensor, None, None]:
    """The tensors in that order, of those types; those that follow are read meanwhile."""
    specs = {outline.name: outline.spec for outline in outlines}

    def read(names: Sequence[str]) -> list[torch.Tensor]:
        tensors = {name: torch.empty(specs[name].shape, dtype=specs[name].dtype) for name in names}
        source.read_into(tensors)
        return [tensors[name] for name in names]

    sizes = [spec.nbytes for spec in specs.values()]
    return read_ahead(groups_of(list(specs), sizes, settings.memory // 2), read)


def _write_snapshot(
    source: TensorSource,
    outlines: Sequence[Outline],
    destination: str,
    settings: StorageSettings,
    tell: Callable[[int], None],
) -> None:
    tensors = {
        outline.name: torch.empty(outline.spec.shape, dtype=outline.spec.dtype) for outline in outlines
    }
    # On a thread that can be left behind: a read may hang when the user gives up.
    begun(lambda: source.read_into(tensors))()
    image = image_of(tensors)
    write_snapshot(image, image.manifest(), destination, settings=settings, progress=tell)


def _write_checkpoint(
    source: TensorSource,
    outlines: Sequence[Outline],
    target: Location,
    max_shard_bytes: int | None,
    settings: StorageSettings,
    tell: Callable[[int], None],
) -> None:
    """One safetensors file; or, with a size of shards, a folder of them, the index last."""
    if max_shard_bytes is None:
        ordered = in_file_order(outlines)
        with (
            closing(stores.open_store(target.parent, settings)) as store,
            closing(_in_order(source, ordered, settings)) as tensors,
        ):
            write_safetensors(store, target.name, ordered, tensors, tell)
            store.remove(manifest_name(target.name))  # of a snapshot that had this name
        return
    by_name = {outline.name: outline for outline in outlines}
    sizes = [outline.spec.nbytes for outline in outlines]
    shards = groups_of(list(by_name), sizes, max_shard_bytes)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else [SINGLE]
    with closing(stores.open_store(target.folder, settings)) as store:
        # A folder without an index is none: nobody reads old and new shards together.
        store.remove(INDEX)
        store.remove(SINGLE)
        with _all_or_none(store) as keep:
            for name, shard in zip(names, shards, strict=True):
                ordered = in_file_order([by_name[tensor] for tensor in shard])
                with closing(_in_order(source, ordered, settings)) as tensors:
                    write_safetensors(store, name, ordered, tensors, tell)
                keep.append(name)
            if count > 1:
                text = json.dumps(_index(names, shards, sum(sizes)), indent=2, sort_keys=True).encode()
                with store.write(INDEX) as writer:
                    writer.write([memoryview(text)])
        for old in [entry.name for entry in store.list("model-")]:
            if _SHARD.fullmatch(old) and old not in names:
                store.remove(old)


def _index(names: Sequence[str], shards: Sequence[Sequence[str]], total: int) -> dict[str, object]:
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


@contextmanager
def _all_or_none(store: Store) -> Iterator[list[str]]:
    """A list of blobs that are removed again where the block ends with an exception."""
    names: list[str] = []
    try:
        yield names
    except BaseException:
        for name in names:
            store.remove(name)
        raise
