"""Small load generator: clients that send completion requests to a server while a test runs.

::

    with LoadGenerator(seed, concurrency=2) as load:
        load.wait_for(20)
        …  # forks
    print(load.summary())
    assert [] == load.failures
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import httpx
from typing_extensions import Self

from tests.engines.engine_server import REQUEST_TIMEOUT_S, EngineServer

PROMPT = "fork() copies a process. The next words are"
STOP_S = 10.0


@dataclass(frozen=True)
class CompletedRequest:
    """A completed request."""

    began_s: float
    """Start time, by time.monotonic()."""
    latency_s: float
    """Seconds from sending the request to the end of the response."""


@dataclass(frozen=True)
class LoadSummary:
    """Latencies and failures of a period. Percentiles are by nearest rank; NaN without a completed request."""

    requests: int
    seconds: float
    p50_s: float
    p99_s: float
    failures: int

    def __str__(self) -> str:
        return (
            f"{self.requests} requests in {self.seconds:.1f} s, p50 {self.p50_s * 1e3:.0f} ms, "
            f"p99 {self.p99_s * 1e3:.0f} ms, {self.failures} failed"
        )


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` (0 to 1) of the values do not exceed; NaN if there are
    none.
    """
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


class LoadGenerator:
    """`concurrency` clients of one server, each sending its next request after the previous one completes.

    Every request is for exactly `max_tokens` greedy tokens. A failure (no connection, a status other than
    200, no response within two minutes) is recorded as one line, and its client stops. The clients run in a
    separate thread while the context is entered; requests in flight at its end are cancelled and not counted.
    """

    def __init__(
        self, server: EngineServer, *, concurrency: int = 1, prompt: str = PROMPT, max_tokens: int = 16
    ) -> None:
        self._server = server
        self._concurrency = concurrency
        self._path, self._body = server.request(prompt, max_tokens, ignore_eos=True)
        self._changed = threading.Condition()
        self._completed: list[CompletedRequest] = []
        self._failures: list[str] = []
        self._began_s = self._ended_s = math.nan
        self._stopped: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @property
    def completed(self) -> list[CompletedRequest]:
        """Completed requests so far, in order of completion."""
        with self._changed:
            return list(self._completed)

    @property
    def failures(self) -> list[str]:
        """Failures so far, one line each."""
        with self._changed:
            return list(self._failures)

    def wait_for(self, count: int, *, deadline_s: float = 300.0) -> None:
        """Return once `count` more requests have completed; RuntimeError if all clients fail or time is up."""
        with self._changed:
            wanted = len(self._completed) + count
            self._changed.wait_for(
                lambda: len(self._completed) >= wanted or len(self._failures) >= self._concurrency, deadline_s
            )
            if len(self._completed) < wanted:
                reason = self._failures or f"{deadline_s} s have passed"
                raise RuntimeError(f"{wanted - len(self._completed)} requests did not complete: {reason}")

    def summary(self, since_s: float | None = None, until_s: float | None = None) -> LoadSummary:
        """Summarize requests that began between two times of time.monotonic(); by default all."""
        with self._changed:
            first = self._began_s if since_s is None else since_s
            ended = time.monotonic() if math.isnan(self._ended_s) else self._ended_s
            last = ended if until_s is None else until_s
            latencies = [a.latency_s for a in self._completed if first <= a.began_s <= last]
            return LoadSummary(
                requests=len(latencies),
                seconds=last - first,
                p50_s=percentile(latencies, 0.50),
                p99_s=percentile(latencies, 0.99),
                failures=len(self._failures),
            )

    def stop(self) -> None:
        """Stop sending, and wait until the clients have ended. Idempotent."""
        if self._thread.is_alive() and self._loop is not None and self._stopped is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(STOP_S)
        if math.isnan(self._ended_s):
            self._ended_s = time.monotonic()

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        self._thread.start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._loop is not None, STOP_S):
                raise RuntimeError("the load generator's thread did not start")
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    async def _run(self) -> None:
        stopped = asyncio.Event()
        with self._changed:
            self._loop, self._stopped = asyncio.get_running_loop(), stopped
            self._changed.notify_all()
        async with httpx.AsyncClient(base_url=self._server.url, timeout=REQUEST_TIMEOUT_S) as client:
            clients = [asyncio.create_task(self._run_client(client)) for _ in range(self._concurrency)]
            await stopped.wait()
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _run_client(self, client: httpx.AsyncClient) -> None:
        """Send requests sequentially until cancelled or until one fails."""
        while True:
            began = time.monotonic()
            try:
                response = await client.post(self._path, json=self._body)
                response.raise_for_status()
            except httpx.HTTPError as error:
                with self._changed:
                    self._failures.append(f"{type(error).__name__}: {error}")
                    self._changed.notify_all()
                return
            with self._changed:
                self._completed.append(CompletedRequest(began, time.monotonic() - began))
                self._changed.notify_all()
