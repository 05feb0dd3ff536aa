"""Google Cloud Storage and Azure Blob Storage, using obstore's clients, credentials and retries.

Credentials are found like those of the services' own tools: GOOGLE_* and application default credentials,
AZURE_*, workload identity, instance metadata. AZURE_STORAGE_ACCOUNT_NAME selects the Azure account.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from rfork.errors import (
    MissingExtra,
    RforkError,
    SettingsError,
    StorageAccessDenied,
    StorageChanged,
    StorageError,
    StorageFull,
    StorageNotFound,
)
from rfork.net.stream import ScatterCursor
from rfork.settings import StorageSettings
from rfork.storage.blob import BlobEntry, BlobWriter
from rfork.storage.http.retry import RetryBudget
from rfork.storage.location import Location

try:
    import obstore
    from obstore import exceptions as cloud
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import from_url
except ImportError as error:
    raise MissingExtra("obstore (for gs:// and az://)", extra="cloud", reason=str(error)) from None

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig


MAX_PARTS: Final = 10_000
"""Maximum number of parts of an object at Google; Azure allows more."""
MIN_PART_BYTES: Final = 5 << 20
"""Minimum size of a part at Google, except for an object's last one."""
PARTS_IN_MEMORY: Final = 8
"""Number of parts in staging memory: one is filled, one is queued, the others are in flight."""
READ_BYTES: Final = 1 << 20
"""Bytes of a response that are copied to the caller's memory at a time."""
REQUEST_BYTES: Final = 32 << 20
"""Maximum size of a request: each has a time limit, regardless of the blob's size."""
MIN_BYTES_PER_S: Final = 256 << 10
"""Minimum average rate of a request, or of an uploaded part, in bytes per second."""

HINT: Final = (
    "set GOOGLE_SERVICE_ACCOUNT or application default credentials for gs://, "
    "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY for az://"
)
# A shared access signature is part of the URL.
_URL = re.compile(r"(https?://[^\s?\"')]*)[^\s\"')]*")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,80})</Code>")
_STATUS = re.compile(r"\b(?:status(?: code)?:?|error with status) ([1-5][0-9]{2})\b", re.IGNORECASE)
_NO_CREDENTIALS = re.compile(r"metadata\.google\.internal|169\.254\.169\.254|credential", re.IGNORECASE)


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


