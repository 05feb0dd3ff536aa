"""A blob written to Google's or Azure's storage as a stream, by obstore on a thread of its own."""

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
"""Most parts of one object of Google's; Azure takes more."""
MIN_PART_BYTES: Final = 5 << 20
"""Bytes of the smallest part that Google takes, but for the last of an object."""
SHARE: Final = 8
"""A part is this share of the memory: one fills, one is handed over, the others are in flight."""


def part_size(settings: StorageSettings) -> int:
    """Bytes of a part."""
    return max(MIN_PART_BYTES, settings.staging_bytes // SHARE)


class UploadAborted(Exception):
    """The upload's block was left with an exception."""


@contextmanager
def open_upload(
    store: ObjectStore, location: Location, settings: StorageSettings, *, replace: bool
) -> Iterator[CloudUpload]:
    """An object in the making; see `Store.write`."""
    upload = CloudUpload(store, location, settings, replace=replace)
    try:
        yield upload
        upload.commit()
    except BaseException:
        upload.abort()
        raise


class CloudUpload:
    """See `BlobWriter`. What fits into one part is written by one request, when it is committed.

    Uploads in parts know no conditions here: without `replace`, one that is there when the first part is full
    is left, and one that comes while this is written is replaced.
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
        self._made = False
        self._there_already = False

    def write(self, views: Sequence[memoryview]) -> None:
        """See `BlobWriter`. Raises what parts before this met, too."""
        for view in views:
            data = view.cast("B")
            while data and not self._there_already:
                if len(self._part) == self._size:
                    self._send()
                count = min(len(data), self._size - len(self._part))
                self._part += data[:count]
                data = data[count:]

    def commit(self) -> None:
        """Make the object."""
        if self._there_already:
            return
        if self._feed is None:
            self._put()
            return
        self._send()
        self._feed.end()
        self._join()

    def abort(self) -> None:
        """Have what was sent come to nothing."""
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
                raise StorageError(f"{self._location.uri}: another is there and cannot be replaced") from None
        except (BaseError, OSError, ValueError) as error:
            raise to_storage_error(self._location.uri, error) from None

    def _send(self) -> None:
        if self._feed is None:
            if not self._replace and self._is_there():
                self._there_already = True
                self._part = bytearray()
                return
            self._feed = _PartQueue()
            self._thread = threading.Thread(target=self._run, args=(self._feed,), name="rfork-upload")
            self._thread.start()
        if self._parts == MAX_PARTS:
            raise StorageError(
                f"{self._location.uri}: more than {MAX_PARTS} parts of {self._size} bytes",
                hint="RFORK_STORAGE_STAGING_BYTES sets their size",
            )
        self._parts += 1
        if not self._feed.put_part(bytes(self._part)):
            self._join()
        self._part.clear()

    def _run(self, feed: _PartQueue) -> None:
        in_flight = max(1, min(self._settings.concurrency, self._settings.staging_bytes // self._size - SHARE // 2))
        try:
            obstore.put(
                self._store,
                self._location.path,
                feed,
                use_multipart=True,
                chunk_size=self._size,
                max_concurrency=in_flight,
            )
            self._made = True
        except BaseException as error:  # raised where the upload is waited for; a panic of obstore's is one
            self._error = error
        finally:
            feed.stop()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise to_storage_error(self._location.uri, self._error) from None
        if not self._made:
            raise StorageError(f"{self._location.uri}: its upload ended early")

    def _is_there(self) -> bool:
        try:
            obstore.head(self._store, self._location.path)
        except FileNotFoundError:
            return False
        except (BaseError, OSError, ValueError) as error:
            raise to_storage_error(self._location.uri, error) from None
        return True


class _PartQueue:
    """Parts from the writer's thread to obstore's, one at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: list[bytes] = []
        self._ended = self._abandoned = self._stopped = False

    def put_part(self, part: bytes) -> bool:
        """Hand a part over once the one before was taken; False where nobody takes any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._parts)
            if not self._stopped:
                self._parts.append(part)
                self._changed.notify_all()
            return not self._stopped

    def end(self) -> None:
        """There are no more parts."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Have the taker fail, so that it makes no object."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def stop(self) -> None:
        """For the taker: it takes no more."""
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
