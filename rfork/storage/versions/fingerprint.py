"""Versions of weight files: those recorded in snapshots, or fingerprints of the files.

Fingerprints are equal for equal files, and computed without reading them completely. Runs on the target, without
torch for local files that are not snapshots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from rfork import settings as options
from rfork.errors import StorageChanged, StorageCorrupt, StorageError, StorageNotFound
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.location import Location
from rfork.storage.versions.local_files import LocalFiles
from rfork.storage.versions.remote_files import open_remote_files
from rfork.storage.versions.weight_files import DEFAULT_INDEXES, MANIFEST_SUFFIX, WeightFiles, shards_of_index

if TYPE_CHECKING:
    from rfork.storage.snapshots.entry import ManifestFile

WEIGHTS_PREFIX: Final = "weights:"

FINGERPRINT_PREFIX: Final = "files:"
DOMAIN: Final = b"rfork-fingerprint-v1\n"
MAX_ATTEMPTS: Final = 3
"""Attempts at local files that change during the read."""


def read_snapshots(folder: Location, found: WeightFiles, settings: StorageSettings) -> dict[str, ManifestFile] | None:
    """Return the manifest of each snapshot in a folder, by name; None unless all weight files are snapshots.

    Each snapshot's header is read too, because its data may have been replaced without its manifest: raises
    StorageCorrupt then, and other StorageErrors. Other programs' manifests are ignored.
    """
    described = {manifest.removesuffix(MANIFEST_SUFFIX) for manifest in found.manifests}
    if not described or not described.issuperset(found.weights):
        return None
    # Imported here because they import torch.
    from rfork.storage.snapshots.entry import is_foreign_manifest, manifest_name, open_files

    manifests: dict[str, ManifestFile] = {}
    with closing(registry.open_store(folder, settings)) as store:
        for name in sorted(described):
            try:
                files = open_files(folder, name, settings)
            except StorageCorrupt:
                if is_foreign_manifest(store, manifest_name(name), strict=False):
                    continue
                raise
            with closing(files.data):
                manifests[name] = files.manifest_file
    return manifests if manifests and manifests.keys() >= set(found.weights) else None


def version_of_snapshots(uri: str, manifests: Mapping[str, ManifestFile], *, is_partial: bool) -> str:
    """Return the common version of these snapshots. Raises StorageCorrupt if they have several.

    With `is_partial`, snapshots of other ranks may exist: raises StorageError if no version is recorded.
    """
    recorded = {manifest.version for manifest in manifests.values()}
    if len(recorded) > 1:
        named = ", ".join(sorted(version or "none" for version in recorded))
        raise StorageCorrupt(
            f"{uri} contains snapshots of several versions: {named}",
            hint="write the snapshots of all ranks again, or pass one file",
        )
    (version,) = recorded
    if version is not None:
        return version
    if is_partial and any(each.rank.tp_size * each.rank.pp_size > 1 for each in manifests.values()):
        raise StorageError(
            f"{uri} cannot be listed, and its snapshots of several ranks record no version",
            hint="write them with a version, or state it",
        )
    ids = {name: manifest.weights_id for name, manifest in manifests.items()}
    if len(ids) == 1:
        return f"{WEIGHTS_PREFIX}{next(iter(ids.values()))}"
    text = "".join(f"{weights_id} {name}\n" for name, weights_id in sorted(ids.items()))
    return f"{WEIGHTS_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:32]}"


class Files(Protocol):
    """The weight files at a URI, in one type of storage."""

    @property
    def folder(self) -> Location:
        """Folder that all names are relative to."""
        ...

    @property
    def found(self) -> WeightFiles:
        """Their names."""
        ...

    @property
    def is_listed(self) -> bool:
        """True for a complete listing of a folder; False if the URI refers to files, or listing fails."""
        ...

    @property
    def is_partial(self) -> bool:
        """True for a folder that cannot be listed, of which only well-known names are found."""
        ...

    def text(self, name: str) -> bytes:
        """Return the content of an index or a manifest. Raises StorageError subclasses."""
        ...

    def digests(self, names: Sequence[str]) -> Sequence[bytes]:
        """Return a digest of each weight file. Raises StorageError subclasses."""
        ...


def fingerprint_of(uri: str | Path, settings: StorageSettings | None = None) -> str | None:
    """Return the version of the weights at a folder, file or URI; None for a folder without weight files.

    The version is ``files:`` and 32 hex digits, equal for equal files in any location. It covers the names of
    the weight files (see `select_weight_files`), their sizes, headers and sampled blocks (see
    `sampled_ranges`), and the content of their indexes; in object stores and on web servers: names, sizes and
    entity tags. A change within a large local file that affects no sampled block is not detected.

    A snapshot, or a folder of snapshots, has the version recorded in its manifests; if none is recorded,
    ``weights:`` and its weights_id, or a hash of all ranks' weights_ids.

    Raises StorageNotFound (nothing there, a broken link, a missing shard of the index), StorageAccessDenied,
    StorageCorrupt (invalid safetensors file or index, snapshots of several versions), StorageChanged (files
    keep changing) and other StorageErrors; SettingsError for an invalid URI.
    """
    location = Location.parse(uri)
    chosen = settings or options.load(StorageSettings)
    if location.scheme != "file":
        with closing(open_remote_files(location, chosen)) as remote:
            return _version_of_files(remote, chosen)
    for attempt in range(MAX_ATTEMPTS):
        try:
            files = LocalFiles(Path(location.path))
            version = _version_of_files(files, chosen)
            files.check_unchanged()
            return version
        except StorageChanged as error:
            if attempt == MAX_ATTEMPTS - 1:
                raise StorageChanged(f"{error}, {MAX_ATTEMPTS} times", hint=error.hint) from None
    raise AssertionError("unreachable")


def _version_of_files(files: Files, settings: StorageSettings) -> str | None:
    snapshots = read_snapshots(files.folder, files.found, settings)
    if snapshots is not None:
        return version_of_snapshots(files.folder.uri, snapshots, is_partial=files.is_partial)
    texts = {name: files.text(name) for name in (*files.found.indexes, *files.found.manifests)}
    weights = _with_shards(files, texts)
    if not weights and files.is_partial:
        raise StorageNotFound(
            f"{files.folder.uri} cannot be listed, and contains no weight file with a well-known name",
            hint="pass the file, or state the version",
        )
    if not weights:
        return None
    covered = {name: hashlib.sha256(text).digest() for name, text in texts.items()}
    covered |= zip(weights, files.digests(weights), strict=True)
    return f"{FINGERPRINT_PREFIX}{_combined(covered)}"


def _with_shards(files: Files, texts: Mapping[str, bytes]) -> list[str]:
    """Return weight files and the shards in indexes; empty for a listed folder with an index but no shard."""
    weights = set(files.found.weights)
    if files.is_listed and not weights:
        return []
    for index in files.found.indexes:
        if index in DEFAULT_INDEXES or not files.is_listed:
            try:
                weights |= shards_of_index(texts[index])
            except ValueError as error:
                where = files.folder.child(index).uri
                raise StorageCorrupt(f"{where} is not an index of weight files: {error}") from None
    return sorted(weights)


def _combined(covered: Mapping[str, bytes]) -> str:
    state = hashlib.sha256(DOMAIN)
    for name, digest in sorted(covered.items()):
        encoded = name.encode("utf-8", "surrogateescape")
        state.update(len(encoded).to_bytes(4, "little") + encoded + digest)
    return state.hexdigest()[:32]
