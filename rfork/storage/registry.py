"""Selects the store for a URI. Each implementation is imported when its first URI is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from rfork import settings as options
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob, BlobStore
from rfork.storage.location import Location


def open_store(folder: Location, settings: StorageSettings | None = None) -> BlobStore:
    """Return the store for a folder's location; sends no request yet.

    Raises SettingsError, or MissingExtra if a required package is not installed.
    """
    chosen = settings or options.load(StorageSettings)
    match folder.scheme:
        case "file":
            from rfork.storage.local import LocalStore

            return LocalStore(folder, chosen)
        case "s3":
            from rfork.storage.s3.store import S3Store

            return S3Store(folder, chosen)
        case "gs" | "az":
            from rfork.storage.object_store import CloudStore

            return CloudStore(folder, chosen)
        case _:
            from rfork.storage.http.store import HttpStore

            return HttpStore(folder, chosen)


@contextmanager
def open_blob(location: Location, settings: StorageSettings | None = None) -> Iterator[Blob]:
    """Open the blob at a location for the duration of the block. Raises the same errors as `BlobStore.open`."""
    with closing(open_store(location.parent, settings)) as store, closing(store.open(location.blob_name)) as blob:
        yield blob
