"""Checks the observations of a round of `benchmarks.chaos`. Pure: values in, findings out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from typing_extensions import Self

from benchmarks.chaos.scenarios import ChaosRound

EndingType = Literal["forked", "fallback", "failed", "unclean", "killed", "hung"]
FindingType = Literal["bytes", "hang", "leak", "repeats", "lost", "error", "stale"]
"""bytes: a target that claims to be complete has other bytes; hang: something did not finish by its deadline;
leak: threads, files or memory that remain; repeats: more was read twice than was in flight; lost: a target
failed that had a source to read from; error: a process ended, or failed in another way than documented;
stale: the planner keeps expired records.
"""

MAX_MEMORY_GROWTH: Final = 24 << 20
"""Bytes by which a process may grow after its first round: what the allocator may keep."""
TRACE: Final = "Traceback (most recent call last)"


@dataclass(frozen=True)
class ProcessResources:
    """Resources of an idle process: number of threads, names of Python threads, open files by type, bytes of
    memory.
    """

    threads: int
    names: tuple[str, ...]
    files: Mapping[str, int]
    memory: int

    @classmethod
    def of(cls, pid: int, names: Sequence[str] = ()) -> Self:
        """Read the resources of a process from /proc. Sockets and pipes are counted by type only."""
        files: Counter[str] = Counter()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                files[re.sub(r":\[\d+\]$", "", str(entry.readlink()))] += 1
            except FileNotFoundError:
                continue  # closed since the folder was listed
        status = Path(f"/proc/{pid}/status").read_text()
        status_fields = {key: value.split() for key, _, value in (row.partition(":") for row in status.splitlines())}
        return cls(int(status_fields["Threads"][0]), tuple(names), dict(files), int(status_fields["VmRSS"][0]) << 10)


@dataclass(frozen=True)
class ForkEnding:
    """Ending of one target's fork. `is_correct` is None without an image; sizes are in bytes."""

    host: str
    ending_type: EndingType
    is_correct: bool | None = None
    repeated_bytes: int = 0
    chunk_bytes: int = 0
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected on `host`; `role` is the host's actual role. `error`: a violated guarantee."""

    fault_type: str
    role: str
    host: str
    error: str = ""


@dataclass(frozen=True)
class RoundObservation:
    """All observations of a round.

    `before` and `after` are the resources of the processes that survived the round; `died` are those that
    ended without being killed; `stuck` are those that did not become idle; `tracebacks` were found in logs;
    `stale_records` are records of an earlier round that a planner kept past their expiry.
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
    """One violated guarantee."""

    finding_type: FindingType
    text: str


def check_round(observation: RoundObservation) -> tuple[Finding, ...]:
    """Return all findings of a round."""
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
    yield from (Finding("error", f"{host} ended without being killed") for host in observation.died)
    yield from (Finding("hang", f"{host} did not become idle") for host in observation.stuck)
    yield from (Finding("error", text) for text in observation.tracebacks)
    yield from (Finding("stale", text) for text in observation.stale_records)


def _of_target(observation: RoundObservation, ending: ForkEnding) -> Iterator[Finding]:
    match ending.ending_type:
        case "killed":
            return
        case "hung":
            yield Finding("hang", f"{ending.host} missed its deadline")
        case "unclean":
            yield Finding("error", f"{ending.host}: {'; '.join(ending.reasons)}")
        case "forked" | "fallback":
            if not ending.is_correct:
                yield Finding("bytes", f"{ending.host} {ending.ending_type}, but has other bytes")
        case "failed":
            if reason := is_unaffected(observation, ending.host):
                yield Finding("lost", f"{ending.host} failed, though {reason}")
    # With own files, the reads in flight from slow peers are repeated from them.
    disturbances = len(observation.injected) + observation.round.fallback
    bound = max_repeated_chunks(disturbances, observation.window, ending.chunk_bytes)
    if ending.repeated_bytes > bound:
        yield Finding("repeats", f"{ending.host} read {ending.repeated_bytes} bytes twice, bound {bound}")


def is_unaffected(observation: RoundObservation, host: str) -> str:
    """Return why a target had no reason to fail; empty if it may have had one.

    A target's own files are available whatever happens to others. A seed (or, if one target reads storage for
    all, another target) helps only a target that was not disturbed and that reaches the planner.
    """
    round_, injected = observation.round, {each.host: each.fault_type for each in observation.injected}
    if (round_.fallback or not round_.seeds) and injected.get(host) != "torn":
        return "it had its own files"
    control = [each.role in ("planner", "redis") for each in observation.injected]
    if all(control):
        return "it had lost no source"
    if any(control) or injected.get(host, "torn") != "torn":
        return ""
    others = round_.seed_hosts or [other for other in round_.target_hosts if other != host]
    unaffected = [other for other in others if other not in injected]
    return f"{unaffected[0]} was not disturbed" if unaffected else ""


def max_repeated_chunks(faults: int, window: int, chunk_bytes: int) -> int:
    """Return the bytes that a fork may request twice: for each fault those in flight, and one chunk."""
    return faults * (window + 1) * chunk_bytes


def find_leaks(before: ProcessResources, after: ProcessResources, *, pooled: int = 0) -> Iterator[str]:
    """Return the resources that an idle process has in addition to those before; `pooled` sockets are
    allowed.
    """
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
        yield f"{after.memory >> 20} MiB of memory, before {before.memory >> 20}"
