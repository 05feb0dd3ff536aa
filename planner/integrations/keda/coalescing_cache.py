"""Cache that shares one fetch among concurrent callers: hundreds of triggers need the same values."""

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
class _CachedFetch(Generic[Value]):
    task: asyncio.Task[Value]
    fresh_until: float | None = None
    """None while the fetch is in progress."""


class CoalescingCache(Generic[Key, Value]):
    """Calls `fetch` at most once per key and `ttl_s` seconds. For one event loop.

    All callers that share a fetch get its result or its exception. Cancelling one caller does not cancel the
    fetch.
    """

    def __init__(self, fetch: Callable[[Key], Awaitable[Value]], ttl_s: float, clock: Clock) -> None:
        self._fetch = fetch
        self._ttl_s = ttl_s
        self._clock = clock
        self._fetches: dict[Key, _CachedFetch[Value]] = {}

    async def get(self, key: Key) -> Value:
        """Return the value of a key, at most `ttl_s` seconds old."""
        now = self._clock()
        cached_fetch = self._fetches.get(key)
        if cached_fetch is None or (cached_fetch.fresh_until is not None and now >= cached_fetch.fresh_until):
            self._fetches = {each: other for each, other in self._fetches.items() if _is_fresh(other, now)}
            cached_fetch = self._fetches[key] = _CachedFetch(asyncio.create_task(self._run_fetch(key)))
            cached_fetch.task.add_done_callback(partial(self._on_fetch_done, cached_fetch))
        return await asyncio.shield(cached_fetch.task)

    async def close(self) -> None:
        """Cancel fetches in progress."""
        tasks = [cached_fetch.task for cached_fetch in self._fetches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_fetch(self, key: Key) -> Value:
        return await self._fetch(key)

    def _on_fetch_done(self, cached_fetch: _CachedFetch[Value], _: asyncio.Task[Value]) -> None:
        cached_fetch.fresh_until = self._clock() + self._ttl_s


def _is_fresh(cached_fetch: _CachedFetch[Value], now: float) -> bool:
    return cached_fetch.fresh_until is None or now < cached_fetch.fresh_until
