"""What a conversion writes, and whether it may be written there."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Literal

from rfork.errors import SettingsError, StorageDenied, StorageMissing
from rfork.settings import StorageSettings
from rfork.storage import stores
from rfork.storage.blob import Store
from rfork.storage.formats.choice import INDEX, SINGLE
from rfork.storage.location import Location
from rfork.storage.snapshots.files import manifest_name, snapshot_name
from rfork.storage.snapshots.target import OTHER_FORMATS
from rfork.storage.tensorizer.names import SUFFIX, same_name
from rfork.wire import Rank

Format = Literal["tensors", "safetensors", "checkpoint", "snapshot"]


def format_of(target: Location, max_shard_bytes: int | None) -> Format:
    """What is written to a name: by its suffix a ``.tensors`` or a ``.safetensors`` file; a folder becomes

    a Hugging Face folder of safetensors files where a size of its shards is given, else a snapshot.
    """
    name = target.name
    if target.scheme in ("http", "https"):
        raise SettingsError(f"{target.uri}: web servers can only be read")
    if name.endswith(SUFFIX):
        return "tensors"
    if name.endswith(".safetensors"):
        if max_shard_bytes is not None:
            raise SettingsError(
                f"{target.uri} is one file, which has no shards", hint="name a folder, or give no shard size"
            )
        return "safetensors"
    if name.endswith(OTHER_FORMATS):
        raise SettingsError(
            f"{target.uri}: this format is not written",
            hint=f"name a {SUFFIX} or .safetensors file, or a folder",
        )
    return "snapshot" if max_shard_bytes is None else "checkpoint"


def check_apart(source: Location, target: Location, kind: Format) -> None:
    """Raises SettingsError where what is read would be written."""
    one, other = _real(source), _real(target)
    same = one == other
    if kind in ("checkpoint", "snapshot"):
        same = same or _real(source.parent) == other
    elif kind == "safetensors":
        # A folder's own file: it is what is read.
        same = same or one == _real(target.parent)
    if same:
        raise SettingsError(f"{target.uri} is what is read", hint="write to another name or folder")


def _real(location: Location) -> str:
    if location.scheme == "file":
        return Path(location.path).resolve().as_uri()
    return location.uri.rstrip("/")


def check_free(
    target: Location, kind: Format, settings: StorageSettings, rank: Rank | None, *, force: bool
) -> None:
    """Raises SettingsError where something is there, unless it may be replaced.

    A snapshot never joins a checkpoint in its folder: whoever loads that folder would go on with the latter.
    Those of other ranks it joins where its own is named.
    """
    folder = kind in ("checkpoint", "snapshot")
    with closing(stores.open_store(target.folder if folder else target.parent, settings)) as store:
        if kind == "snapshot" and rank is not None:
            own = snapshot_name(rank)
            there = any(_is_there(store, name) for name in (own, manifest_name(own), INDEX, SINGLE))
        elif folder:
            there = _first(store) is not None
        elif force:
            return
        elif kind == "tensors":
            there = _stands_for(store, target.name)
        else:
            there = _is_there(store, target.name) or _is_there(store, manifest_name(target.name))
        if there and not force:
            raise SettingsError(f"{target.uri} is there already", hint="--force replaces it")
        if kind == "snapshot" and there and (_is_there(store, INDEX) or _is_there(store, SINGLE)):
            raise SettingsError(f"{target.uri} holds a checkpoint", hint="name another folder")


def _stands_for(store: Store, name: str) -> bool:
    try:
        return bool(same_name(store, name))
    except StorageDenied:  # who may not list may ask for the one name
        return _is_there(store, name)


def _first(store: Store) -> str | None:
    try:
        return next((entry.name for entry in store.list()), None)
    except StorageMissing:
        return None


def _is_there(store: Store, name: str) -> bool:
    try:
        store.open(name).close()
    except StorageMissing:
        return False
    return True
