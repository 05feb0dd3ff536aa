"""Versions of snapshots: the one recorded in their manifests, or one that follows from their weights_ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Final

from rfork.errors import StorageCorrupt
from rfork.settings import StorageSettings
from rfork.storage.location import Location
from rfork.storage.versions.weight_files import WeightFiles

if TYPE_CHECKING:
    from rfork.storage.snapshots.files import ManifestFile

WEIGHTS_PREFIX: Final = "weights:"


def recorded_snapshots(
    folder: Location, found: WeightFiles, settings: StorageSettings
) -> dict[str, ManifestFile] | None:
    """Return the manifest of each snapshot in a folder, by name; None unless all weight files are snapshots.

    The header of each snapshot is read, as a manifest next to replaced data is worth nothing. Raises
    StorageCorrupt for such, and other StorageErrors. Files of other programs that have a manifest's name are
    ignored.
    """
    described = {manifest.removesuffix(".manifest.json") for manifest in found.manifests}
    if not described or not described.issuperset(found.weights):
        return None
    # These import torch.
    from rfork.storage.snapshots.files import manifest_name, open_files, stored
    from rfork.storage.snapshots.found import is_foreign

    manifests: dict[str, ManifestFile] = {}
    with stored(folder, settings) as store:
        for name in sorted(described):
            try:
                files = open_files(folder, name, settings)
            except StorageCorrupt:
                if is_foreign(store, manifest_name(name), strict=False):
                    continue
                raise
            with closing(files.data):
                manifests[name] = files.told
    return manifests if manifests and manifests.keys() >= set(found.weights) else None


def version_of_snapshots(uri: str, manifests: Mapping[str, ManifestFile]) -> str:
    """Return the one version of all these snapshots. Raises StorageCorrupt where they have several."""
    recorded = {manifest.version for manifest in manifests.values()}
    if len(recorded) > 1:
        named = ", ".join(sorted(version or "none" for version in recorded))
        raise StorageCorrupt(
            f"{uri} holds snapshots of several versions: {named}",
            hint="write the snapshots of all ranks again, or name one file",
        )
    (version,) = recorded
    if version is not None:
        return version
    ids = {name: manifest.weights_id for name, manifest in manifests.items()}
    if len(ids) == 1:
        return f"{WEIGHTS_PREFIX}{next(iter(ids.values()))}"
    text = "".join(f"{weights_id} {name}\n" for name, weights_id in sorted(ids.items()))
    return f"{WEIGHTS_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:32]}"
