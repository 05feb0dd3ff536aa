"""Streaming upload to an object store: in parts, several in flight, with bounded memory.

The object is invisible until it is complete; an incomplete upload is removed.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Final

from rfork.errors import RforkError, StorageAccessDenied, StorageCorrupt, StorageError
from rfork.logs import logger
from rfork.settings import StorageSettings
from rfork.storage.http.retry import RetryBudget
from rfork.storage.s3.bucket import ObjectHead, Part, PartBody, S3Bucket
from rfork.storage.s3.errors import ConcurrentWriteConflict, ConditionFailed, Unsupported

MAX_PARTS: Final = 10_000
"""Maximum number of parts of an object."""
MIN_PART_BYTES: Final = 8 << 20
MAX_PART_BYTES: Final = 5 << 30
PARTS_PER_SIZE: Final = 1000
"""The part size doubles after this many parts: 8 MiB up to 8 GB, 64 MiB at 100 GB; 10,000 parts are 8 TB."""

log = logger(__name__)


def part_size(number: int) -> int:
    """Return the size in bytes of a part by its number (from 1). Only the last part of an object may be
    smaller.
    """
    return min(MIN_PART_BYTES << ((number - 1) // PARTS_PER_SIZE), MAX_PART_BYTES)


def buffers(size: int, settings: StorageSettings) -> int:
    """Return the number of parts of this size in memory: one that is filled, and those in flight."""
    return max(1, min(settings.concurrency + 1, settings.staging_bytes // size))


class PartBuffer:
    """Memory of one part while it is filled (by one thread) and sent."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Anonymous memory, of which the kernel only allocates pages that are written: most blobs are small.
        self._memory = memoryview(mmap.mmap(-1, size))
        self._used = 0
        self._body: PartBody | None = None

    @property
    def remaining_bytes(self) -> int:
        """Free space in bytes."""
        return self.size - self._used

    def append(self, data: memoryview) -> int:
        """Append as much as fits, and return the number of bytes."""
        count = min(len(data), self.remaining_bytes)
        self._memory[self._used : self._used + count] = data[:count]
        self._used += count
        return count

    def body(self) -> PartBody:
        """Return a request body with the content."""
        self._body = PartBody(self._memory[: self._used])
        return self._body

    def cancel(self) -> None:
        """Prevent further attempts to send the content."""
        if self._body is not None:
            self._body.cancel()

    def clear(self) -> None:
        """Empty the buffer."""
        self._used, self._body = 0, None


def multipart_etag(parts: Sequence[Part]) -> str | None:
    """Return the entity tag of an object with these parts, if the service computes it with MD5 like AWS."""
    digests = [re.fullmatch(r'"?([0-9a-f]{32})"?', part.etag) for part in parts]
    if not all(digests):
        return None
    joined_digests = b"".join(bytes.fromhex(match.group(1)) for match in digests if match is not None)
    return f'"{hashlib.md5(joined_digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'


@contextmanager
def open_upload(
    bucket: S3Bucket,
    key: str,
    uri: str,
    settings: StorageSettings,
    *,
    replace: bool,
) -> Iterator[Upload]:
    """Create an object; see `BlobStore.write`."""
    upload = Upload(bucket, key, uri, settings, replace=replace)
    try:
        yield upload
        upload.commit()
    except BaseException:
        upload.abort()
        raise


