"""What a conversion writes, and whether it may be written there."""

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

Format = Literal["tensors", "safetensors", "checkpoint", "snapshot"]


def format_of(destination: Location, max_shard_bytes: int | None) -> Format:
    """What is written to a name: by its suffix a ``.tensors`` or a ``.safetensors`` file; a folder becomes

    a Hugging Face folder of safetensors files where a size of its shards is given, else a snapshot.
    """
    name = destination.name
    if destination.scheme in ("http", "https"):
        raise SettingsError(f"{destination.uri}: web servers can only be read")
    if name.endswith(SUFFIX):
        return "tensors"
    if name.endswith(".safetensors"):
        if max_shard_bytes is not None:
            raise SettingsError(
                f"{destination.uri} is one file, which has no shards",
                hint="name a folder, or give no shard size",
            )
        return "safetensors"
    if name.endswith(OTHER_FORMATS):
        raise SettingsError(
            f"{destination.uri}: this format is not written",
            hint=f"name a {SUFFIX} or .safetensors file, or a folder",
        )
    return "snapshot" if max_shard_bytes is None else "checkpoint"


def check_not_same(source: Location, destination: Location, output_format: Format) -> None:
    """Raises SettingsError where what is read would be written."""
    one, other = _real(source), _real(destination)
    same = one == other
    if output_format in ("checkpoint", "snapshot"):
        same = same or _real(source.parent) == other
    elif output_format == "safetensors":
        # A folder's own file: it is what is read.
        same = same or one == _real(destination.parent)
    if same:
        raise SettingsError(f"{destination.uri} is what is read", hint="write to another name or folder")


def _real(location: Location) -> str:
    if location.scheme == "file":
        return Path(location.path).resolve().as_uri()
    return location.uri.rstrip("/")


def check_not_existing(
    destination: Location, output_format: Format, settings: StorageSettings, rank: Rank | None, *, force: bool
) -> None:
    """Raises SettingsError where something is there, unless it may be replaced.

    A snapshot never joins a checkpoint in its folder: whoever loads that folder would go on with the latter.
    Those of other ranks it joins where its own is named.
    """
    folder = output_format in ("checkpoint", "snapshot")
    with closing(registry.open_store(destination.folder if folder else destination.parent, settings)) as store:
        if output_format == "snapshot" and rank is not None:
            own = snapshot_name(rank)
            there = any(_is_there(store, name) for name in (own, manifest_name(own), INDEX, SINGLE))
        elif folder:
            there = _first(store) is not None
        elif force:
            return
        elif output_format == "tensors":
            there = _file_set_exists(store, destination.name)
        else:
            there = _is_there(store, destination.name) or _is_there(store, manifest_name(destination.name))
        if there and not force:
            raise SettingsError(f"{destination.uri} is there already", hint="--force replaces it")
        if output_format == "snapshot" and there and (_is_there(store, INDEX) or _is_there(store, SINGLE)):
            raise SettingsError(f"{destination.uri} holds a checkpoint", hint="name another folder")


def _file_set_exists(store: BlobStore, name: str) -> bool:
    try:
        return bool(existing_files(store, name))
    except StorageAccessDenied:  # who may not list may ask for the one name
        return _is_there(store, name)


def _first(store: BlobStore) -> str | None:
    try:
        return next((entry.name for entry in store.list()), None)
    except StorageNotFound:
        return None


def _is_there(store: BlobStore, name: str) -> bool:
    try:
        store.open(name).close()
    except StorageNotFound:
        return False
    return True
