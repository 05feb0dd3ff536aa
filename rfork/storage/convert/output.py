"""Output of a conversion: its format, and checks that it may be written."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Literal

from rfork.errors import SettingsError, StorageAccessDenied, StorageNotFound
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import BlobStore
from rfork.storage.formats.detect import INDEX, SINGLE
from rfork.storage.location import Location
from rfork.storage.snapshots.destination import OTHER_FORMATS
from rfork.storage.snapshots.files import manifest_name, snapshot_name
from rfork.storage.tensorizer.file_set import SUFFIX, existing_files

OutputFormat = Literal["tensors", "safetensors", "checkpoint", "snapshot"]


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
        if output_format == "snapshot" and rank is not None:
            own = snapshot_name(rank)
            exists = any(_exists(store, name) for name in (own, manifest_name(own), INDEX, SINGLE))
        elif folder:
            exists = _first(store) is not None
        elif force:
            return
        elif output_format == "tensors":
            exists = _file_set_exists(store, destination.name)
        else:
            exists = _exists(store, destination.name) or _exists(store, manifest_name(destination.name))
        if exists and not force:
            raise SettingsError(f"{destination.uri} already exists", hint="use --force to replace it")
        if output_format == "snapshot" and exists and (_exists(store, INDEX) or _exists(store, SINGLE)):
            raise SettingsError(
                f"{destination.uri} contains a checkpoint, which would be loaded instead of the snapshot",
                hint="use another folder",
            )


def _file_set_exists(store: BlobStore, name: str) -> bool:
    try:
        return bool(existing_files(store, name))
    except StorageAccessDenied:  # not allowed to list, but perhaps to read one name
        return _exists(store, name)


def _first(store: BlobStore) -> str | None:
    try:
        return next((entry.name for entry in store.list()), None)
    except StorageNotFound:
        return None


def _exists(store: BlobStore, name: str) -> bool:
    try:
        store.open(name).close()
    except StorageNotFound:
        return False
    return True
