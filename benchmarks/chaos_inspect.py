"""What is left of a round of `benchmarks.chaos` once it is over: in processes, logs and planners' books."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.chaos_crew import PLANNER, Crew
from benchmarks.chaos_draw import Store
from benchmarks.chaos_judge import TRACE, Census, Finding, leaks
from benchmarks.chaos_wire import Command

SETTLE_S: Final = 3.0
"""What a process may take until nothing is open in it."""
BOOKS_S: Final = 12.0
"""After this long a planner must have forgotten what is gone: a lease's time, and an instance's, and some."""
PAUSE_S: Final = 0.05
LINE: Final = 200
MUCH: Final = 4000
"""Characters of a log that are shown of a traceback."""
POOLED: Final = 8
"""Connections to Redis that a planner may keep: as many as it had calls at once."""


class Inspector:
    """Keeps what processes were at their birth, and what the planners should have forgotten by when."""

    def __init__(self, crew: Crew) -> None:
        self.born: dict[str, Census] = {}
        """Nodes by host; what they have in memory is counted from their first rest on."""
        self._crew = crew
        self._pids: dict[str, int] = {}
        self._planners: dict[Store, tuple[int, Census]] = {}
        self._read: dict[Path, int] = {}
        self._past: list[tuple[float, str, Store]] = []

    def remember_births(self) -> None:
        """Take the census of each process that is new."""
        nodes = self._crew.nodes
        fresh = [name for name, node in nodes.items() if self._pids.get(name) != node.process.pid]
        for name, census in self._censuses(fresh).items():
            self._pids[name] = nodes[name].process.pid
            self.born[name] = replace(census, memory=0)
        for store, planner in self._crew.planners.items():
            if self._planners.get(store, (0,))[0] != planner.pid:
                # Once it has answered: what it has in memory then is what it starts from.
                self._planners[store] = (planner.pid, Census.of(planner.pid))

    def settled(self, hosts: Iterable[str]) -> dict[str, Census]:
        """Censuses of nodes at rest, taken again while something is still open."""
        left, found, until = set(hosts), dict[str, Census](), time.monotonic() + SETTLE_S
        while left and time.monotonic() < until:
            found |= self._censuses(left)
            for host in left & found.keys():
                if not self.born[host].memory:
                    self.born[host] = replace(self.born[host], memory=found[host].memory)
            left = {host for host in left & found.keys() if any(leaks(self.born[host], found[host]))}
            self._crew.hear(PAUSE_S if left else 0.0)
        return found

    def traces(self) -> tuple[str, ...]:
        """What processes logged since the last call that has a traceback in it, by the process's name."""
        found: list[str] = []
        for log in sorted(self._crew.folder.glob("*.log")):
            with log.open(errors="replace") as lines:
                lines.seek(self._read.get(log, 0))
                before, trace, after = lines.read().partition(TRACE)
                if trace:
                    found.append(f"{log.stem}: {before[-LINE:]}{trace}{after[:MUCH]}")
                self._read[log] = lines.tell()
        return tuple(found)

    def over(self, model: str, store: Store) -> None:
        """A round is over: its planner is to forget its model in time."""
        self._past.append((time.monotonic() + BOOKS_S, model, store))

    def held(self) -> tuple[str, ...]:
        """What planners hold of rounds that they should have forgotten by now. Raises ChaosError."""
        now, held = time.monotonic(), list[str]()
        for _, model, store in [past for past in self._past if past[0] <= now]:
            self._crew.wait_planner(store)  # it may have come back only just now
            told = self._crew.must([PLANNER], Command("look", model=model, planner=self._crew.url(store)))
            held += [
                f"{model}: the planner ({store}) still holds a fork of {look.host or 'nobody'}"
                for look in told[PLANNER].forks
            ]
            held += [
                f"{model}: the planner ({store}) still holds the instance on {host}"
                for host in told[PLANNER].instances
            ]
        self._past = [past for past in self._past if past[0] > now]
        return tuple(held)

    def settle(self) -> tuple[Finding, ...]:
        """Once all rounds are over: what planners still hold of them, and what they have leaked."""
        while self._past and (left := self._past[-1][0] - time.monotonic()) > 0:
            self._crew.hear(left)
        found = [Finding("books", text) for text in self.held()]
        for store, (pid, before) in self._planners.items():
            if pid == self._crew.planners[store].pid:
                texts = leaks(before, Census.of(pid), pooled=POOLED)
                found += [Finding("leak", f"the planner ({store}): {text}") for text in texts]
        return tuple(found)

    def _censuses(self, hosts: Iterable[str]) -> dict[str, Census]:
        counted = self._crew.ask(hosts, Command("census"))
        return {
            host: Census.of(self._crew.nodes[host].process.pid, answer.threads)
            for host, answer in counted.items()
            if host in self._crew.nodes
        }
