"""Client of a group's key-value store on the source, over the control stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import count

from rfork.errors import SourceTimeout, SourceUnavailable
from rfork.transport.base import ControlStream
from rfork.transport.collective.messages import StoreGet, StorePut, StoreValues, send_message


class RemoteKeyStore:
    """See `KeyValueStore`. Runs on the target; the thread that receives messages passes the replies to
    `on_reply`.
    """

    def __init__(self, stream: ControlStream, group: int, changed: threading.Condition) -> None:
        self._stream = stream
        self._group = group
        self._changed = changed
        self._calls = count(1)
        self._replies: dict[int, list[bytes | None] | None] = {}
        self._closed = ""

    def put(self, key: str, value: bytes) -> None:
        """See `KeyValueStore.put`."""
        send_message(self._stream, StorePut(group=self._group, key=key, value=value))

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """See `KeyValueStore.get_values`."""
        with self._changed:
            call = next(self._calls)
            self._replies[call] = None
        send_message(self._stream, StoreGet(group=self._group, call=call, keys=list(keys), wait=wait))
        with self._changed:
            try:
                while (reply := self._replies[call]) is None:
                    if self._closed:
                        raise SourceUnavailable(self._closed)
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        raise SourceTimeout("a rank of the group did not connect before the deadline")
            finally:
                del self._replies[call]
        return reply

    def on_reply(self, reply: StoreValues) -> None:
        """Handle a reply. The caller holds the lock of `changed`."""
        if reply.call in self._replies:
            self._replies[reply.call] = reply.values

    def close(self, reason: str) -> None:
        """Fail all waiting calls. The caller holds the lock of `changed`."""
        self._closed = self._closed or reason
