"""Versions of snapshots: recorded in their manifests, or derived from their weights_ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Final

from rfork.errors import StorageCorrupt, StorageError
from rfork.settings import StorageSettings
from rfork.storage.location import Location
from rfork.storage.versions.weight_files import MANIFEST_SUFFIX, WeightFiles

if TYPE_CHECKING:
    from rfork.storage.snapshots.files import ManifestFile

WEIGHTS_PREFIX: Final = "weights:"


def read_snapshots(folder: Location, found: WeightFiles, settings: StorageSettings) -> dict[str, ManifestFile] | None:
    """Return the manifest of each snapshot in a folder, by name; None unless all weight files are snapshots.

    Each snapshot's header is read too, because its data may have been replaced without its manifest: raises
    StorageCorrupt then, and other StorageErrors. Other programs' manifests are ignored.
    """
    described = {manifest.removesuffix(MANIFEST_SUFFIX) for manifest in found.manifests}
    if not described or not described.issuperset(found.weights):
        return None
    # Imported here because they import torch.
    from rfork.storage.snapshots.entry import is_foreign_manifest
    from rfork.storage.snapshots.files import folder_store, manifest_name, open_files

    manifests: dict[str, ManifestFile] = {}
    with folder_store(folder, settings) as store:
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
