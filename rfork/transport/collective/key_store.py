"""Key-value store through which the ranks of a group connect. It lives on the source.

torch's process groups need a `torch.distributed.Store`. This one opens no port: a reader's group accesses it
over the reader's `ControlStream`, under its lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Protocol

from torch._C._distributed_c10d import Store

from rfork.errors import SourceBusy, SourceTimeout, SourceUnavailable
from rfork.transport.base import ControlStream
from rfork.transport.collective.messages import MAX_KEYS, MAX_VALUE_BYTES, StoreGet, StorePut, StoreValues, send_message

Reply = Callable[[list[bytes | None]], None]


class KeyValueStore(Protocol):
    """Key-value store of a group, local or remote. Thread-safe."""

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        ...

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """Return the values, with `wait` once all are set. Raises SourceTimeout at the deadline, or
        SourceUnavailable.
        """
        ...


class Rendezvous:
    """Key-value store of one group, on the source; see `KeyValueStore`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[list[str], Reply]] = []
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """See `KeyValueStore.put`. Raises SourceBusy for more keys or larger values than a group needs."""
        with self._changed:
            if len(value) > MAX_VALUE_BYTES or (key not in self._values and len(self._values) >= MAX_KEYS):
                raise SourceBusy(f"the store of a group is limited to {MAX_KEYS} keys of {MAX_VALUE_BYTES} bytes")
            self._values[key] = value
            self._changed.notify_all()
            ready = [waiting for waiting in self._waiting if all(name in self._values for name in waiting[0])]
            self._waiting = [waiting for waiting in self._waiting if waiting not in ready]
        for keys, on_reply in ready:
            on_reply(self._lookup(keys))

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """See `KeyValueStore.get_values`."""
        with self._changed:
            while wait and not self._closed and any(key not in self._values for key in keys):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise SourceTimeout("a rank of the group did not connect before the deadline")
            if self._closed:
                raise SourceUnavailable("the group is closed")
        return self._lookup(keys)

    def get_values_async(self, keys: list[str], on_reply: Reply, *, wait: bool) -> None:
        """Non-blocking `get_values`: calls `on_reply` immediately, or later on another thread."""
        with self._changed:
            if wait and any(key not in self._values for key in keys):
                if len(self._waiting) >= MAX_KEYS:
                    raise SourceBusy("too many calls wait for keys of one group")
                self._waiting.append((keys, on_reply))
                return
        on_reply(self._lookup(keys))

    def close(self) -> None:
        """Fail all waiting calls."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _lookup(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._changed:
            return [self._values.get(key) for key in keys]


class KeyStore(Store):
    """Adapts `KeyValueStore` to `torch.distributed.Store`; only the methods that gloo and NCCL use to form a
    group.

    torch calls it from C++, also on its own threads. Its errors are raised by the call that forms the group:
    unchanged, or as a RuntimeError if raised on another thread.
    """

    def __init__(self, keys: KeyValueStore, deadline: float) -> None:
        super().__init__()
        self._keys = keys
        self._deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        """See `torch.distributed.Store.set`."""
        self._keys.put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store.get`; waits until the key is set."""
        return self._keys.get_values([key], self._deadline, wait=True)[0] or b""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See `torch.distributed.Store.wait`; limited by the deadline for forming the group."""
        until = self._deadline
        if timeout is not None and timeout > timedelta(0):
            until = min(until, time.monotonic() + timeout.total_seconds())
        self._keys.get_values(keys, until, wait=True)

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store.check`."""
        return None not in self._keys.get_values(keys, self._deadline, wait=False)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See `torch.distributed.Store.multi_get`."""
        return [value or b"" for value in self._keys.get_values(keys, self._deadline, wait=True)]

    def has_extended_api(self) -> bool:
        """See `torch.distributed.Store.has_extended_api`."""
        return False

    def delete_key(self, key: str) -> bool:
        """Delete nothing: the store belongs to one group and is dropped with it."""
        return False


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