class Upload:
    """See `BlobWriter`. Content that fits in one part is written by a single request on commit."""

    def __init__(
        self,
        bucket: S3Bucket,
        key: str,
        uri: str,
        settings: StorageSettings,
        *,
        replace: bool,
    ) -> None:
        self._bucket = bucket
        self._key = key
        self._uri = uri
        self._settings = settings
        self._replace = replace
        self._written = 0
        self._block = PartBuffer(part_size(1))
        self._free: list[PartBuffer] = []
        self._id: str | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._running: dict[Future[Part], PartBuffer] = {}
        self._begun = 0
        self._parts: list[Part] = []
        self._already_exists = False

    def write(self, views: Sequence[memoryview]) -> None:
        """See `BlobWriter`. Also raises errors of earlier parts."""
        for view in views:
            data = view.cast("B")
            self._written += len(data)
            while data and not self._already_exists:
                if self._block.remaining_bytes == 0:
                    self._send()
                    self._block = self._next()
                data = data[self._block.append(data) :]

    def commit(self) -> None:
        """Complete the object."""
        if self._already_exists:
            return
        if self._id is None:
            self._finish(self._put)
            return
        self._send()
        self._collect(wait(self._running).done)
        self._finish(self._complete)
        self._abort()

    def abort(self) -> None:
        """Remove the upload. Raises nothing: the original failure is the one to report."""
        for future, block in self._running.items():
            future.cancel()
            block.cancel()
        # Waits for parts in flight: one that arrives after the abort would never be removed.
        self._abort()
        if self._id is None:
            return
        try:
            self._bucket.abort(self._key, self._id)
        except RforkError as error:
            log.warning("failed to remove the parts of an upload", object=self._uri, reason=str(error))
        self._id = None

    def _send(self) -> None:
        """Upload the block as the next part."""
        if self._id is None:
            if not self._replace and self._bucket.head(self._key) is not None:
                self._already_exists = True
                return
            self._id = self._bucket.begin(self._key)
            self._threads = ThreadPoolExecutor(self._settings.concurrency, "rfork-upload")
        if self._threads is None or self._begun == MAX_PARTS:
            raise StorageError(f"{self._uri}: {self._written} bytes exceed the maximum size of an object")
        self._begun += 1
        future = self._threads.submit(self._bucket.put_part, self._key, self._id, self._begun, self._block.body())
        self._running[future] = self._block

    def _next(self) -> PartBuffer:
        """Return an empty block for the next part; waits for one in flight if the memory is used up."""
        self._collect([future for future in self._running if future.done()])
        size = part_size(self._begun + 1)
        if size != self._block.size:
            self._collect(wait(self._running).done)
            self._free.clear()
        elif not self._free and len(self._running) >= buffers(size, self._settings):
            self._collect(wait(self._running, return_when=FIRST_COMPLETED).done)
        return self._free.pop() if self._free else PartBuffer(size)

    def _collect(self, done: Iterable[Future[Part]]) -> None:
        for future in done:
            block = self._running.pop(future)
            self._parts.append(future.result())
            block.clear()
            self._free.append(block)

    def _finish(self, request: Callable[[bool], None]) -> None:
        """Complete the object with `request`, whose argument is `only_new`."""
        if self._replace:
            request(False)
            return
        retry_budget = RetryBudget(self._settings.max_attempts, self._settings.timeout_s, random.random, time.monotonic)
        while True:
            try:
                request(True)
            except ConditionFailed:
                self.abort()
            except ConcurrentWriteConflict:
                # Once the other writer has finished, the service responds that the object exists.
                delay_s = retry_budget.failed(0)
                if delay_s is not None:
                    time.sleep(delay_s)
                    continue
                if not self._exists():
                    raise StorageError(f"{self._uri}: another writer is writing it at the same time") from None
                self.abort()
            except Unsupported:
                if self._bucket.head(self._key) is None:
                    request(False)
                else:
                    self.abort()
            except StorageError:
                # A conflict may have removed this upload, so that the service no longer knows it.
                if retry_budget.failed_attempts == 0 or not self._exists():
                    raise
                self.abort()
            return

    def _exists(self) -> bool:
        """Return True if another writer's object exists, as far as this writer may check."""
        try:
            return self._bucket.head(self._key) is not None
        except StorageAccessDenied:
            return False

    def _put(self, only_new: bool) -> None:
        self._bucket.put(self._key, self._block.body(), only_new=only_new)

    def _complete(self, only_new: bool) -> None:
        if self._id is None:
            raise StorageError(f"{self._uri}: the upload was aborted")
        parts = sorted(self._parts, key=lambda part: part.number)
        tag: str | None
        try:
            tag = self._bucket.complete(self._key, self._id, parts, only_new=only_new)
        except (ConditionFailed, ConcurrentWriteConflict, Unsupported):
            raise
        except StorageError:
            # The object may have been created although the response was lost.
            tag = multipart_etag(parts)
            if tag is None or self._bucket.head(self._key) != ObjectHead(self._written, tag):
                raise
        self._check(tag)

    def _check(self, tag: str) -> None:
        try:
            existing = self._bucket.head(self._key)
        except StorageAccessDenied:
            return  # may write, but not read
        if existing is None:
            raise StorageError(f"{self._uri} does not exist after it was written")
        # A different tag means that another writer has replaced it.
        if existing.etag == tag and existing.size != self._written:
            raise StorageCorrupt(f"{self._uri} has {existing.size} bytes, but {self._written} were written")

    def _abort(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        self._running.clear()
        self._free.clear()
