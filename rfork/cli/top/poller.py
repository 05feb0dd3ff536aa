"""Polls the planner for the state of the fleet; finished forks are requested only if one finished."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rfork.cli.fleet_queries import FleetState
from rfork.errors import PlannerRejected, PlannerUnreachable, RforkError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo

MAX_FINISHED_AGE_S: Final = 10.0
"""Finished forks are requested at least this often: a fork may start and finish between two polls."""
PAUSE_FACTOR: Final = 4.0
"""Minimum pause after a poll, as a multiple of its duration, to limit the load on the planner."""


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The latest state; `error`: why the planner is unreachable, since `away_since` (Unix time)."""

    fleet: FleetState
    at: float
    error: str = ""
    away_since: float | None = None


class FleetPoller:
    """Polls one planner, for all models or for one. Not thread-safe."""

    def __init__(self, client: PlannerClient, model: str | None = None, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._model = model
        self._clock = clock
        self._last: FleetSample | None = None
        self._running_ids: frozenset[str] = frozenset()
        self._finished: tuple[ForkInfo, ...] = ()
        self._finished_at = float("-inf")

    def poll(self) -> FleetSample:
        """Return the current state. If the planner became unreachable, return the last state with the error.

        Raises PlannerUnreachable and PlannerRejected at the first poll, and PlannerRejected for a rejected
        token.
        """
        try:
            sample = FleetSample(self._fleet(), self._clock())
        except (PlannerUnreachable, PlannerRejected) as error:
            if self._last is None or not _is_transient(error):
                raise
            since = self._last.away_since
            sample = FleetSample(self._last.fleet, self._last.at, str(error), self._clock() if since is None else since)
        self._last = sample
        return sample

    def _fleet(self) -> FleetState:
        client, model = self._client, self._model
        running = [*client.forks(model=model, state="planning"), *client.forks(model=model, state="running")]
        running_ids = frozenset(fork.fork_id for fork in running)
        now = self._clock()
        if self._running_ids - running_ids or now - self._finished_at >= MAX_FINISHED_AGE_S:
            self._finished = (
                *client.forks(model=model, state="finished"),
                *client.forks(model=model, state="failed"),
            )
            self._finished_at = now
        self._running_ids = running_ids
        # Finished forks have become older since they were requested.
        elapsed_s = now - self._finished_at
        finished = (
            fork.model_copy(update={"age_s": fork.age_s + elapsed_s}) if elapsed_s else fork
            for fork in self._finished
            if fork.fork_id not in running_ids
        )
        rows = tuple(row for row in client.models() if model in (None, row.model))
        return FleetState(rows, tuple(client.instances(model=model)), (*running, *finished))


def _is_transient(error: RforkError) -> bool:
    """Return whether a retry may succeed."""
    return isinstance(error, PlannerUnreachable) or (
        isinstance(error, PlannerRejected) and (error.status >= 500 or error.status == 429)
    )


class BackgroundPoller:
    """Polls repeatedly on another thread, so that keys work while the planner does not respond."""

    def __init__(self, poller: FleetPoller, first: FleetSample, interval_s: float) -> None:
        self._poller = poller
        self._interval_s = interval_s
        self._sample = first
        self._failure: RforkError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-top", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> FleetSample:
        """The latest sample. Raises the error that ended polling."""
        if self._failure is not None:
            raise self._failure
        return self._sample

    def stop(self) -> None:
        """Stop polling; a request in progress is not interrupted."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            began = time.monotonic()
            try:
                self._sample = self._poller.poll()
            except RforkError as error:
                self._failure = error
                return
            pause_s = pause_after(time.monotonic() - began, self._interval_s)


def pause_after(elapsed_s: float, interval_s: float) -> float:
    """Return the seconds until the next poll, after one that took `elapsed_s`."""
    return max(interval_s - elapsed_s, PAUSE_FACTOR * elapsed_s)
