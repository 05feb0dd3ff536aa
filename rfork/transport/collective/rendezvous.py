"""How the ranks of a group find one another: a store of a few keys on the source, reached over the lines.

torch's process groups want a `torch.distributed.Store`. This one opens no port: what a reader's group sets
or asks for goes to the source over the reader's `Line`, under its lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store

from rfork.errors import SourceBusy, SourceTimeout, SourceUnavailable
from rfork.transport.collective.messages import MAX_KEYS, MAX_VALUE_BYTES

Reply = Callable[[list[bytes | None]], None]


class KeyValueStore(Protocol):
    """Where a group's keys are, near or far. Thread-safe."""

    def put(self, key: str, value: bytes) -> None:
        """Set one."""
        ...

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """Their values, once all are there if `wait`. Raises SourceTimeout at the deadline, or SourceUnavailable."""
        ...


class Rendezvous:
    """The keys of one group, on the source; see `KeyValueStore`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[list[str], Reply]] = []
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """See `KeyValueStore.put`. Raises SourceBusy for more than a group needs."""
        with self._changed:
            if len(value) > MAX_VALUE_BYTES or (key not in self._values and len(self._values) >= MAX_KEYS):
                raise SourceBusy(f"a group has at most {MAX_KEYS} keys of {MAX_VALUE_BYTES} bytes")
            self._values[key] = value
            self._changed.notify_all()
            ready = [each for each in self._waiting if all(name in self._values for name in each[0])]
            self._waiting = [each for each in self._waiting if each not in ready]
        for keys, on_reply in ready:
            on_reply(self._of(keys))

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """See `KeyValueStore.get_values`."""
        with self._changed:
            while wait and not self._closed and any(key not in self._values for key in keys):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise SourceTimeout("a rank of the group did not come")
            if self._closed:
                raise SourceUnavailable("the group is over")
        return self._of(keys)

    def get_values_async(self, keys: list[str], on_reply: Reply, *, wait: bool) -> None:
        """`get_values` without waiting: `answer` is called now, or later on another thread."""
        with self._changed:
            if wait and any(key not in self._values for key in keys):
                if len(self._waiting) >= MAX_KEYS:
                    raise SourceBusy("too many wait for the keys of one group")
                self._waiting.append((keys, on_reply))
                return
        on_reply(self._of(keys))

    def close(self) -> None:
        """Whoever waits is told that it is over."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _of(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._changed:
            return [self._values.get(key) for key in keys]


class KeyStore(Store):
    """A `torch.distributed.Store` over `KeyValueStore`: what gloo and NCCL call to form a group, and no more.

    torch calls it from C++, on threads of its own too. What it raises comes out of the call that forms the
    group: as it is, or from another thread as a RuntimeError.
    """

    def __init__(self, keys: KeyValueStore, deadline: float) -> None:
        super().__init__()
        self._keys = keys
        self._deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        """See `torch.distributed.Store.set`."""
        self._keys.put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store.get`; waits until it is there."""
        return self._keys.get_values([key], self._deadline, wait=True)[0] or b""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See `torch.distributed.Store.wait`; no longer than the group may take to form."""
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
        """Nothing is deleted: the keys are the group's alone, and go with it."""
        return False
