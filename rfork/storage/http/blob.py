"""HTTP objects, read range by range into existing memory: common to web servers and S3.

A body is received from the socket directly into the caller's views. After a transient failure, the request
resumes at the byte where it broke off; a slow request is hedged by a second one into separate memory.
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
from rfork.net.connect import Cancelled, CancelScope
from rfork.net.response import ReadTimeout
from rfork.net.stream import ScatterCursor
from rfork.storage.http.hedging import HedgedRequest
from rfork.storage.http.requests import HttpResource, Sign
from rfork.storage.http.responses import Explain, ObjectVersion, check_content_range, version_from_response
from rfork.storage.http.retry import RetryableError, RetryBudget
from rfork.storage.http.session import HttpSession

REQUEST_BYTES: Final = 32 << 20
"""Maximum size of one request: limits the loss when a connection breaks or a signature expires."""
MIN_BYTES_PER_TIMEOUT: Final = 16 << 10
"""Body bytes that must arrive within each timeout (or the remaining ones), to detect servers that only
trickle.
"""

log = logger(__name__)


class RangedBlob:
    """A `Blob` over HTTP. Each read in progress uses one connection of the session.

    The constructor sends no request; see `open`. `uri` is used in errors and logs and must not contain
    secrets.
    """

    def __init__(
        self,
        uri: str,
        sign: Sign,
        session: HttpSession,
        identity: ObjectVersion,
        explain: Explain | None = None,
    ) -> None:
        self._uri = uri
        self._session = session
        self._settings = session.settings
        self._resource = HttpResource(uri, sign, session.pool, session.settings.timeout_s, explain)
        self._identity = identity
        self._head_bytes = b""
        self._lock = threading.Lock()
        self._scope = CancelScope()
        self._closed = False
        session.pool.register()

    @classmethod
    def open(
        cls,
        uri: str,
        sign: Sign,
        session: HttpSession,
        explain: Explain | None = None,
        *,
        front: int = 0,
    ) -> RangedBlob:
        """Request the first `front` bytes (at least one) to learn the version and size of the object.

        `explain` may return a more specific error for a refused request. Raises StorageNotFound,
        StorageAccessDenied or another StorageError.
        """
        blob = cls(uri, sign, session, ObjectVersion(0, "", ""), explain)
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
        """See `Blob`: the entity tag, or the modification date if there is none."""
        return self._identity.version

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """See `Blob`."""
        cursor = ScatterCursor(into)
        length = cursor.left
        if offset < 0 or offset + length > self.size:
            end = offset + length
            raise StorageError(f"{self._uri} has {self.size} bytes: there are no bytes [{offset}, {end})")
        self._check_open()
        cursor.write_bytes(self._head_bytes[offset : offset + length])
        while cursor.left:
            self._read_range(cursor, offset, min(cursor.done + REQUEST_BYTES, length))

    def close(self) -> None:
        """Close immediately: reads in progress raise StorageError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._scope.abort()
        self._session.pool.unregister()

    def _first(self, front: int) -> ObjectVersion:
        """Request and keep the first bytes. Raises StorageError subclasses."""
        max_bytes = max(1, front)
        retry_budget = self._retry_budget()
        while True:
            with self._attempt_scope() as scope:
                try:
                    with self._resource.get({"Range": f"bytes=0-{max_bytes - 1}"}, scope, self._read_timeout) as reply:
                        identity = version_from_response(self._uri, reply.head, max_bytes)
                        body = bytearray(min(identity.size, max_bytes))
                        if body:
                            reply.fill(ScatterCursor([memoryview(body)]), len(body))
                        self._head_bytes = bytes(body) if front else b""
                        return identity
                except (Cancelled, RetryableError, OSError) as error:
                    self._back_off(retry_budget, 0, error, scope, "the first byte")

    def _read_range(self, cursor: ScatterCursor, offset: int, until: int) -> None:
        """Fill the cursor, which began at byte `offset`, up to `until` bytes."""
        retry_budget = self._retry_budget()
        what = f"bytes [{offset + cursor.done}, {offset + until})"
        while cursor.done < until:
            before = cursor.done
            with self._attempt_scope() as scope:
                failed = self._attempt(cursor, offset, until, scope)
                if failed is not None and cursor.done < until:
                    self._back_off(retry_budget, cursor.done - before, failed, scope, what)

    def _attempt(self, cursor: ScatterCursor, offset: int, until: int, scope: CancelScope) -> Exception | None:
        """Request the missing bytes, hedged if slow; return the error, if any."""
        begin, end = offset + cursor.done, offset + until
        hedges = self._session.hedges
        with self._attempt_scope() as second_scope:

            def again(spare: ScatterCursor, lacking: int, end: int) -> None:
                self._fetch(spare, lacking, end, second_scope, self._read_timeout, extra=True)

            hedged = HedgedRequest(hedges, cursor, offset, end, scope, second_scope, again)
            due_s = hedges.delay_s(end - begin)
            try:
                first_byte_s, seconds = self._fetch(
                    cursor,
                    begin,
                    end,
                    scope,
                    lambda: self._read_timeout(due_s, hedged.on_slow),
                )
            except (Cancelled, RetryableError, OSError) as error:
                hedged.wait_result()
                return error
            finally:
                hedged.stop()
        hedges.record_response(end - begin, first_byte_s, seconds)
        return None

    def _fetch(
        self,
        cursor: ScatterCursor,
        begin: int,
        end: int,
        scope: CancelScope,
        make_timeout: Callable[[], ReadTimeout],
        *,
        extra: bool = False,
    ) -> tuple[float, float]:
        """Send one request for `[begin, end)`; return the seconds until the response began and until it was
        complete.
        """
        fields = {"Range": f"bytes={begin}-{end - 1}", **self._identity.conditions}
        with self._resource.get(fields, scope, make_timeout, extra=extra) as reply:
            began = time.monotonic()
            check_content_range(self._uri, reply.head, self._identity, begin, end)
            reply.fill(cursor, end - begin)
            return began - reply.timeout.began, time.monotonic() - reply.timeout.began

    def _back_off(
        self, retry_budget: RetryBudget, transferred_bytes: int, failed: Exception, scope: CancelScope, what: str
    ) -> None:
        """Wait before the next attempt. Raises StorageError after the last attempt, or after `close`."""
        self._check_open()
        cause = failed if isinstance(failed, RetryableError) else RetryableError(_describe(failed))
        delay_s = retry_budget.failed(transferred_bytes, cause.after_s)
        if delay_s is None:
            count = f"{retry_budget.failed_attempts} attempt{'s' if retry_budget.failed_attempts > 1 else ''}"
            raise StorageError(f"{self._uri}: failed to read {what} in {count}: {cause}")
        log.debug("retrying storage request", source=self._uri, what=what, reason=str(cause), wait_s=round(delay_s, 2))
        scope.wait(delay_s)
        self._check_open()

    def _retry_budget(self) -> RetryBudget:
        return RetryBudget(self._settings.max_attempts, self._settings.timeout_s, random.random, time.monotonic)

    def _read_timeout(
        self, due_s: float | None = None, on_slow: Callable[[], float | None] | None = None
    ) -> ReadTimeout:
        return ReadTimeout(self._settings.timeout_s, min_bytes=MIN_BYTES_PER_TIMEOUT, due_s=due_s, on_slow=on_slow)

    @contextmanager
    def _attempt_scope(self) -> Iterator[CancelScope]:
        """Yield a scope that `close` cancels."""
        scope = CancelScope()
        self._check_open()
        try:
            with self._scope.attached(scope):
                yield scope
        except Cancelled:
            self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"{self._uri} is closed")


def _describe(error: Exception) -> str:
    """Describe a connection error."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"connection failed: {reason}"
