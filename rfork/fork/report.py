"""What a fork did: the report that `rfork.fork` returns and every command prints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from rfork import fields
from rfork.storage.base import name_of
from rfork.wire import ForkFinish, source_kind

if TYPE_CHECKING:
    from rfork.fork.fallback import Fallback
    from rfork.image.layout import Layout
    from rfork.seed.seed import Seed

Outcome = Literal["forked", "fallback"]
RESUME = "resume"
"""The name under which a report says what was still here from a process that died."""


@dataclass(frozen=True, slots=True)
class SourceShare:
    """What one source gave: a peer, own storage as ``KIND:URI``, or what was here (``resume``)."""

    source_id: str
    host: str
    transport: str
    verified_chunks: int
    verified_bytes: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull did; sizes in bytes."""

    bytes_read: int
    bytes_repeated: int
    replans: int
    sources: tuple[SourceShare, ...]
    resume_s: float = 0.0
    """Seconds in which chunks were taken from the spool of a process that died."""

    @property
    def resumed_bytes(self) -> int:
        """Bytes that came from that spool."""
        return sum(share.verified_bytes for share in self.sources if share.source_id == RESUME)


@dataclass(frozen=True, slots=True)
class ForkReport:
    """How one rank got its weights. Sizes in bytes, times in seconds.

    `outcome` is ``forked`` where the planner's plan gave every chunk (from peers or, where it elected
    this instance, from its own storage), ``fallback`` where this instance loaded them by itself after all.
    `seconds` is the whole call; `phases` its parts (capture, offer, plan, transfer, resume, fallback,
    digest).
    `bytes_read` counts the chunks that arrived, right or wrong, `bytes_repeated` those that had to be
    asked for again; `storage_bytes` is what this instance read from storage, for those that waited
    behind it or as its fallback (which counts as the whole image, besides what was read before).
    `resumed_bytes` were still here from a process that died before it had all (setting `resume`); they
    count in none of the others.
    `efficiency` is the transfer's rate over the best rate that it had for about a second, None where it
    was too short to tell. `reasons` has one line for each failure on the way. `seed` is this process's
    giving side, still open: close it, or leave it to the end of the process.
    """

    fork_id: str
    instance_id: str
    model: str
    outcome: Outcome
    layout_id: str
    weights_id: str
    image_bytes: int
    chunks: int
    chunks_verified: int
    seconds: float
    phases: dict[str, float]
    bytes_read: int = 0
    bytes_repeated: int = 0
    replans: int = 0
    sources: tuple[SourceShare, ...] = ()
    efficiency: float | None = None
    fallback: str | None = None
    reasons: tuple[str, ...] = ()
    seed: Seed | None = field(default=None, repr=False, compare=False)

    @property
    def gb_per_s(self) -> float:
        """Image bytes over the seconds of the transfer phase, in GB/s; 0 where nothing was transferred."""
        transfer = self.phases.get("transfer", 0.0)
        return self.image_bytes / transfer / 1e9 if transfer and self.outcome == "forked" else 0.0

    @property
    def storage_bytes(self) -> int:
        """Bytes that this instance read from its own storage, as elected or as its fallback."""
        return sum(share.verified_bytes for share in self.sources if source_kind(share.source_id) != "peer")

    @property
    def resumed_bytes(self) -> int:
        """Bytes that were still here from a process that died, and are right."""
        return sum(share.verified_bytes for share in self.sources if share.source_id == RESUME)

    def to_dict(self) -> dict[str, object]:
        """All values, ready for JSON (the live `seed` is left out)."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in ("seed", "sources")}
        return {
            **values,
            "sources": [asdict(share) for share in self.sources],
            "storage_bytes": self.storage_bytes,
            "resumed_bytes": self.resumed_bytes,
            "gb_per_s": self.gb_per_s,
        }

    def line(self) -> str:
        """The report on one line, for logs and terminals."""
        size = f"{self.image_bytes / 1e9:.3f} GB"
        if self.outcome == "fallback":
            why = self.reasons[-1] if self.reasons else "no reason given"
            return f"loaded {size} from {self.fallback} in {self.seconds:.2f} s, because: {why}"
        givers = ", ".join(
            f"{short(share.source_id)}@{share.host} ({share.transport})"
            if source_kind(share.source_id) == "peer"
            else share.source_id
            for share in self.sources
            if share.source_id != RESUME
        )
        if self.resumed_bytes:
            givers = " and ".join(filter(None, (givers, f"{self.resumed_bytes / 1e9:.3f} GB that were here")))
        again = f", {self.bytes_repeated / 1e6:.1f} MB read again" if self.bytes_repeated else ""
        return (
            f"forked {size} in {self.seconds:.2f} s ({self.gb_per_s:.2f} GB/s) from {givers}; "
            f"{self.chunks_verified}/{self.chunks} chunks verified{again}"
        )


def short(source_id: str) -> str:
    """A source as logs name it: the first 8 characters of an instance, storage by its whole name."""
    return source_id[:8] if source_kind(source_id) == "peer" else source_id


def with_read(
    shares: Sequence[SourceShare], way: Fallback, layout: Layout, host: str
) -> tuple[SourceShare, ...]:
    """What each source gave, and the whole image that this instance then read by `way`, most first."""
    name, by_name = name_of(way.kind, way.uri), {share.source_id: share for share in shares}
    before = by_name.get(name) or SourceShare(name, host, way.kind, 0, 0)
    by_name[name] = replace(
        before,
        verified_chunks=before.verified_chunks + len(layout.chunks),
        verified_bytes=before.verified_bytes + layout.image_bytes,
    )
    return tuple(sorted(by_name.values(), key=lambda share: -share.verified_bytes))


def finish_of(
    outcome: fields.Outcome,
    seconds: float,
    pulled: Pulled,
    reasons: Sequence[BaseException],
    report: ForkReport | None,
) -> ForkFinish:
    """What the planner is told at the end; without a report what was pulled before it failed."""
    sources = report.sources if report is not None else pulled.sources
    return ForkFinish(
        outcome=outcome,
        seconds=seconds,
        bytes_read=pulled.bytes_read,
        # What was still here was given by nobody.
        sources={share.source_id: share.verified_bytes for share in sources if share.source_id != RESUME},
        fallback=report.fallback if report is not None else None,
        efficiency=report.efficiency if report is not None else None,
        reasons=tuple(f"{type(error).__name__}: {error}" for error in reasons),
    )


class Stopwatch:
    """Collects the seconds of named phases; a phase entered twice adds up."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.phases: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the stopwatch was made."""
        return time.monotonic() - self.began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the `with` block as part of phase `name`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - began
