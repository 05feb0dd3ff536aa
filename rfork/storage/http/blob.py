"""Objects behind HTTP, read range by range into memory that exists: what web and S3 storage have in common.

A body goes from the socket straight into the caller's views. What fails in passing is asked for again from
the byte where it broke off; what is slow is asked for a second time, into memory of its own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rfork.errors import StorageError
from rfork.logs import logger
from rfork.settings import StorageSettings
from rfork.storage.http.connect import Cancelled, CancelScope
from rfork.storage.http.hedged_request import HedgedRequest
from rfork.storage.http.pool import HttpConnectionPool
from rfork.storage.http.request import HttpRequest, Sign
from rfork.storage.http.requests import HttpResource
from rfork.storage.http.responses import Explain, ObjectVersion, check_content_range, version_from_response
from rfork.storage.http.retry import RetryableError, RetryBudget
from rfork.storage.http.timeout import ReadTimeout
from rfork.transport.http.stream import ScatterCursor

__all__ = ["Explain", "HttpConnectionPool", "HttpRequest", "ObjectVersion", "RangedBlob", "Sign"]

REQUEST_BYTES: Final = 32 << 20
"""Most bytes asked for at once: a connection that breaks, or a signature that ends, costs no more."""

log = logger(__name__)


class RangedBlob:
    """A `Blob` behind HTTP. Each read under way has a connection of the pool's.

    Nothing is asked of the server by this; see `open`. `uri` is what errors and logs say: without secrets.
    """

    def __init__(
        self,
        uri: str,
        sign: Sign,
        pool: HttpConnectionPool,
        settings: StorageSettings,
        identity: ObjectVersion,
        explain: Explain | None = None,
    ) -> None:
        self._uri = uri
        self._resource = HttpResource(uri, sign, pool, explain)
        self._pool = pool
        self._settings = settings
        self._identity = identity
        self._head_bytes = b""
        self._lock = threading.Lock()
        self._cancel_scopes: set[CancelScope] = set()
        self._closed = False
        pool.register()

    @classmethod
    def open(
        cls,
        uri: str,
        sign: Sign,
        pool: HttpConnectionPool,
        settings: StorageSettings,
        explain: Explain | None = None,
        *,
        front: int = 0,
    ) -> RangedBlob:
        """Ask for the first `front` bytes, one at least, and learn which object this is and how large.

        `explain` may know better than the status what a refusal means. Raises StorageNotFound, StorageAccessDenied
        or another StorageError.
        """
        blob = cls(uri, sign, pool, settings, ObjectVersion(0, "", ""), explain)
        try:
            blob._identity = blob._first(front)
        except BaseException:
            blob.close()
            raise
        return blob

    @property
    def uri(self) -> str:
        """See `Blob`."""
        return self._uri

    @property
    def size(self) -> int:
        """See `Blob`."""
        return self._identity.size

    @property
    def version(self) -> str | None:
        """See `Blob`: the entity tag, or the date where there is none."""
        return self._identity.version

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """See `Blob`."""
        cursor = ScatterCursor(into)
        length = cursor.left
        if offset < 0 or offset + length > self.size:
            raise StorageError(f"{self._uri} has {self.size} bytes, not [{offset}, {offset + length})")
        self._check_open()
        cursor.write_bytes(self._head_bytes[offset : offset + length])
        while cursor.left:
            self._read_range(cursor, offset, min(cursor.done + REQUEST_BYTES, length))

    def close(self) -> None:
        """End it at once: reads under way raise StorageError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            legs = list(self._cancel_scopes)
        for leg in legs:
            leg.end()
        self._pool.unregister()

    def _first(self, front: int) -> ObjectVersion:
        """Ask for the first bytes, and keep them. Raises StorageError kinds."""
        max_bytes = max(1, front)
        attempts = self._attempts()
        while True:
            with self._cancel_scope() as leg:
                try:
                    with self._resource.get({"Range": f"bytes=0-{max_bytes - 1}"}, leg, self._timeout) as reply:
                        identity = version_from_response(self._uri, reply.head, max_bytes)
                        body = bytearray(min(identity.size, max_bytes))
                        if body:
                            reply.fill(ScatterCursor([memoryview(body)]), len(body))
                        self._head_bytes = bytes(body) if front else b""
                        return identity
                except (Cancelled, RetryableError, OSError) as error:
                    self._back_off(attempts, 0, error, leg, "its first byte")

    def _read_range(self, cursor: ScatterCursor, offset: int, until: int) -> None:
        """Fill the cursor, which began at byte `offset`, until it has `until` bytes."""
        attempts = self._attempts()
        what = f"bytes [{offset + cursor.done}, {offset + until})"
        while cursor.done < until:
            before = cursor.done
            with self._cancel_scope() as leg:
                failed = self._attempt(cursor, offset, until, leg)
                if failed is not None and cursor.done < until:
                    self._back_off(attempts, cursor.done - before, failed, leg, what)

    def _attempt(self, cursor: ScatterCursor, offset: int, until: int, leg: CancelScope) -> Exception | None:
        """Ask for what is missing, a second time where it takes long: what went wrong, if anything did."""
        begin, end = offset + cursor.done, offset + until
        hedges = self._pool.hedges
        with self._cancel_scope() as second:

            def again(spare: ScatterCursor, lacking: int, end: int) -> None:
                self._fetch(spare, lacking, end, second, self._timeout, extra=True)

            race = HedgedRequest(hedges, cursor, offset, end, leg, second, again)
            due_s = hedges.delay_s(end - begin)
            try:
                first_byte_s, seconds = self._fetch(
                    cursor,
                    begin,
                    end,
                    leg,
                    lambda: ReadTimeout(self._settings.timeout_s, due_s, race.on_slow),
                )
            except (Cancelled, RetryableError, OSError) as error:
                race.wait_result()
                return error
            finally:
                race.stop()
        hedges.first_byte(end - begin, first_byte_s, seconds)
        return None

    def _fetch(
        self,
        cursor: ScatterCursor,
        begin: int,
        end: int,
        leg: CancelScope,
        make_timeout: Callable[[], ReadTimeout],
        *,
        extra: bool = False,
    ) -> tuple[float, float]:
        """One request for `[begin, end)`: seconds until its answer began, and until it was whole."""
        fields = {"Range": f"bytes={begin}-{end - 1}", **self._identity.conditions}
        with self._resource.get(fields, leg, make_timeout, extra=extra) as reply:
            began = time.monotonic()
            check_content_range(self._uri, reply.head, self._identity, begin, end)
            reply.fill(cursor, end - begin)
            return began - reply.timeout.began, time.monotonic() - reply.timeout.began

    def _back_off(self, attempts: RetryBudget, brought: int, failed: Exception, leg: CancelScope, what: str) -> None:
        """Wait before the next attempt. Raises StorageError when this was the last, or after `close`."""
        self._check_open()
        cause = failed if isinstance(failed, RetryableError) else RetryableError(_describe(failed))
        delay_s = attempts.failed(brought, cause.after_s)
        if delay_s is None:
            count = f"{attempts.made} attempt{'s' if attempts.made > 1 else ''}"
            raise StorageError(f"{self._uri}: gave up on {what} after {count}: {cause}")
        log.debug("asking again", source=self._uri, what=what, because=str(cause), wait_s=round(delay_s, 2))
        leg.wait(delay_s)
        self._check_open()

    def _attempts(self) -> RetryBudget:
        return RetryBudget(self._settings.max_attempts, self._settings.timeout_s, random.random, time.monotonic)

    def _timeout(self) -> ReadTimeout:
        return ReadTimeout(self._settings.timeout_s)

    @contextmanager
    def _cancel_scope(self) -> Iterator[CancelScope]:
        """A leg that `close` ends."""
        leg = CancelScope()
        with self._lock:
            if not self._closed:
                self._cancel_scopes.add(leg)
        self._check_open()
        try:
            yield leg
        finally:
            with self._lock:
                self._cancel_scopes.discard(leg)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"{self._uri} was closed")


def _describe(error: Exception) -> str:
    """Why a connection came to nothing, in words."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"the connection broke: {reason}"
