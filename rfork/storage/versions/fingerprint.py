"""Fingerprints of weight files: equal for equal files, found without reading all of them.

Runs on the target, and without torch for local files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final

from rfork import settings as options
from rfork.errors import (
    SettingsError,
    StorageChanged,
    StorageCorrupt,
    StorageError,
    StorageMissing,
)
from rfork.settings import StorageSettings
from rfork.storage import stores
from rfork.storage.blob import Blob, Store, part
from rfork.storage.local.errors import storage_error
from rfork.storage.location import WEB, Location
from rfork.storage.reading.side_by_side import side_by_side
from rfork.storage.versions.samples import (
    FileState,
    digest_of_file,
    read_unchanged,
    sampled_digest,
    state_of,
)
from rfork.storage.versions.snapshot_version import recorded_snapshots, version_of_snapshots
from rfork.storage.versions.weight_files import (
    DEFAULT_INDEXES,
    INDEX_SUFFIX,
    WeightFiles,
    select_named,
    select_weight_files,
    shards_of_index,
)

FINGERPRINT_PREFIX: Final = "files:"
DOMAIN: Final = b"rfork-fingerprint-v1\n"
LOCAL_THREADS: Final = 32
"""Concurrent reads of small blocks: on a network file system each costs a round trip."""
LOCAL_ATTEMPTS: Final = 3
MAX_INDEX_BYTES: Final = 256 << 20
MAX_LISTED: Final = 10_000
REMOTE_SAMPLES: Final = 8
"""Blocks read of a remote file whose server sends neither an entity tag nor a date."""
WEB_NAMES: Final = (
    "model.safetensors.index.json",
    "model.safetensors",
    "model.safetensors.manifest.json",
    "model-rank-000.safetensors.manifest.json",
    "config.json",
)
"""Names that are tried on a web server, which lists nothing."""

ReadText = Callable[[str], bytes]


def fingerprint_of(uri: str | Path, settings: StorageSettings | None = None) -> str | None:
    """Return the version of the weight files at a folder, file or URI; None for a folder without weight files.

    It is ``files:`` and 32 hex digits, equal for equal files wherever they lie. Covered are the names of the
    weight files (see `select_weight_files`), their sizes, headers and sampled blocks (see `sampled_ranges`), and
    the content of their indexes; of object stores and web servers their names, sizes and entity tags. A change
    within a large file that touches no sampled block is not noticed.

    A snapshot, or a folder of snapshots, has the version recorded in its manifests; where none is recorded,
    ``weights:`` and its weights_id, or a hash of all ranks' weights_ids.

    Raises StorageMissing (nothing there, a broken link, a shard that the index names), StorageDenied,
    StorageCorrupt (no safetensors file, no index, snapshots of several versions), StorageChanged (the files
    keep changing) and other StorageErrors; SettingsError for what is no URI of storage.
    """
    location = Location.parse(uri)
    chosen = settings or options.load(StorageSettings)
    if location.scheme == "file":
        return _of_local(Path(location.path), chosen)
    return _of_remote(location, chosen)


def _of_local(path: Path, settings: StorageSettings) -> str | None:
    for _ in range(LOCAL_ATTEMPTS):
        try:
            return _of_local_once(path, settings)
        except StorageChanged as error:
            last = error
    raise StorageChanged(
        f"{path}: the files keep changing while they are read ({last})",
        hint="wait until the checkpoint is complete",
    )


def _of_local_once(path: Path, settings: StorageSettings) -> str | None:
    folder, name = (path, None) if path.is_dir() else (path.parent, path.name)
    names = _local_names(folder)
    found = select_weight_files(names) if name is None else select_named(name, names)
    if name is not None and not any(each in names for each in found.all):
        raise StorageMissing(f"{path}: no such file or folder")
    snapshots = recorded_snapshots(Location.parse(folder).folder, found, settings)
    if snapshots is not None:
        return version_of_snapshots(Location.parse(folder).uri, snapshots)

    def states_of(names: Iterable[str]) -> dict[str, FileState]:
        return {each: state_of(folder / each) for each in names}

    states = states_of(found.all)
    texts = (*found.indexes, *found.manifests)

    def read_text(each: str) -> bytes:
        state = states[each]
        if state.size > MAX_INDEX_BYTES:
            raise StorageCorrupt(f"{folder / each} is too long for an index: {state.size} bytes")
        return read_unchanged(folder / each, state, lambda read: read(0, state.size))

    contents = {each: read_text(each) for each in texts}
    weights = _with_shards(str(folder), found, contents, only_indexed=name is not None)
    for each in weights:
        if each not in states:
            states[each] = _state_of_shard(folder, each)
    if not weights:
        return None

    def digest(each: str) -> bytes:
        return digest_of_file(folder / each, states[each])

    digests = dict(zip(weights, side_by_side(str(folder), digest, weights, LOCAL_THREADS), strict=True))
    if _local_names(folder) != names and name is None:
        raise StorageChanged(f"files of {folder} were added or removed")
    if states_of(states) != states:
        raise StorageChanged(f"files of {folder} were replaced")
    return _combined(digests, contents)


def _local_names(folder: Path) -> frozenset[str]:
    """Names in a folder of what may be a weight file, an index or a manifest."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise storage_error(folder, error) from None
    return frozenset(names)


