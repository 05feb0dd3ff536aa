"""Asks the planner how the fleet stands, for as little as that takes: ended forks only when some ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rfork.cli.fleet import Fleet
from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused, PlannerUnreachable, RforkError
from rfork.wire import ForkView

ENDED_S: Final = 10.0
"""After so long the ended forks are asked for in any case: one may have come and gone between two looks."""
POLITE: Final = 4.0
"""A look is followed by a pause of so many times what it took: a planner has better things to do."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen last; `error`: why the planner does not answer, since `away_since` (Unix time)."""

    fleet: Fleet
    at: float
    error: str = ""
    away_since: float | None = None


class Looker:
    """Looks at one planner. `model`: at what is about that model alone. One thread looks."""

    def __init__(
        self, client: PlannerClient, model: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._model = model
        self._clock = clock
        self._last: Look | None = None
        self._live: frozenset[str] = frozenset()
        self._ended: tuple[ForkView, ...] = ()
        self._ended_at = float("-inf")

    def look(self) -> Look:
        """How it stands now. A planner that is gone is told in the look, unless it never answered.

        Raises PlannerUnreachable and PlannerRefused at the first look, and where a token is refused.
        """
        try:
            look = Look(self._fleet(), self._clock())
        except (PlannerUnreachable, PlannerRefused) as error:
            if self._last is None or not _passes(error):
                raise
            since = self._last.away_since
            look = Look(
                self._last.fleet, self._last.at, str(error), self._clock() if since is None else since
            )
        self._last = look
        return look

    def _fleet(self) -> Fleet:
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
        return Fleet(rows, tuple(client.instances(model=model)), (*live, *ended))


def _passes(error: RforkError) -> bool:
    """Whether a planner that comes back would answer again."""
    return isinstance(error, PlannerUnreachable) or (
        isinstance(error, PlannerRefused) and (error.status >= 500 or error.status == 429)
    )


class Watch:
    """Looks again and again on a thread of its own, so that keys are heard while a planner is silent."""

    def __init__(self, looker: Looker, first: Look, interval_s: float) -> None:
        self._looker = looker
        self._interval_s = interval_s
        self._look = first
        self._failure: RforkError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-top", daemon=True)
        self._thread.start()

    @property
    def look(self) -> Look:
        """The last look. Raises what ended the looking, if that did."""
        if self._failure is not None:
            raise self._failure
        return self._look

    def stop(self) -> None:
        """Look no more; a call under way is left to itself."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            began = time.monotonic()
            try:
                self._look = self._looker.look()
            except RforkError as error:
                self._failure = error
                return
            pause_s = pause_after(time.monotonic() - began, self._interval_s)


def pause_after(took_s: float, interval_s: float) -> float:
    """Seconds until the next look, after one that took so long."""
    return max(interval_s - took_s, POLITE * took_s)
