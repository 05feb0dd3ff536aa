"""What is wrong with a round of `benchmarks.chaos`, if anything. Pure: values in, findings out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self

from benchmarks.chaos_scenarios import ChaosRound

EndingType = Literal["forked", "fallback", "failed", "unclean", "killed", "hung"]
FindingType = Literal["bytes", "hang", "leak", "repeats", "lost", "error", "books"]
"""bytes: a target that says it is whole holds others; hang: something is not done past its deadline; leak:
threads, files or memory that stay; repeats: more was read twice than was in flight; lost: a target failed
that had someone to read from; error: a process ended, or failed in another way than the product promises;
books: the planner keeps what is gone."""

MAX_MEMORY_GROWTH: Final = 24 << 20
"""Bytes by which a process may grow over its life, once it has done everything: the allocator's freedom."""
TRACE: Final = "Traceback (most recent call last)"


@dataclass(frozen=True)
class ProcessResources:
    """What is open in a process at rest: its threads, Python's threads by name, files, bytes in memory."""

    threads: int
    names: tuple[str, ...]
    files: Mapping[str, int]
    memory: int

    @classmethod
    def of(cls, pid: int, names: Sequence[str] = ()) -> Self:
        """As /proc tells it. Sockets and pipes are told by their kind alone."""
        files: Counter[str] = Counter()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                files[re.sub(r":\[\d+\]$", "", str(entry.readlink()))] += 1
            except FileNotFoundError:
                continue  # closed since it was listed
        status = Path(f"/proc/{pid}/status").read_text()
        status_fields = {key: value.split() for key, _, value in (row.partition(":") for row in status.splitlines())}
        return cls(int(status_fields["Threads"][0]), tuple(names), dict(files), int(status_fields["VmRSS"][0]) << 10)


@dataclass(frozen=True)
class ForkEnding:
    """How one target's fork ended. `is_correct` None: it holds no image; sizes in bytes."""

    host: str
    ending_type: EndingType
    is_correct: bool | None = None
    repeated_bytes: int = 0
    chunk_bytes: int = 0
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class InjectedFault:
    """What was done, and to whom; `role` is who it turned out to be. `error`: what it must not lead to."""

    fault_type: str
    role: str
    host: str
    error: str = ""


@dataclass(frozen=True)
class RoundObservation:
    """All that was seen of a round.

    `before` and `after` are the censuses of processes that lived through it; `died` those that ended
    and were not killed; `stuck` those that did not come to rest; `tracebacks` tracebacks in their logs;
    `stale_records` what a planner still held of an earlier round, long after its end.
    """

    round: ChaosRound
    window: int
    injected: tuple[InjectedFault, ...]
    endings: tuple[ForkEnding, ...]
    before: Mapping[str, ProcessResources] = field(default_factory=dict)
    after: Mapping[str, ProcessResources] = field(default_factory=dict)
    died: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    tracebacks: tuple[str, ...] = ()
    stale_records: tuple[str, ...] = ()
    recovery_s: float = 0.0


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    finding_type: FindingType
    text: str


def check_round(observation: RoundObservation) -> tuple[Finding, ...]:
    """Everything that a round did that it must not."""
    return tuple(_findings(observation))


def _findings(observation: RoundObservation) -> Iterator[Finding]:
    for ending in observation.endings:
        yield from _of_target(observation, ending)
    for injected in observation.injected:
        if injected.error:
            yield Finding("error", f"{injected.fault_type} {injected.host}: {injected.error}")
    for host, before in observation.before.items():
        if (after := observation.after.get(host)) is not None:
            yield from (Finding("leak", f"{host}: {text}") for text in find_leaks(before, after))
    yield from (Finding("error", f"{host} ended, and nobody killed it") for host in observation.died)
    yield from (Finding("hang", f"{host} did not come to rest") for host in observation.stuck)
    yield from (Finding("error", text) for text in observation.tracebacks)
    yield from (Finding("books", text) for text in observation.stale_records)


def _of_target(observation: RoundObservation, ending: ForkEnding) -> Iterator[Finding]:
    match ending.ending_type:
        case "killed":
            return
        case "hung":
            yield Finding("hang", f"{ending.host} was not done past its deadline")
        case "unclean":
            yield Finding("error", f"{ending.host}: {'; '.join(ending.reasons)}")
        case "forked" | "fallback":
            if not ending.is_correct:
                yield Finding("bytes", f"{ending.host} {ending.ending_type}, and holds other bytes")
        case "failed":
            if reason := is_unaffected(observation, ending.host):
                yield Finding("lost", f"{ending.host} failed, though {reason}")
    bound = max_repeated_chunks(len(observation.injected), observation.window, ending.chunk_bytes)
    if ending.repeated_bytes > bound:
        yield Finding("repeats", f"{ending.host} read {ending.repeated_bytes} bytes again, bound {bound}")


def is_unaffected(observation: RoundObservation, host: str) -> str:
    """Why a target had no reason to fail; empty where it may have had one.

    Its own files are there whatever happens to others. A seed or, where one of the targets reads storage
    for all, another target is of use only to one that nothing was done to, and that reaches the planner.
    """
    round_, injected = observation.round, {each.host: each.fault_type for each in observation.injected}
    if (round_.fallback or not round_.seeds) and injected.get(host) != "torn":
        return "it had files of its own"
    control = [each.role in ("planner", "redis") for each in observation.injected]
    if all(control):
        return "it had lost nobody to read from"
    if any(control) or injected.get(host, "torn") != "torn":
        return ""
    others = round_.seed_hosts or [other for other in round_.target_hosts if other != host]
    unaffected = [other for other in others if other not in injected]
    return f"nothing was done to {unaffected[0]}" if unaffected else ""


def max_repeated_chunks(faults: int, window: int, chunk_bytes: int) -> int:
    """Bytes that a fork may ask for again: with each fault what was in flight, and one chunk."""
    return faults * (window + 1) * chunk_bytes


def find_leaks(before: ProcessResources, after: ProcessResources, *, pooled: int = 0) -> Iterator[str]:
    """What a process at rest has now that it had not before, but for so many sockets of a pool."""
    names = Counter(after.names) - Counter(before.names)
    if names:
        yield f"threads {', '.join(sorted(names.elements()))}"
    elif after.threads > before.threads:
        yield f"{after.threads} threads, before {before.threads}"
    files = Counter(after.files) - Counter(before.files)
    if files["socket"] <= pooled:
        del files["socket"]
    if files:
        yield "files " + ", ".join(f"{name} ({count})" for name, count in sorted(files.items()))
    if after.memory > before.memory + MAX_MEMORY_GROWTH:
        yield f"{after.memory >> 20} MiB in memory, before {before.memory >> 20}"
