"""Asks the planner how the fleet stands, for as little as that takes: ended forks only when some ended."""

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

ENDED_S: Final = 10.0
"""After so long the ended forks are asked for in any case: one may have come and gone between two looks."""
PAUSE_FACTOR: Final = 4.0
"""A look is followed by a pause of so many times what it took: a planner has better things to do."""


@dataclass(frozen=True, slots=True)
class FleetSample:
    """What was seen last; `error`: why the planner does not answer, since `planner_down_since` (Unix time)."""

    fleet: FleetState
    at: float
    error: str = ""
    away_since: float | None = None


class FleetPoller:
    """Looks at one planner. `model`: at what is about that model alone. One thread looks."""

    def __init__(self, client: PlannerClient, model: str | None = None, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._model = model
        self._clock = clock
        self._last: FleetSample | None = None
        self._live: frozenset[str] = frozenset()
        self._ended: tuple[ForkInfo, ...] = ()
        self._ended_at = float("-inf")

    def poll(self) -> FleetSample:
        """How it stands now. A planner that is gone is told in the look, unless it never answered.

        Raises PlannerUnreachable and PlannerRejected at the first look, and where a token is refused.
        """
        try:
            poll = FleetSample(self._fleet(), self._clock())
        except (PlannerUnreachable, PlannerRejected) as error:
            if self._last is None or not _is_transient(error):
                raise
            since = self._last.away_since
            poll = FleetSample(self._last.fleet, self._last.at, str(error), self._clock() if since is None else since)
        self._last = poll
        return poll

    def _fleet(self) -> FleetState:
        client, model = self._client, self._model
        live = [*client.forks(model=model, state="planning"), *client.forks(model=model, state="running")]
        names = frozenset(fork.fork_id for fork in live)
        now = self._clock()
        if self._live - names or now - self._ended_at >= ENDED_S:
            self._ended = (
                *client.forks(model=model, state="finished"),
                *client.forks(model=model, state="failed"),
            )
            self._ended_at = now
        self._live = names
        # What was ended when they were asked for is older by now.
        passed_s = now - self._ended_at
        ended = (
            fork.model_copy(update={"age_s": fork.age_s + passed_s}) if passed_s else fork
            for fork in self._ended
            if fork.fork_id not in names
        )
        rows = tuple(row for row in client.models() if model in (None, row.model))
        return FleetState(rows, tuple(client.instances(model=model)), (*live, *ended))


def _is_transient(error: RforkError) -> bool:
    """Whether a planner that comes back would answer again."""
    return isinstance(error, PlannerUnreachable) or (
        isinstance(error, PlannerRejected) and (error.status >= 500 or error.status == 429)
    )


class BackgroundPoller:
    """Looks again and again on a thread of its own, so that keys are heard while a planner is silent."""

    def __init__(self, poller: FleetPoller, first: FleetSample, interval_s: float) -> None:
        self._poller = poller
        self._interval_s = interval_s
        self._sample = first
        self._failure: RforkError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-top", daemon=True)
        self._thread.start()

    @property
    def poll(self) -> FleetSample:
        """The last look. Raises what ended the looking, if that did."""
        if self._failure is not None:
            raise self._failure
        return self._sample

    def stop(self) -> None:
        """Look no more; a call under way is left to itself."""
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
    """Seconds until the next look, after one that took so long."""
    return max(interval_s - elapsed_s, PAUSE_FACTOR * elapsed_s)
