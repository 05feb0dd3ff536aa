"""Phases of a start, computed from the marks of `benchmarks.ready.start_marks`. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rfork.errors import RforkError

PHASES = (*("imports", "init", "build", "checks", "capture", "plan", "transfer", "load", "finish", "warm-up", "token"),)
"""All phases, in order. `imports`: until the worker has imported the engine. `build`: the model without weights.
`checks`: what rfork does before the fork, such as the proof that the model is complete. `load`: the engine's own
loader, or what a fork reports besides the phases before. `finish`: from the last byte to the end of the load.
"""
OUTSIDE = ("imports", "init", "build", "warm-up", "token")
"""Phases that have nothing to do with weights."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a start, in seconds since it began."""

    name: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Mark:
    """A step of one process, with times of `time.monotonic`."""

    name: str
    pid: int
    began: float
    ended: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Of a fork: the phases of its report."""
    sources: Sequence[Sequence[object]] = ()
    """Of a fork: host, transport and bytes of each source."""
    bytes: int = 0
    """Of a fork: those of the image."""


@dataclass(frozen=True, slots=True)
class Start:
    """One measured start of a server. Times in seconds since it began."""

    first_token_s: float
    phases: Sequence[Phase]
    text: str
    """Greedy response, to compare."""
    fetched: Phase | None = None
    """When a process other than the engine fetched the image, if one did during the start."""
    sources: str = ""
    """Hosts and transports of the fork."""

    def seconds(self, name: str) -> float:
        """Return the seconds of all phases of this name."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)

    @property
    def weights_s(self) -> float:
        """Seconds spent on weights: those of the engine's call that loads the model, without the build."""
        return sum(phase.seconds for phase in self.phases if phase.name not in OUTSIDE)


def marks_of(log: str) -> list[Mark]:
    """Return the marks in a log, whose lines may begin with a prefix of the engine."""
    lines = (line.partition("MARK {") for line in log.splitlines())
    return [Mark(**json.loads("{" + rest)) for _, separator, rest in lines if separator]


def start_of(marks: Sequence[Mark], began: float, listening: float, first_token: float, text: str) -> Start:
    """Return the start with these marks. Raises RforkError if the engine loaded no model.

    `listening` is when the request of the first token was sent.
    """
    loads = [mark for mark in marks if mark.name == "load"]
    if not loads:
        raise RforkError("the engine's log has no mark of a load")
    load = loads[-1]
    own = [mark for mark in marks if mark.pid == load.pid]
    imported = max((mark.ended for mark in own if mark.name == "imported"), default=load.began)
    forks = [mark for mark in own if mark.name == "fork"]
    bounds = [
        ("imports", imported),
        ("init", load.began),
        *_load_phases(load, [mark for mark in own if mark.name == "build"], forks),
        ("warm-up", listening),
        ("token", first_token),
    ]
    fetched = [mark for mark in marks if mark.name == "fork" and mark.pid != load.pid and mark.ended > began]
    return Start(
        first_token_s=first_token - began,
        phases=list(_consecutive(bounds, began)),
        text=text,
        fetched=Phase("fetch", fetched[0].began - began, fetched[-1].ended - began) if fetched else None,
        sources=", ".join(f"{host} ({transport})" for fork in forks for host, transport, _ in fork.sources),
    )


def _load_phases(load: Mark, builds: Sequence[Mark], forks: Sequence[Mark]) -> Iterator[tuple[str, float]]:
    """Yield the name and end of each phase of the load."""
    if builds:
        yield "checks" if forks else "load", builds[0].began
        yield "build", builds[0].ended
    if not forks:
        yield "load", load.ended
        return
    fork = forks[-1]
    yield "checks", fork.began
    at = fork.began
    for name, seconds in fork.phases.items():
        if name != "resume":  # which is concurrent with the transfer
            at += seconds
            yield name if name in PHASES else "load", at
    yield "finish", load.ended


def _consecutive(bounds: Iterable[tuple[str, float]], began: float) -> Iterator[Phase]:
    """Yield the phases that end at these times, each from the end of the one before."""
    at = began
    for name, ended in bounds:
        ended = max(at, ended)  # the parts of a report are rounded
        yield Phase(name, at - began, ended - began)
        at = ended
