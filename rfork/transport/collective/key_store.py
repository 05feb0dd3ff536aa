"""Key-value store through which the ranks of a group connect. It lives on the source.

torch's process groups need a `torch.distributed.Store`. This one opens no port: a reader's group accesses it
over the reader's `ControlStream`, under its lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from itertools import count
from typing import Protocol

from torch._C._distributed_c10d import Store

from rfork.errors import SourceBusy, SourceTimeout, SourceUnavailable
from rfork.transport.base import ControlStream
from rfork.transport.collective.messages import MAX_KEYS, MAX_VALUE_BYTES, StoreGet, StorePut, StoreValues, send_message


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

    @property
    def closed(self) -> bool:
        """True once the group is closed; then every call that waits raises SourceUnavailable."""
        ...


class Rendezvous:
    """Key-value store of one group, on the source; see `KeyValueStore`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[Sequence[str], Future[list[bytes | None]]]] = []
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """See `KeyValueStore.put`. Raises SourceBusy for more keys or larger values than a group needs."""
        with self._lock:
            if len(value) > MAX_VALUE_BYTES or (key not in self._values and len(self._values) >= MAX_KEYS):
                raise SourceBusy(f"the store of a group is limited to {MAX_KEYS} keys of {MAX_VALUE_BYTES} bytes")
            self._values[key] = value
            ready = [waiting for waiting in self._waiting if self._has_all(waiting[0])]
            self._waiting = [waiting for waiting in self._waiting if waiting not in ready]
            replies = [(reply, self._lookup(keys)) for keys, reply in ready]
        for reply, values in replies:
            reply.set_result(values)

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """See `KeyValueStore.get_values`."""
        return _result(self.request(keys, wait=wait), deadline)

    @property
    def closed(self) -> bool:
        """See `KeyValueStore.closed`."""
        return self._closed

    def request(self, keys: Sequence[str], *, wait: bool) -> Future[list[bytes | None]]:
        """Non-blocking `get_values`. The reply is cancelled if the group is closed. Raises SourceBusy."""
        reply: Future[list[bytes | None]] = Future()
        with self._lock:
            if self._closed:
                reply.cancel()
            elif not wait or self._has_all(keys):
                reply.set_result(self._lookup(keys))
            elif len(self._waiting) >= MAX_KEYS:
                raise SourceBusy("too many calls wait for keys of one group")
            else:
                self._waiting.append((keys, reply))
        return reply

    def close(self) -> None:
        """Cancel all waiting calls."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for _, reply in waiting:
            reply.cancel()

    def _has_all(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _lookup(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]


class RemoteKeyStore:
    """See `KeyValueStore`. Runs on the target; the thread that receives messages passes the replies to
    `on_reply`.
    """

    def __init__(self, stream: ControlStream, group: int) -> None:
        self._stream = stream
        self._group = group
        self._lock = threading.Lock()
        self._calls = count(1)
        self._replies: dict[int, Future[list[bytes | None]]] = {}
        self._closed = ""

    def put(self, key: str, value: bytes) -> None:
        """See `KeyValueStore.put`."""
        send_message(self._stream, StorePut(group=self._group, key=key, value=value))

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """See `KeyValueStore.get_values`."""
        reply: Future[list[bytes | None]] = Future()
        with self._lock:
            if self._closed:
                raise SourceUnavailable(self._closed)
            call = next(self._calls)
            self._replies[call] = reply
        try:
            send_message(self._stream, StoreGet(group=self._group, call=call, keys=list(keys), wait=wait))
            return _result(reply, deadline)
        finally:
            with self._lock:
                self._replies.pop(call, None)

    @property
    def closed(self) -> bool:
        """See `KeyValueStore.closed`."""
        return bool(self._closed)

    def on_reply(self, message: StoreValues) -> None:
        """Handle a reply."""
        with self._lock:
            reply = self._replies.pop(message.call, None)
        if reply is not None:
            reply.set_result(message.values)

    def close(self, reason: str) -> None:
        """Fail all waiting calls."""
        with self._lock:
            self._closed = self._closed or reason
            replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply.set_exception(SourceUnavailable(reason))


def _result(reply: Future[list[bytes | None]], deadline: float) -> list[bytes | None]:
    try:
        return reply.result(max(0.0, deadline - time.monotonic()))
    except futures.TimeoutError:
        raise SourceTimeout("a rank of the group did not connect before the deadline") from None
    except futures.CancelledError:
        raise SourceUnavailable("the group is closed") from None


class KeyStore(Store):
    """Adapts `KeyValueStore` to `torch.distributed.Store`; only the methods that gloo and NCCL use to form a
    group.

    torch calls it from C++, also on its own threads, but keeps only the C++ part alive: the creator of a group holds a
    reference to this object for as long as the group may call it. Its errors are raised by the call that forms the
    group: unchanged, or as a RuntimeError if raised on another thread.
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
