"""The keys of a group as a reader sees them: on the source, at the other end of its line."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import count

from rfork.errors import SourceGone, SourceStalled
from rfork.transport.base import Line
from rfork.transport.collective.messages import Ask, Have, Put, say


class FarKeys:
    """See `Keys`. Runs on the target; `heard` is told the source's answers by who receives them."""

    def __init__(self, line: Line, group: int, changed: threading.Condition) -> None:
        self._line = line
        self._group = group
        self._changed = changed
        self._calls = count(1)
        self._answers: dict[int, list[bytes | None] | None] = {}
        self._closed = ""

    def put(self, key: str, value: bytes) -> None:
        """See `Keys.put`."""
        say(self._line, Put(group=self._group, key=key, value=value))

    def ask(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """See `Keys.ask`."""
        with self._changed:
            call = next(self._calls)
            self._answers[call] = None
        say(self._line, Ask(group=self._group, call=call, keys=list(keys), wait=wait))
        with self._changed:
            try:
                while (answer := self._answers[call]) is None:
                    if self._closed:
                        raise SourceGone(self._closed)
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        raise SourceStalled("a rank of the group did not come before its deadline")
            finally:
                del self._answers[call]
        return answer

    def heard(self, have: Have) -> None:
        """An answer came; the lock of `changed` is held."""
        if have.call in self._answers:
            self._answers[have.call] = have.values

    def close(self, why: str) -> None:
        """Whoever waits for an answer waits no more; the lock of `changed` is held."""
        self._closed = self._closed or why
