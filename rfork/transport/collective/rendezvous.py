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

from rfork.errors import SourceBusy, SourceGone, SourceStalled
from rfork.transport.collective.messages import LARGEST_VALUE, MOST_KEYS

Answer = Callable[[list[bytes | None]], None]


class Keys(Protocol):
    """Where a group's keys are, near or far. Thread-safe."""

    def put(self, key: str, value: bytes) -> None:
        """Set one."""
        ...

    def ask(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """Their values, once all are there if `wait`. Raises SourceStalled at the deadline, or SourceGone."""
        ...


class Rendezvous:
    """The keys of one group, on the source; see `Keys`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[list[str], Answer]] = []
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """See `Keys.put`. Raises SourceBusy for more than a group needs."""
        with self._changed:
            if len(value) > LARGEST_VALUE or (key not in self._values and len(self._values) >= MOST_KEYS):
                raise SourceBusy(f"a group has at most {MOST_KEYS} keys of {LARGEST_VALUE} bytes")
            self._values[key] = value
            self._changed.notify_all()
            ready = [each for each in self._waiting if all(name in self._values for name in each[0])]
            self._waiting = [each for each in self._waiting if each not in ready]
        for keys, answer in ready:
            answer(self._of(keys))

    def ask(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """See `Keys.ask`."""
        with self._changed:
            while wait and not self._closed and any(key not in self._values for key in keys):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise SourceStalled("a rank of the group did not come")
            if self._closed:
                raise SourceGone("the group is over")
        return self._of(keys)

    def answer(self, keys: list[str], answer: Answer, *, wait: bool) -> None:
        """`ask` without waiting: `answer` is called now, or later on another thread."""
        with self._changed:
            if wait and any(key not in self._values for key in keys):
                if len(self._waiting) >= MOST_KEYS:
                    raise SourceBusy("too many wait for the keys of one group")
                self._waiting.append((keys, answer))
                return
        answer(self._of(keys))

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
    """A `torch.distributed.Store` over `Keys`: what gloo and NCCL call to form a group, and no more.

    torch calls it from C++, on threads of its own too. What it raises comes out of the call that forms the
    group: as it is, or from another thread as a RuntimeError.
    """

    def __init__(self, keys: Keys, deadline: float) -> None:
        super().__init__()
        self._keys = keys
        self._deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        """See `torch.distributed.Store.set`."""
        self._keys.put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store.get`; waits until it is there."""
        return self._keys.ask([key], self._deadline, wait=True)[0] or b""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See `torch.distributed.Store.wait`; no longer than the group may take to form."""
        until = self._deadline
        if timeout is not None and timeout > timedelta(0):
            until = min(until, time.monotonic() + timeout.total_seconds())
        self._keys.ask(keys, until, wait=True)

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store.check`."""
        return None not in self._keys.ask(keys, self._deadline, wait=False)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See `torch.distributed.Store.multi_get`."""
        return [value or b"" for value in self._keys.ask(keys, self._deadline, wait=True)]

    def has_extended_api(self) -> bool:
        """See `torch.distributed.Store.has_extended_api`."""
        return False

    def delete_key(self, key: str) -> bool:
        """Nothing is deleted: the keys are the group's alone, and go with it."""
        return False
