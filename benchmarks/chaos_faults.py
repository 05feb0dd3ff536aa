"""Does to the crew of `benchmarks.chaos` what a round says, when it says so, and undoes it in time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Final

from benchmarks import chaos_disk
from benchmarks.chaos_crew import PLANNER, RATE, Crew
from benchmarks.chaos_draw import Fault, Round
from benchmarks.chaos_judge import Struck
from benchmarks.chaos_wire import Answer, Command, Look

LOSS: Final = 0.05


class Faults:
    """The faults of one round on their way. One thread; `due` is called often."""

    def __init__(
        self, crew: Crew, round_: Round, files: Mapping[str, Path], revive: Callable[[str], None]
    ) -> None:
        """`files`: by host the file that it reads where nobody has the image.

        `revive` has a host that was killed fork again.
        """
        self.struck: list[Struck] = []
        self.struck_at: float | None = None
        """When the last fault began (`time.monotonic`)."""
        self.killed: set[str] = set()
        self._crew = crew
        self._round = round_
        self._files = files
        self._revive = revive
        self._waiting = list(round_.faults)
        self._graph: tuple[Look, ...] = ()
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._touched: set[str] = set()
        self._reviving: set[str] = set()
        self._writing: dict[str, int] = {}

    @property
    def curious(self) -> bool:
        """Whether it has to be known who reads from whom."""
        return any(fault.role == "relay" or fault.kind == "torn" for fault in self._waiting)

    @property
    def reviving(self) -> bool:
        """Whether somebody who was killed will come back."""
        return bool(self._reviving)

    @property
    def unanswered(self) -> bool:
        """Whether a seed has not said yet what became of its snapshot."""
        return any(host in self._crew.nodes for host in self._writing)

    def see(self, graph: Sequence[Look]) -> None:
        """Who reads from whom now."""
        self._graph = tuple(graph)

    def hear(self, host: str, answer: Answer) -> None:
        """A seed has tried to write a snapshot. It must say so, leave no piece behind, and give on."""
        if (index := self._writing.pop(host, None)) is None:
            return
        left = {path.name for path in self._crew.disk(host, inside=False).iterdir()} - {chaos_disk.FILLER}
        if not answer.error.startswith(f"{host}: StorageFull") or left:
            error = f"a snapshot onto a full disk: {answer.error or 'written'}, left {left}"
            self.struck[index] = replace(self.struck[index], error=error)

    @property
    def longest_s(self) -> float:
        """How much later than the others somebody began who came back."""
        return max((each.lasts_s or 0.0 for each in self._round.faults if each.kind == "kill"), default=0.0)

    def due(self, progress: Mapping[str, float], ended: Collection[str]) -> None:
        """Do what is due: `progress` is each target's share of the image, `ended` those that are done."""
        now = time.monotonic()
        while self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[2]()
        for fault in list(self._waiting):
            watched = f"t{fault.watched}"
            if progress.get(watched, 0.0) >= fault.at or watched in ended or watched in self.killed:
                self._waiting.remove(fault)
                self._strike(fault, ended)

    def finish(self) -> None:
        """Undo what is still to be undone; nobody strikes or comes back any more."""
        self._waiting.clear()
        self._reviving.clear()
        while self._undo:
            heapq.heappop(self._undo)[2]()

    # -- who ----------------------------------------------------------------------------------------

    def _strike(self, fault: Fault, ended: Collection[str]) -> None:
        role, candidates = victims(self._round, fault, self._graph, ended, self._touched)
        if not candidates:
            return
        host = candidates[min(int(fault.choice * len(candidates)), len(candidates) - 1)]
        self._touched.add(host)
        self.struck_at = time.monotonic()
        self.struck.append(Struck(fault.kind, role, host))
        self._do(fault, host)

    # -- what ---------------------------------------------------------------------------------------

    def _do(self, fault: Fault, host: str) -> None:
        lab = self._crew.lab
        match fault.kind:
            case "kill":
                self._kill(fault, host)
            case "stop":
                self._stop(fault, host)
            case "cut":
                lab.cut(host)
                self._later(fault.lasts_s, lambda: lab.heal(host))
            case "loss":
                lab.shape(host, rate=RATE, loss=LOSS)
                self._later(None, lambda: lab.shape(host, rate=RATE))
            case "torn":
                chaos_disk.tear(self._files[host])
            case "full":
                self._fill(fault, host)

    def _kill(self, fault: Fault, host: str) -> None:
        crew, store = self._crew, self._round.store
        match fault.role:
            case "planner":
                crew.planners[store].kill()
                self._later(fault.lasts_s, lambda: crew.start_planner(store))
            case "redis":
                crew.signal_redis(SIGKILL)
                self._later(fault.lasts_s, crew.start_redis)
            case _:
                crew.nodes[host].process.kill()
                self.killed.add(host)
                if fault.lasts_s is not None:
                    self._reviving.add(host)
                    self._later(fault.lasts_s, lambda: self._come_back(host))

    def _come_back(self, host: str) -> None:
        if host in self._reviving:
            self._reviving.discard(host)
            self.killed.discard(host)
            self._revive(host)

    def _stop(self, fault: Fault, host: str) -> None:
        crew = self._crew
        send: Callable[[Signals], None]
        match fault.role:
            case "planner":
                send = crew.planners[self._round.store].signal
            case "redis":
                send = crew.signal_redis
            case _:
                send = crew.nodes[host].process.signal
        send(SIGSTOP)
        self._later(fault.lasts_s, lambda: send(SIGCONT))

    def _fill(self, fault: Fault, host: str) -> None:
        disk = self._crew.disk(host, inside=False)
        chaos_disk.fill(disk)
        self._later(None, lambda: chaos_disk.clear(disk))
        if fault.role == "seed":  # what a seed writes to a disk is a snapshot
            self._writing[host] = len(self.struck) - 1
            inside = str(self._crew.disk(host, inside=True))
            self._crew.nodes[host].send(Command("snapshot", folder=inside))

    def _later(self, seconds: float | None, undo: Callable[[], None]) -> None:
        at = time.monotonic() + seconds if seconds is not None else float("inf")
        heapq.heappush(self._undo, (at, next(self._order), undo))


def victims(
    round_: Round, fault: Fault, graph: Sequence[Look], ended: Collection[str], touched: Collection[str]
) -> tuple[str, list[str]]:
    """The role, and who has it now and is not `touched` yet.

    Where no target has readers any target stands in for a relay, and where none reads storage for a reader.
    Targets that still fork (not `ended`) come before all others.
    """
    if fault.role in ("planner", "redis"):
        return fault.role, [PLANNER]
    if fault.role == "seed":
        return "seed", [host for host in round_.seed_hosts if host not in touched]
    free = [host for host in round_.target_hosts if host not in touched]
    forking = [host for host in free if host not in ended] or free
    if fault.kind == "torn":
        readers = {look.host for look in graph if look.host in look.sources}
        return "target", [host for host in forking if host in readers] or forking
    if fault.role == "relay":
        given = {source for look in graph for source in look.sources if source != look.host}
        relays = [host for host in free if host in given]
        return ("relay", relays) if relays else ("target", forking)
    return "target", forking