def _state_of_shard(folder: Path, name: str) -> FileState:
    try:
        return state_of(folder / name)
    except StorageMissing:
        if (folder / name).is_symlink():
            raise
        raise _lacks(str(folder), name) from None


def _of_remote(location: Location, settings: StorageSettings) -> str | None:
    if location.query:
        with stores.opened(location, settings) as blob:
            return _combined({location.name: _remote_digest(blob)}, {})
    folder, name = location, None
    if location.name and _has_file_name(location.name):
        folder, name = location.parent, location.name
    with closing(stores.open_store(folder.folder, settings)) as store:
        names = _remote_names(store, name)
        found = select_weight_files(names) if name is None else select_named(name, names)
        if not names or (name is not None and not found.all):
            raise StorageMissing(f"{location.uri} holds no files")
        snapshots = recorded_snapshots(folder.folder, found, settings)
        if snapshots is not None:
            return version_of_snapshots(folder.uri, snapshots)
        contents = {each: _read_remote(store, each) for each in (*found.indexes, *found.manifests)}
        weights = _with_shards(folder.uri, found, contents, only_indexed=name is not None)
        if not weights:
            return None

        def digest(each: str) -> bytes:
            try:
                blob = store.open(each)
            except StorageMissing:
                if each in found.weights:
                    raise
                raise _lacks(folder.uri, each) from None
            with closing(blob):
                return _remote_digest(blob)

        digests = side_by_side(folder.uri, digest, weights, settings.streams)
        return _combined(dict(zip(weights, digests, strict=True)), contents)


def _has_file_name(name: str) -> bool:
    return "." in name and select_named(name, [name]) != WeightFiles((), (), ()) and _is_weight_name(name)


def _is_weight_name(name: str) -> bool:
    return name.endswith(INDEX_SUFFIX) or bool(select_weight_files([name]).weights)


def _remote_names(store: Store, name: str | None) -> frozenset[str]:
    """Names in the folder; of a web server, those that are there of `WEB_NAMES`, or `name`."""
    prefix = "" if name is None else name.partition("%")[0].partition("-0")[0].removesuffix(".tensors")
    try:
        listed = [entry.name for entry in islice(store.list(prefix), MAX_LISTED + 1)]
    except SettingsError:
        wanted = WEB_NAMES if name is None else (name, f"{name}.manifest.json")
        return frozenset(each for each in wanted if _exists(store, each))
    if len(listed) > MAX_LISTED:
        raise StorageError(
            f"{store.uri} holds more than {MAX_LISTED} files", hint="name the folder of one checkpoint"
        )
    return frozenset(listed)


def _exists(store: Store, name: str) -> bool:
    try:
        store.open(name).close()
    except StorageMissing:
        return False
    return True


def _read_remote(store: Store, name: str) -> bytes:
    with closing(store.open(name)) as blob:
        if blob.size > MAX_INDEX_BYTES:
            raise StorageCorrupt(f"{blob.uri} is too long for an index: {blob.size} bytes")
        return part(blob, 0, blob.size)


def _remote_digest(blob: Blob) -> bytes:
    if blob.version is not None:
        return hashlib.sha256(f"{blob.size}\n{blob.version}".encode()).digest()
    return sampled_digest(
        blob.uri, blob.size, lambda offset, length: part(blob, offset, length), REMOTE_SAMPLES
    )


def _with_shards(
    uri: str, found: WeightFiles, contents: Mapping[str, bytes], *, only_indexed: bool
) -> list[str]:
    """Weight files with the shards that indexes name; none where a folder has an index but no shard of it."""
    weights = set(found.weights)
    if not weights and not only_indexed and not _is_web(uri):
        return []
    for index in found.indexes:
        if not only_indexed and index not in DEFAULT_INDEXES:
            continue
        try:
            weights |= shards_of_index(contents[index])
        except ValueError as error:
            raise StorageCorrupt(f"{uri.rstrip('/')}/{index} is not an index of weights: {error}") from None
    return sorted(weights)


def _is_web(uri: str) -> bool:
    return uri.partition("://")[0] in WEB


def _lacks(uri: str, shard: str) -> StorageMissing:
    return StorageMissing(
        f"{uri} lacks the shard {shard}, which its index names", hint="download the checkpoint again"
    )


def _combined(digests: Mapping[str, bytes], contents: Mapping[str, bytes]) -> str:
    """The fingerprint of files by name and digest, and of texts by name and content."""
    state = hashlib.sha256(DOMAIN)
    covered = {**digests, **{name: hashlib.sha256(text).digest() for name, text in contents.items()}}
    for name, digest in sorted(covered.items()):
        encoded = name.encode("utf-8", "surrogateescape")
        state.update(len(encoded).to_bytes(4, "little") + encoded + digest)
    return f"{FINGERPRINT_PREFIX}{state.hexdigest()[:32]}"
