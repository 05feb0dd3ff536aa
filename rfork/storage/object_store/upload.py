"""Streaming upload to Google or Azure, by obstore on a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from rfork.errors import StorageError
from rfork.settings import StorageSettings
from rfork.storage.location import Location
from rfork.storage.object_store.errors import to_storage_error

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MAX_PARTS: Final = 10_000
"""Maximum number of parts of an object at Google; Azure allows more."""
MIN_PART_BYTES: Final = 5 << 20
"""Minimum size of a part at Google, except for an object's last one."""
PARTS_IN_MEMORY: Final = 8
"""Number of parts in staging memory: one is filled, one is queued, the others are in flight."""


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