def part_size(settings: StorageSettings) -> int:
    """Return the size of a part in bytes."""
    return max(MIN_PART_BYTES, settings.staging_bytes // PARTS_IN_MEMORY)


class UploadAborted(Exception):
    """The upload's block ended with an exception."""


@contextmanager
def open_upload(
    store: ObjectStore, location: Location, settings: StorageSettings, *, replace: bool
) -> Iterator[CloudUpload]:
    """Create an object; see `BlobStore.write`."""
    upload = CloudUpload(store, location, settings, replace=replace)
    try:
        yield upload
        upload.commit()
    except BaseException:
        upload.abort()
        raise


class CloudUpload:
    """See `BlobWriter`. Content that fits in one part is written by a single request on commit.

    Multipart uploads are unconditional: without `replace`, an object that exists when the first part is full
    is kept, but one created during the upload is replaced.
    """

    def __init__(self, store: ObjectStore, location: Location, settings: StorageSettings, *, replace: bool) -> None:
        self._store = store
        self._location = location
        self._settings = settings
        self._replace = replace
        self._size = part_size(settings)
        self._part = bytearray()
        self._parts = 0
        self._feed: _PartQueue | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_created = False
        self._already_exists = False

    def write(self, views: Sequence[memoryview]) -> None:
        """See `BlobWriter`. Also raises errors of earlier parts."""
        for view in views:
            data = view.cast("B")
            while data and not self._already_exists:
                if len(self._part) == self._size:
                    self._send()
                count = min(len(data), self._size - len(self._part))
                self._part += data[:count]
                data = data[count:]

    def commit(self) -> None:
        """Complete the object."""
        if self._already_exists:
            return
        if self._feed is None:
            self._put()
            return
        self._send()
        self._feed.end()
        self._join()

    def abort(self) -> None:
        """Discard the upload."""
        if self._feed is not None:
            self._feed.abandon()
        if self._thread is not None:
            self._thread.join()

    def _put(self) -> None:
        try:
            obstore.put(
                self._store,
                self._location.path,
                bytes(self._part),
                mode="overwrite" if self._replace else "create",
                use_multipart=False,
            )
        except AlreadyExistsError:
            if self._replace:
                raise StorageError(f"{self._location.uri}: an object exists and cannot be replaced") from None
        except (BaseError, OSError, ValueError) as error:
            raise to_storage_error(self._location.uri, error) from None

    def _send(self) -> None:
        if self._feed is None:
            if not self._replace and self._exists():
                self._already_exists = True
                self._part = bytearray()
                return
            self._feed = _PartQueue()
            self._thread = threading.Thread(target=self._run, args=(self._feed,), name="rfork-upload")
            self._thread.start()
        if self._parts == MAX_PARTS:
            raise StorageError(
                f"{self._location.uri}: more than {MAX_PARTS} parts of {self._size} bytes",
                hint="increase RFORK_STORAGE_STAGING_BYTES to use larger parts",
            )
        self._parts += 1
        if not self._feed.put_part(bytes(self._part)):
            self._join()
        self._part.clear()

    def _run(self, feed: _PartQueue) -> None:
        in_flight = max(
            1, min(self._settings.concurrency, self._settings.staging_bytes // self._size - PARTS_IN_MEMORY // 2)
        )
        try:
            obstore.put(
                self._store,
                self._location.path,
                feed,
                use_multipart=True,
                chunk_size=self._size,
                max_concurrency=in_flight,
            )
            self._is_created = True
        except BaseException as error:  # re-raised in _join(); a panic in obstore is a BaseException
            self._error = error
        finally:
            feed.stop()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise to_storage_error(self._location.uri, self._error) from None
        if not self._is_created:
            raise StorageError(f"{self._location.uri}: the upload ended early")

    def _exists(self) -> bool:
        try:
            obstore.head(self._store, self._location.path)
        except FileNotFoundError:
            return False
        except (BaseError, OSError, ValueError) as error:
            raise to_storage_error(self._location.uri, error) from None
        return True


class _PartQueue:
    """Queue of one part from the writer's thread to obstore's thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: list[bytes] = []
        self._ended = self._abandoned = self._stopped = False

    def put_part(self, part: bytes) -> bool:
        """Queue a part after the previous one was consumed; return False if the consumer has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._parts)
            if not self._stopped:
                self._parts.append(part)
                self._changed.notify_all()
            return not self._stopped

    def end(self) -> None:
        """Signal that there are no more parts."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Make the consumer fail, so that no object is created."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Signal that the consumer has stopped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._parts or self._ended or self._abandoned)
            if self._abandoned:
                raise UploadAborted
            if not self._parts:
                raise StopIteration
            part = self._parts.pop()
            self._changed.notify_all()
            return part


def is_retryable(error: Exception) -> bool:
    """Return True if a retry may succeed after this error."""
    if isinstance(error, FileNotFoundError):
        return False
    if isinstance(error, OSError):
        return True
    status = _status(str(error))
    return isinstance(error, cloud.GenericError) and (status is None or status in (408, 429) or status >= 500)


def to_storage_error(uri: str, error: BaseException) -> RforkError:
    """Return the rfork error for an error of obstore about `uri`."""
    text = str(error)
    description = _one_line(text)
    match error:
        case FileNotFoundError():
            code = _CODE.search(text)
            missing = "bucket" if code and code.group(1) in ("NoSuchBucket", "ContainerNotFound") else "object"
            return StorageNotFound(f"{uri}: no such {missing}")
        case cloud.PreconditionError():
            return StorageChanged(f"{uri} was replaced during the read")
        case cloud.PermissionDeniedError() | cloud.UnauthenticatedError():
            return StorageAccessDenied(f"{uri}: access denied: {description}", hint=HINT)
        case cloud.UnknownConfigurationKeyError() | cloud.InvalidPathError() | ValueError():
            return SettingsError(f"{uri} cannot be used: {description}")
    status = _status(text)
    if status == 404:
        return StorageNotFound(f"{uri}: no such bucket")
    if status in (401, 403):
        return StorageAccessDenied(f"{uri}: access denied: {description}", hint=HINT)
    if status == 507 or "QuotaExceeded" in text:
        return StorageFull(f"{uri}: no space left: {description}")
    if status is None and _NO_CREDENTIALS.search(text):
        return StorageAccessDenied(f"{uri}: no usable credentials found: {description}", hint=HINT)
    return StorageError(f"{uri}: {description}")


def _status(text: str) -> int | None:
    match = _STATUS.search(text)
    return int(match.group(1)) if match else None


def _one_line(text: str) -> str:
    # obstore appends debug output after an empty line.
    line = " ".join(text.partition("\n\nDebug source:")[0].split())
    return _URL.sub(r"\1", line)[:300]


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
