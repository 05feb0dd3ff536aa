"""Google Cloud Storage and Azure Blob Storage, using obstore's clients, credentials and retries.

Credentials are found like those of the services' own tools: GOOGLE_* and application default credentials,
AZURE_*, workload identity, instance metadata. AZURE_STORAGE_ACCOUNT_NAME selects the Azure account.
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
from rfork.net.stream import ScatterCursor
from rfork.settings import StorageSettings
from rfork.storage.blob import BlobEntry, BlobWriter
from rfork.storage.http.retry import RetryBudget
from rfork.storage.location import Location

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    from rfork.storage.object_store.errors import is_retryable, to_storage_error
    from rfork.storage.object_store.upload import open_upload, part_size
except ImportError as error:
    raise MissingExtra("obstore (for gs:// and az://)", extra="cloud", reason=str(error)) from None

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

READ_BYTES: Final = 1 << 20
"""Bytes of a response that are copied to the caller's memory at a time."""
REQUEST_BYTES: Final = 32 << 20
"""Maximum size of a request: each has a time limit, regardless of the blob's size."""
MIN_BYTES_PER_S: Final = 256 << 10
"""Minimum average rate of a request, or of an uploaded part, in bytes per second."""


class CloudStore:
    """Objects of a bucket or container below a folder; see `BlobStore`."""

    def __init__(self, folder: Location, settings: StorageSettings) -> None:
        self._folder = folder.folder
        self._settings = settings
        self._lock = threading.Lock()
        self._stores: dict[bool, ObjectStore] = {}  # by whether obstore retries

    @property
    def uri(self) -> str:
        """See `BlobStore`."""
        return self._folder.uri

    def open(self, name: str, *, front: int = 0) -> CloudBlob:
        """See `BlobStore`."""
        location = self._folder.child(name)
        with _storage_errors(location.uri):
            found = obstore.head(self._store(), location.path)
            reader = self._store(retries=False)
        return CloudBlob(location, reader, self._settings, int(found["size"]), found.get("e_tag"))

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        """See `BlobStore`."""
        begin = self._folder.path
        # The services list by name prefix, obstore only by folder: filter the last part here.
        within = (begin + prefix).rpartition("/")[0]
        entries = []
        with _storage_errors(self.uri):
            for page in obstore.list(self._store(), within or None):
                for found in page:
                    name = found["path"].removeprefix(begin)
                    if found["path"].startswith(begin + prefix) and name:
                        entries.append(BlobEntry(name, int(found["size"])))
        yield from sorted(entries, key=lambda entry: entry.name)

    def write(self, name: str, *, replace: bool = True) -> AbstractContextManager[BlobWriter]:
        """See `BlobStore`. Parts of a failed upload are invisible, and removed by the bucket's own rules."""
        location = self._folder.child(name)
        with _storage_errors(location.uri):
            return open_upload(self._store(), location, self._settings, replace=replace)

    def remove(self, name: str) -> None:
        """See `BlobStore`."""
        location = self._folder.child(name)
        try:
            obstore.delete(self._store(), location.path)
        except FileNotFoundError:
            return
        except (BaseError, OSError, ValueError) as error:
            raise to_storage_error(location.uri, error) from None

    def close(self) -> None:
        """See `BlobStore`."""
        with self._lock:
            self._stores.clear()

    def _store(self, *, retries: bool = True) -> ObjectStore:
        """Return a client; `retries`: whether it retries internally. Reads retry here instead, to resume
        where they were.
        """
        with self._lock:
            if retries not in self._stores:
                self._stores[retries] = _connect(self._folder, self._settings, retries=retries)
            return self._stores[retries]


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
            raise StorageError(f"{self.uri} has {self._size} bytes: there are no bytes [{offset}, {end})")
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
        """Close: reads in progress raise StorageError when the next bytes arrive."""
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
            raise StorageChanged(f"{self.uri} was replaced during the read")
        for piece in response.stream(min_chunk_size=READ_BYTES):
            self._check_open()
            view = memoryview(piece)
            left -= len(view)
            if left < 0:
                raise StorageError(f"{self.uri}: the service sent more than requested")
            while view:
                target = cursor.window(len(view), 1)[0]
                target[:] = view[: target.nbytes]
                view = view[target.nbytes :]
                cursor.advance(target.nbytes)
        if left:
            raise OSError("the response ended early")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StorageError(f"{self.uri} is closed")


@contextmanager
def _storage_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise to_storage_error(uri, error) from None


def _connect(folder: Location, settings: StorageSettings, *, retries: bool) -> ObjectStore:
    """Return a client for a bucket or container. Raises obstore's errors, or SettingsError."""
    max_request_bytes = max(REQUEST_BYTES, part_size(settings))
    options: ClientConfig = {
        # Applies to a request with its body; obstore's default would abort a large part on a slow network.
        "timeout": timedelta(seconds=settings.timeout_s + max_request_bytes / MIN_BYTES_PER_S),
        "connect_timeout": timedelta(seconds=settings.timeout_s),
        "read_timeout": timedelta(seconds=settings.timeout_s),
    }
    if settings.ca is not None:
        try:
            options["root_certificate"] = settings.ca.read_text()
        except OSError as error:
            raise SettingsError(f"SSL_CERT_FILE: cannot use {settings.ca}: {error.strerror}") from None
    retry: RetryConfig = {
        "max_retries": settings.max_attempts - 1 if retries else 0,
        "retry_timeout": timedelta(seconds=settings.timeout_s * settings.max_attempts),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)},
    }
    store: ObjectStore = from_url(f"{folder.scheme}://{folder.host}", client_options=options, retry_config=retry)
    return store
