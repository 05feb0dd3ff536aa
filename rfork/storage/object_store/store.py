"""Google Cloud Storage and Azure Blob Storage, through obstore: its clients, credentials and retries.

Both look for credentials where their own tools do: GOOGLE_* and application default credentials, AZURE_*,
workload identity, instance metadata. An Azure account is named by AZURE_STORAGE_ACCOUNT_NAME.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from rfork.errors import MissingExtra, SettingsError, StorageChanged, StorageError
from rfork.settings import StorageSettings
from rfork.storage.blob import BlobEntry, BlobWriter
from rfork.storage.http.retry import RetryBudget
from rfork.storage.location import Location
from rfork.transport.http.stream import ScatterCursor

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    from rfork.storage.object_store.errors import is_retryable, to_storage_error
    from rfork.storage.object_store.upload import open_upload, part_size
except ImportError as error:
    raise MissingExtra("obstore, for gs:// and az://,", extra="cloud", why=str(error)) from None

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

READ_BYTES: Final = 1 << 20
"""Bytes of an answer that are copied into the caller's memory at once."""
REQUEST_BYTES: Final = 32 << 20
"""Most bytes asked for at once: each request has a limit of time, whatever the size of the blob."""
MIN_BYTES_PER_S: Final = 256 << 10
"""Bytes a second that a request, or a part of an upload, must move on the whole."""


class CloudStore:
    """See `Store`: the objects of a bucket or container whose names begin with a folder's path."""

    def __init__(self, folder: Location, settings: StorageSettings) -> None:
        self._folder = folder.folder
        self._settings = settings
        self._lock = threading.Lock()
        self._made: dict[bool, ObjectStore] = {}

    @property
    def uri(self) -> str:
        """See `Store`."""
        return self._folder.uri

    def open(self, name: str, *, front: int = 0) -> CloudBlob:
        """See `Store`."""
        location = self._folder.child(name)
        with _failing(location.uri):
            found = obstore.head(self._store(), location.path)
            reader = self._store(retries=False)
        return CloudBlob(location, reader, self._settings, int(found["size"]), found.get("e_tag"))

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        """See `Store`."""
        begin = self._folder.path
        # The services list by prefix, obstore by whole folders: the last part is looked at here.
        within = (begin + prefix).rpartition("/")[0]
        entries = []
        with _failing(self.uri):
            for page in obstore.list(self._store(), within or None):
                for found in page:
                    name = found["path"].removeprefix(begin)
                    if found["path"].startswith(begin + prefix) and name:
                        entries.append(BlobEntry(name, int(found["size"])))
        yield from sorted(entries, key=lambda entry: entry.name)

    def write(self, name: str, *, replace: bool = True) -> AbstractContextManager[BlobWriter]:
        """See `Store`. Parts of an upload that fails are not seen, and go by the bucket's own rules."""
        location = self._folder.child(name)
        with _failing(location.uri):
            return open_upload(self._store(), location, self._settings, replace=replace)

    def remove(self, name: str) -> None:
        """See `Store`."""
        location = self._folder.child(name)
        try:
            obstore.delete(self._store(), location.path)
        except FileNotFoundError:
            return
        except (BaseError, OSError, ValueError) as error:
            raise to_storage_error(location.uri, error) from None

    def close(self) -> None:
        """See `Store`."""
        with self._lock:
            self._made.clear()

    def _store(self, *, retries: bool = True) -> ObjectStore:
        """A client; `retries`: whether it asks again by itself, which reads do here, from where they were."""
        with self._lock:
            if retries not in self._made:
                self._made[retries] = _connect(self._folder, self._settings, retries=retries)
            return self._made[retries]


class CloudBlob:
    """See `Blob`."""

    def __init__(
        self, location: Location, store: ObjectStore, settings: StorageSettings, size: int, tag: str | None
    ) -> None:
        self._location = location
        self._store = store
        self._settings = settings
        self._size = size
        self._tag = tag
        self._closed = threading.Event()

    @property
    def uri(self) -> str:
        """See `Blob`."""
        return self._location.uri

    @property
    def size(self) -> int:
        """See `Blob`."""
        return self._size

    @property
    def version(self) -> str | None:
        """See `Blob`: the entity tag."""
        return self._tag

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """See `Blob`."""
        cursor = ScatterCursor(into)
        end = offset + cursor.left
        if offset < 0 or end > self._size:
            raise StorageError(f"{self.uri} has {self._size} bytes, not [{offset}, {end})")
        attempts = self._attempts()
        while cursor.left:
            before, begin = cursor.done, end - cursor.left
            try:
                self._fetch(cursor, begin, min(begin + REQUEST_BYTES, end))
                attempts = self._attempts()
            except (BaseError, OSError, ValueError) as error:
                pause = attempts.failed(cursor.done - before) if is_retryable(error) else None
                if pause is None:
                    raise to_storage_error(self.uri, error) from None
                self._closed.wait(pause)

    def close(self) -> None:
        """End it: reads under way raise StorageError with the next bytes that come."""
        self._closed.set()

    def _attempts(self) -> RetryBudget:
        return RetryBudget(self._settings.max_attempts, self._settings.timeout_s, random.random, time.monotonic)

    def _fetch(self, cursor: ScatterCursor, begin: int, end: int) -> None:
        self._check_open()
        left = end - begin
        if self._tag is None:
            response = obstore.get(self._store, self._location.path, options={"range": (begin, end)})
        else:
            response = obstore.get(
                self._store, self._location.path, options={"range": (begin, end), "if_match": self._tag}
            )
        found = response.meta
        if int(found["size"]) != self._size or (self._tag and found.get("e_tag") not in (None, self._tag)):
            raise StorageChanged(f"{self.uri} was replaced while it was read")
        for piece in response.stream(min_chunk_size=READ_BYTES):
            self._check_open()
            view = memoryview(piece)
            left -= len(view)
            if left < 0:
                raise StorageError(f"{self.uri}: the service sent more than it was asked for")
            while view:
                target = cursor.window(len(view), 1)[0]
                target[:] = view[: target.nbytes]
                view = view[target.nbytes :]
                cursor.advance(target.nbytes)
        if left:
            raise OSError("the answer ended early")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StorageError(f"{self.uri} was closed")


@contextmanager
def _failing(uri: str) -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise to_storage_error(uri, error) from None


def _connect(folder: Location, settings: StorageSettings, *, retries: bool) -> ObjectStore:
    """A client for a bucket or container. Raises what obstore raises, or SettingsError."""
    max_request_bytes = max(REQUEST_BYTES, part_size(settings))
    options: ClientConfig = {
        # Of a request with its body; obstore's own limit would end a large part on a slow line.
        "timeout": timedelta(seconds=settings.timeout_s + max_request_bytes / MIN_BYTES_PER_S),
        "connect_timeout": timedelta(seconds=settings.timeout_s),
        "read_timeout": timedelta(seconds=settings.timeout_s),
    }
    if settings.ca is not None:
        try:
            options["root_certificate"] = settings.ca.read_text()
        except OSError as error:
            raise SettingsError(f"RFORK_STORAGE_CA: cannot read {settings.ca}: {error.strerror}") from None
    retry: RetryConfig = {
        "max_retries": settings.max_attempts - 1 if retries else 0,
        "retry_timeout": timedelta(seconds=settings.timeout_s * settings.max_attempts),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)},
    }
    made: ObjectStore = from_url(f"{folder.scheme}://{folder.host}", client_options=options, retry_config=retry)
    return made
