"""The keys of a group as a reader sees them: on the source, at the other end of its line."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import count

from rfork.errors import SourceTimeout, SourceUnavailable
from rfork.transport.base import ControlStream
from rfork.transport.collective.messages import StoreGet, StorePut, StoreValues, send_message


class RemoteKeyStore:
    """See `KeyValueStore`. Runs on the target; `on_reply` is told the source's answers by who receives them."""

    def __init__(self, line: ControlStream, group: int, changed: threading.Condition) -> None:
        self._line = line
        self._group = group
        self._changed = changed
        self._calls = count(1)
        self._replies: dict[int, list[bytes | None] | None] = {}
        self._closed = ""

    def put(self, key: str, value: bytes) -> None:
        """See `KeyValueStore.put`."""
        send_message(self._line, StorePut(group=self._group, key=key, value=value))

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """See `KeyValueStore.get_values`."""
        with self._changed:
            call = next(self._calls)
            self._replies[call] = None
        send_message(self._line, StoreGet(group=self._group, call=call, keys=list(keys), wait=wait))
        with self._changed:
            try:
                while (reply := self._replies[call]) is None:
                    if self._closed:
                        raise SourceUnavailable(self._closed)
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        raise SourceTimeout("a rank of the group did not come before its deadline")
            finally:
                del self._replies[call]
        return reply

    def on_reply(self, have: StoreValues) -> None:
        """An answer came; the lock of `changed` is held."""
        if have.call in self._replies:
            self._replies[have.call] = have.values

    def close(self, why: str) -> None:
        """Whoever waits for an answer waits no more; the lock of `changed` is held."""
        self._closed = self._closed or why
