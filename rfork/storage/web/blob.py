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
from rfork.storage.web.answer import Explain, Identity, check_part, opened
from rfork.storage.web.dialling import Ended, Leg
from rfork.storage.web.exchange import Resource
from rfork.storage.web.patience import Patience
from rfork.storage.web.pool import Pool
from rfork.storage.web.race import Race
from rfork.storage.web.request import Request, Sign
from rfork.storage.web.retry import Attempts, Passing
from rfork.transport.http.stream import Cursor

__all__ = ["Explain", "Identity", "Pool", "RangedBlob", "Request", "Sign"]

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
        pool: Pool,
        settings: StorageSettings,
        identity: Identity,
        explain: Explain | None = None,
    ) -> None:
        self._uri = uri
        self._resource = Resource(uri, sign, pool, explain)
        self._pool = pool
        self._settings = settings
        self._identity = identity
        self._front = b""
        self._lock = threading.Lock()
        self._legs: set[Leg] = set()
        self._closed = False
        pool.join()

    @classmethod
    def open(
        cls,
        uri: str,
        sign: Sign,
        pool: Pool,
        settings: StorageSettings,
        explain: Explain | None = None,
        *,
        front: int = 0,
    ) -> RangedBlob:
        """Ask for the first `front` bytes, one at least, and learn which object this is and how large.

        `explain` may know better than the status what a refusal means. Raises StorageMissing, StorageDenied
        or another StorageError.
        """
        blob = cls(uri, sign, pool, settings, Identity(0, "", ""), explain)
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
        cursor = Cursor(into)
        whole = cursor.left
        if offset < 0 or offset + whole > self.size:
            raise StorageError(f"{self._uri} has {self.size} bytes, not [{offset}, {offset + whole})")
        self._check_open()
        cursor.put(self._front[offset : offset + whole])
        while cursor.left:
            self._read_range(cursor, offset, min(cursor.done + REQUEST_BYTES, whole))

    def close(self) -> None:
        """End it at once: reads under way raise StorageError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            legs = list(self._legs)
        for leg in legs:
            leg.end()
        self._pool.leave()

    def _first(self, front: int) -> Identity:
        """Ask for the first bytes, and keep them. Raises StorageError kinds."""
        most = max(1, front)
        attempts = self._attempts()
        while True:
            with self._leg() as leg:
                try:
                    with self._resource.get({"Range": f"bytes=0-{most - 1}"}, leg, self._patience) as reply:
                        identity = opened(self._uri, reply.head, most)
                        came = bytearray(min(identity.size, most))
                        if came:
                            reply.fill(Cursor([memoryview(came)]), len(came))
                        self._front = bytes(came) if front else b""
                        return identity
                except (Ended, Passing, OSError) as error:
                    self._back_off(attempts, 0, error, leg, "its first byte")

    def _read_range(self, cursor: Cursor, offset: int, until: int) -> None:
        """Fill the cursor, which began at byte `offset`, until it has `until` bytes."""
        attempts = self._attempts()
        what = f"bytes [{offset + cursor.done}, {offset + until})"
        while cursor.done < until:
            before = cursor.done
            with self._leg() as leg:
                failed = self._attempt(cursor, offset, until, leg)
                if failed is not None and cursor.done < until:
                    self._back_off(attempts, cursor.done - before, failed, leg, what)

    def _attempt(self, cursor: Cursor, offset: int, until: int, leg: Leg) -> Exception | None:
        """Ask for what is missing, a second time where it takes long: what went wrong, if anything did."""
        begin, end = offset + cursor.done, offset + until
        hedges = self._pool.hedges
        with self._leg() as second:

            def again(spare: Cursor, lacking: int, end: int) -> None:
                self._fetch(spare, lacking, end, second, self._patience, extra=True)

            race = Race(hedges, cursor, offset, end, leg, second, again)
            due_s = hedges.due_s(end - begin)
            try:
                first_byte_s, seconds = self._fetch(
                    cursor, begin, end, leg, lambda: Patience(self._settings.timeout_s, due_s, race.late)
                )
            except (Ended, Passing, OSError) as error:
                race.settle()
                return error
            finally:
                race.stop()
        hedges.answered(end - begin, first_byte_s, seconds)
        return None

    def _fetch(
        self,
        cursor: Cursor,
        begin: int,
        end: int,
        leg: Leg,
        patience: Callable[[], Patience],
        *,
        extra: bool = False,
    ) -> tuple[float, float]:
        """One request for `[begin, end)`: seconds until its answer began, and until it was whole."""
        fields = {"Range": f"bytes={begin}-{end - 1}", **self._identity.conditions}
        with self._resource.get(fields, leg, patience, extra=extra) as reply:
            began = time.monotonic()
            check_part(self._uri, reply.head, self._identity, begin, end)
            reply.fill(cursor, end - begin)
            return began - reply.patience.began, time.monotonic() - reply.patience.began

    def _back_off(self, attempts: Attempts, brought: int, failed: Exception, leg: Leg, what: str) -> None:
        """Wait before the next attempt. Raises StorageError when this was the last, or after `close`."""
        self._check_open()
        cause = failed if isinstance(failed, Passing) else Passing(_told(failed))
        delay_s = attempts.failed(brought, cause.after_s)
        if delay_s is None:
            count = f"{attempts.made} attempt{'s' if attempts.made > 1 else ''}"
            raise StorageError(f"{self._uri}: gave up on {what} after {count}: {cause}")
        log.debug("asking again", source=self._uri, what=what, because=str(cause), wait_s=round(delay_s, 2))
        leg.wait(delay_s)
        self._check_open()

    def _attempts(self) -> Attempts:
        return Attempts(self._settings.attempts, self._settings.timeout_s, random.random, time.monotonic)

    def _patience(self) -> Patience:
        return Patience(self._settings.timeout_s)

    @contextmanager
    def _leg(self) -> Iterator[Leg]:
        """A leg that `close` ends."""
        leg = Leg()
        with self._lock:
            if not self._closed:
                self._legs.add(leg)
        self._check_open()
        try:
            yield leg
        finally:
            with self._lock:
                self._legs.discard(leg)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"{self._uri} was closed")


def _told(error: Exception) -> str:
    """Why a connection came to nothing, in words."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"the connection broke: {said}"
