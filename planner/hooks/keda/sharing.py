"""One look for all who ask within a second: hundreds of triggers ask for the same things."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Clock = Callable[[], float]


@dataclass(slots=True)
class _Look(Generic[Value]):
    task: asyncio.Task[Value]
    fresh_until: float | None = None
    """None while it is under way."""


class Shared(Generic[Key, Value]):
    """`fetch` of a key, at most once in `keep_s` seconds, however many ask for it. Of one event loop.

    What a fetch raises is what all get who shared it. A caller that goes away does not end it for the others.
    """

    def __init__(self, fetch: Callable[[Key], Awaitable[Value]], keep_s: float, clock: Clock) -> None:
        self._fetch = fetch
        self._keep_s = keep_s
        self._clock = clock
        self._looks: dict[Key, _Look[Value]] = {}

    async def get(self, key: Key) -> Value:
        """The value of a key, no older than `keep_s` when it is asked for."""
        now = self._clock()
        look = self._looks.get(key)
        if look is None or (look.fresh_until is not None and now >= look.fresh_until):
            self._looks = {each: known for each, known in self._looks.items() if _fresh(known, now)}
            look = self._looks[key] = _Look(asyncio.create_task(self._looked(key)))
            look.task.add_done_callback(partial(self._done, look))
        return await asyncio.shield(look.task)

    async def close(self) -> None:
        """End what is under way."""
        tasks = [look.task for look in self._looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _looked(self, key: Key) -> Value:
        return await self._fetch(key)

    def _done(self, look: _Look[Value], _: asyncio.Task[Value]) -> None:
        look.fresh_until = self._clock() + self._keep_s


def _fresh(look: _Look[Value], now: float) -> bool:
    return look.fresh_until is None or now < look.fresh_until
