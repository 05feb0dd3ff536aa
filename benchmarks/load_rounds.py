"""What `benchmarks.planner_load` runs: its contenders, and the rows that each of them makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import harness
from benchmarks.harness import Contender
from benchmarks.load_callers import FORK_KINDS, HEARTBEAT, KINDS, PLAN, Crowd
from benchmarks.load_client import Call, Caller, Samples, drive, request
from benchmarks.load_fleet import Fleet
from benchmarks.load_inside import ASK, POLICY, Inside
from benchmarks.load_servers import Server

CONNECTIONS = 16
FORKS_A_SECOND = 5.0
HEARTBEAT_S = 5.0
"""Between two heartbeats of one rank: the planner's default."""
BARE, BARE_POST, BARE_MODELS = "bare", "POST", "POST, models"
TAKES = "as many as it takes"


@dataclass(frozen=True)
class Run:
    """One round of one contender."""

    samples: Samples
    core_s: float = 0.0
    """Processor time of the server meanwhile."""


@dataclass(frozen=True)
class Line:
    """One row of the table: a contender, the kind of call whose times are told, those whose rate is."""

    name: str
    contender: str
    kind: str
    counted: tuple[str, ...] = ()


class Bench:
    """The contenders, the rows they make, and what each round of them measured."""

    def __init__(self, *, quick: bool) -> None:
        self.calls, self.seconds = 20, 1.0 if quick else 5.0
        self.slices = 3 if quick else 10
        self.alone: dict[str, Contender] = {}
        """Contenders who call one at a time, in short slices: what the machine does hits all alike."""
        self.together: dict[str, Contender] = {}
        """Contenders who call many at once."""
        self.lines: list[Line] = []
        self.runs: dict[str, list[Run]] = {}

    def measure(self, rounds: int) -> None:
        """Run everybody; a round of those who call one at a time is many slices."""
        harness.interleave(self.alone, rounds * self.slices)
        harness.interleave(self.together, rounds)

    def contender(self, name: str, measure: Callable[[], Run], *lines: Line) -> Contender:
        """A contender whose runs are kept, and the rows that it makes; `measure` is one run."""

        def contender() -> float:
            run = measure()
            self.runs[name].append(run)
            return run.samples.wall_s

        self.runs[name] = []
        self.lines += lines
        return contender

    def serve_bare(self, server: Server) -> None:
        """The routes that do nothing."""
        fleet = Fleet(100)
        body = fleet.ask(fleet.targets[0], 1).model_dump_json()
        requests = {
            "GET": request("GET", "/bare"),
            BARE_POST: request("POST", "/bare", body),
            BARE_MODELS: request("POST", "/models", body),
        }

        def caller() -> Caller:
            for _ in range(self.calls):
                for kind, each in requests.items():
                    yield Call(kind, each)

        lines = [Line(f"{BARE}: {kind}", BARE, kind) for kind in requests]
        self.alone[BARE] = self.contender(BARE, driven(server, lambda: [caller()]), *lines)

    def one_at_a_time(self, server: Server, crowd: Crowd) -> None:
        """Each kind of call, when nobody else calls."""
        name = crowd.fleet.name
        lines = [Line(f"{name}: {kind}", name, kind) for kind in KINDS]
        self.alone[name] = self.contender(name, driven(server, lambda: [crowd.rounds(self.calls)]), *lines)

    def under_load(self, server: Server, crowd: Crowd) -> None:
        """Many at once, and forks while the fleet heartbeats."""
        name = crowd.fleet.name
        beats, forks = f"{name}, heartbeats", f"{name}, forks"
        self.together[beats] = self.contender(
            beats,
            driven(server, lambda: crowd.heartbeats(CONNECTIONS, 0.0, self.seconds)),
            Line(f"{beats}: {TAKES}", beats, HEARTBEAT, (HEARTBEAT,)),
        )
        self.together[forks] = self.contender(
            forks,
            driven(server, lambda: crowd.forks(CONNECTIONS, 0.0, self.seconds)),
            Line(f"{forks}: {TAKES}", forks, PLAN, FORK_KINDS),
        )
        for rate in (crowd.fleet.ranks / HEARTBEAT_S, crowd.fleet.ranks / HEARTBEAT_S / 2):
            self._paced(server, crowd, rate)

    def _paced(self, server: Server, crowd: Crowd, rate: float) -> None:
        name = f"{crowd.fleet.name}, {rate:,.0f} heartbeats/s"

        def callers() -> list[Caller]:
            beats = crowd.heartbeats(CONNECTIONS, rate, self.seconds)
            return beats + crowd.forks(1, FORKS_A_SECOND, self.seconds)

        line = Line(f"{name}: plan", name, PLAN, (HEARTBEAT,))
        self.together[name] = self.contender(name, driven(server, callers), line)

    def inside(self, fleet: Fleet) -> None:
        """The same plans in this process."""
        registry, name = Inside(fleet), f"in process, {fleet.name}"
        lines = [Line(f"{name}: {kind}", name, kind) for kind in (ASK, POLICY)]
        self.alone[name] = self.contender(name, lambda: Run(registry.rounds(self.calls)), *lines)


def driven(server: Server, callers: Callable[[], Sequence[Caller]]) -> Callable[[], Run]:
    """One round against a server; the callers are made anew each time."""

    def measure() -> Run:
        used = server.cpu_seconds
        samples = drive(server.port, callers())
        return Run(samples, server.cpu_seconds - used)

    return measure


def middle(runs: Sequence[Run], kind: str) -> float:
    """The median of the runs' medians, in seconds."""
    return median(medians(runs, kind))


def medians(runs: Sequence[Run], kind: str) -> list[float]:
    """The median of each run, in seconds."""
    return [median(run.samples.seconds[kind]) for run in runs]
