"""What is wrong with a round of `benchmarks.chaos`, if anything. Pure: values in, findings out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self

from benchmarks.chaos_draw import Round

Ended = Literal["forked", "fallback", "failed", "unclean", "killed", "hung"]
Wrong = Literal["bytes", "hang", "leak", "repeats", "lost", "error", "books"]
"""bytes: a target that says it is whole holds others; hang: something is not done past its deadline; leak:
threads, files or memory that stay; repeats: more was read twice than was in flight; lost: a target failed
that had someone to read from; error: a process ended, or failed in another way than the product promises;
books: the planner keeps what is gone."""

GROWTH: Final = 24 << 20
"""Bytes by which a process may grow over its life, once it has done everything: the allocator's freedom."""
TRACE: Final = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Census:
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
        told = {key: value.split() for key, _, value in (row.partition(":") for row in status.splitlines())}
        return cls(int(told["Threads"][0]), tuple(names), dict(files), int(told["VmRSS"][0]) << 10)


@dataclass(frozen=True)
class Ending:
    """How one target's fork ended. `right` None: it holds no image; sizes in bytes."""

    host: str
    ended: Ended
    right: bool | None = None
    repeated: int = 0
    chunk_bytes: int = 0
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Struck:
    """What was done, and to whom; `role` is who it turned out to be. `error`: what it must not lead to."""

    kind: str
    role: str
    host: str
    error: str = ""


@dataclass(frozen=True)
class Seen:
    """All that was seen of a round.

    `before` and `after` are the censuses of processes that lived through it; `died` those that ended
    and were not killed; `stuck` those that did not come to rest; `traces` tracebacks in their logs;
    `held` what a planner still held of an earlier round, long after its end.
    """

    round: Round
    window: int
    struck: tuple[Struck, ...]
    endings: tuple[Ending, ...]
    before: Mapping[str, Census] = field(default_factory=dict)
    after: Mapping[str, Census] = field(default_factory=dict)
    died: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    recovery_s: float = 0.0


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    wrong: Wrong
    text: str


def judge(seen: Seen) -> tuple[Finding, ...]:
    """Everything that a round did that it must not."""
    return tuple(_findings(seen))


def _findings(seen: Seen) -> Iterator[Finding]:
    for ending in seen.endings:
        yield from _of_target(seen, ending)
    for struck in seen.struck:
        if struck.error:
            yield Finding("error", f"{struck.kind} {struck.host}: {struck.error}")
    for host, before in seen.before.items():
        if (after := seen.after.get(host)) is not None:
            yield from (Finding("leak", f"{host}: {text}") for text in leaks(before, after))
    yield from (Finding("error", f"{host} ended, and nobody killed it") for host in seen.died)
    yield from (Finding("hang", f"{host} did not come to rest") for host in seen.stuck)
    yield from (Finding("error", text) for text in seen.traces)
    yield from (Finding("books", text) for text in seen.held)


def _of_target(seen: Seen, ending: Ending) -> Iterator[Finding]:
    match ending.ended:
        case "killed":
            return
        case "hung":
            yield Finding("hang", f"{ending.host} was not done past its deadline")
        case "unclean":
            yield Finding("error", f"{ending.host}: {'; '.join(ending.reasons)}")
        case "forked" | "fallback":
            if not ending.right:
                yield Finding("bytes", f"{ending.host} {ending.ended}, and holds other bytes")
        case "failed":
            if why := spared(seen, ending.host):
                yield Finding("lost", f"{ending.host} failed, though {why}")
    bound = repeats_bound(len(seen.struck), seen.window, ending.chunk_bytes)
    if ending.repeated > bound:
        yield Finding("repeats", f"{ending.host} read {ending.repeated} bytes again, bound {bound}")


def spared(seen: Seen, host: str) -> str:
    """Why a target had no reason to fail; empty where it may have had one.

    Its own files are there whatever happens to others. A seed or, where one of the targets reads storage
    for all, another target is of use only to one that nothing was done to, and that reaches the planner.
    """
    round_, struck = seen.round, {each.host: each.kind for each in seen.struck}
    if (round_.fallback or not round_.seeds) and struck.get(host) != "torn":
        return "it had files of its own"
    control = [each.role in ("planner", "redis") for each in seen.struck]
    if all(control):
        return "it had lost nobody to read from"
    if any(control) or struck.get(host, "torn") != "torn":
        return ""
    others = round_.seed_hosts or [other for other in round_.target_hosts if other != host]
    whole = [other for other in others if other not in struck]
    return f"nothing was done to {whole[0]}" if whole else ""


def repeats_bound(faults: int, window: int, chunk_bytes: int) -> int:
    """Bytes that a fork may ask for again: with each fault what was in flight, and one chunk."""
    return faults * (window + 1) * chunk_bytes


def leaks(before: Census, after: Census, *, pooled: int = 0) -> Iterator[str]:
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
    if after.memory > before.memory + GROWTH:
        yield f"{after.memory >> 20} MiB in memory, before {before.memory >> 20}"
