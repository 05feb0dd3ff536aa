"""What a fork did: the report that `rfork.fork` returns and every command prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from rfork.receiver.phase_timer import PhaseTimer
from rfork.receiver.throughput import ThroughputMeter, top_rates
from rfork.schema import ForkResult, source_type, types
from rfork.storage.base import storage_name
from rfork.tracing import Span, current_context
from rfork.weights_version import FIRST, UNSTATED
from rfork.weights_version import short as short_version

if TYPE_CHECKING:
    from rfork.image.layout import Layout
    from rfork.receiver.fallback import Fallback
    from rfork.source.seed import Seed

Outcome = Literal["forked", "fallback"]
RESUME_SOURCE_ID = "resume"
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
class TransferStats:
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
        return sum(share.verified_bytes for share in self.sources if share.source_id == RESUME_SOURCE_ID)


@dataclass(frozen=True, slots=True)
class ForkReport:
    """How one rank got its weights. Sizes in bytes, times in seconds.

    `fork_id` and `instance_id` are what the planner knows this fork and this process by, `model` the name
    they met under, `version` which weights of it these are. `version_from` is ``served`` where this instance
    had none of its own and took over the one that was served, ``none`` where several were, else ``own``.
    `first` is set where other versions were served and this instance was the first of its own.
    `layout_id` names which tensors the image has, `weights_id` their bytes; it has `image_bytes` in `chunks`
    chunks, of which `chunks_verified` were compared with a digest.
    `outcome` is ``forked`` where the planner's plan gave every chunk (from peers or, where it elected
    this instance, from its own storage), ``fallback`` where this instance loaded them by itself after all.
    `seconds` is the whole call; `phases` its parts (capture, offer, plan, transfer, fallback, digest), each
    second in one of them, and `resume`, which goes on beside the transfer.
    `bytes_read` counts the chunks that arrived, right or wrong, `bytes_repeated` those that had to be
    asked for again; `storage_bytes` is what this instance read from storage, for those that waited
    behind it or as its fallback (which counts as the whole image, besides what was read before).
    `resumed_bytes` were still here from a process that died before it had all (setting `resume`); they
    count in none of the others.
    `link_bytes_per_s` is the best rate that the transfer had for about a second, `efficiency` its own rate
    over that; None where it was too short to tell. `sources` has what each source gave, most first;
    `replans` counts the plans after the first; `fallback` is what was loaded instead of a fork, if anything
    was. `reasons` has one line for each failure on the way, and why the planner sent this
    instance to storage. `trace_id` is that of its spans, where these are
    sent to a collector. `seed` is this process's giving side, still open:
    close it, or leave it to the end of the process.
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
    link_bytes_per_s: float | None = None
    efficiency: float | None = None
    version: str | None = None
    version_from: Literal["own", "served", "none"] = "own"
    first: bool = False
    fallback: str | None = None
    reasons: tuple[str, ...] = ()
    trace_id: str | None = None
    seed: Seed | None = field(default=None, repr=False, compare=False)

    @property
    def gb_per_s(self) -> float:
        """Image bytes over the seconds of the transfer phase, in GB/s; 0 where nothing was transferred."""
        transfer = self.phases.get("transfer", 0.0)
        return self.image_bytes / transfer / 1e9 if transfer and self.outcome == "forked" else 0.0

    @property
    def storage_bytes(self) -> int:
        """Bytes that this instance read from its own storage, as elected or as its fallback."""
        return sum(share.verified_bytes for share in self.sources if source_type(share.source_id) != "peer")

    @property
    def resumed_bytes(self) -> int:
        """Bytes that were still here from a process that died, and are right."""
        return sum(share.verified_bytes for share in self.sources if share.source_id == RESUME_SOURCE_ID)

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

    def describe(self, span: Span) -> None:
        """Have the fork's span say what the report does."""
        span.set(
            version=self.version,
            version_from=self.version_from,
            first=self.first or None,
            outcome=self.outcome,
            bytes=self.image_bytes,
            chunks=self.chunks,
            bytes_read=self.bytes_read,
            bytes_repeated=self.bytes_repeated,
            replans=self.replans,
            gb_per_s=round(self.gb_per_s, 3),
            link_bytes_per_s=self.link_bytes_per_s,
            efficiency=self.efficiency,
            fallback=self.fallback,
            reasons=self.reasons,
        )

    def line(self) -> str:
        """The report on one line, for logs and terminals."""
        size = f"{self.image_bytes / 1e9:.3f} GB"
        if self.outcome == "fallback":
            why = self.reasons[-1] if self.reasons else "no reason given"
            named = "" if FIRST in why or UNSTATED in why else self._version_words()
            return f"loaded {size} from {self.fallback} in {self.seconds:.2f} s{named}, because: {why}"
        sources_text = ", ".join(
            f"{short_id(share.source_id)}@{share.host} ({share.transport})"
            if source_type(share.source_id) == "peer"
            else share.source_id
            for share in self.sources
            if share.source_id != RESUME_SOURCE_ID
        )
        if self.resumed_bytes:
            sources_text = " and ".join(
                filter(None, (sources_text, f"{self.resumed_bytes / 1e9:.3f} GB that were here"))
            )
        because = ""
        if self.storage_bytes and (why := next((each for each in self.reasons if each.startswith("NoSource")), "")):
            because = f", because: {why}"
        again = f", {self.bytes_repeated / 1e6:.1f} MB read again" if self.bytes_repeated else ""
        return (
            f"forked {size} in {self.seconds:.2f} s ({self.gb_per_s:.2f} GB/s) from {sources_text}"
            f"{self._version_words()}; {self.chunks_verified}/{self.chunks} chunks verified{again}{because}"
        )

    def _version_words(self) -> str:
        """Name the version where people may not expect it: the first of its kind, or taken over."""
        if self.first:
            return f", {FIRST} {short_version(self.version)}"
        if self.version_from == "served":
            return f", version {short_version(self.version)} as served"
        if self.version_from == "none":
            return ", as several versions are served and this target states none"
        return ""


def short_id(source_id: str) -> str:
    """A source as logs name it: the first 8 characters of an instance, storage by its whole name."""
    return source_id[:8] if source_type(source_id) == "peer" else source_id


def add_fallback_share(
    shares: Sequence[SourceShare], fallback: Fallback, layout: Layout, host: str
) -> tuple[SourceShare, ...]:
    """What each source gave, and the whole image that this instance then read by `fallback`, most first."""
    name, by_name = (
        storage_name(fallback.storage_type, fallback.uri),
        {share.source_id: share for share in shares},
    )
    before = by_name.get(name) or SourceShare(name, host, fallback.storage_type, 0, 0)
    by_name[name] = replace(
        before,
        verified_chunks=before.verified_chunks + len(layout.chunks),
        verified_bytes=before.verified_bytes + layout.image_bytes,
    )
    return tuple(sorted(by_name.values(), key=lambda share: -share.verified_bytes))


def transports_by_source(shares: Sequence[SourceShare]) -> dict[str, str]:
    """The transport by which each peer was read last; of many peers those that gave most."""
    peers = [
        share for share in shares if source_type(share.source_id) == "peer" and share.source_id != RESUME_SOURCE_ID
    ]
    peers.sort(key=lambda share: -share.verified_bytes)
    return {share.source_id: share.transport for share in peers[: types.MAX_TRANSPORTS]}


def build_fork_result(
    outcome: types.Outcome,
    timer: PhaseTimer,
    stats: TransferStats,
    meter: ThroughputMeter,
    reasons: Sequence[BaseException],
    report: ForkReport | None,
) -> ForkResult:
    """What the planner is told at the end; without a report what was pulled before it failed."""
    sources = report.sources if report is not None else stats.sources
    return ForkResult(
        outcome=outcome,
        seconds=timer.seconds,
        bytes_read=stats.bytes_read,
        # What was still here was given by nobody.
        sources={share.source_id: share.verified_bytes for share in sources if share.source_id != RESUME_SOURCE_ID},
        fallback=report.fallback if report is not None else None,
        efficiency=report.efficiency if report is not None else None,
        reasons=tuple(f"{type(error).__name__}: {error}" for error in reasons),
        bytes_repeated=stats.bytes_repeated,
        replans=stats.replans,
        link_bytes_per_s=meter.best,
        source_bytes_per_s=top_rates(meter.best_sources),
        transports=transports_by_source(sources),
        phases=phase_seconds(timer, stats),
    )


def current_trace_id() -> str | None:
    """The trace that this thread works for, where that is sent to a collector."""
    context = current_context()
    return context.trace_id if context is not None and context.sampled else None


def phase_seconds(timer: PhaseTimer, stats: TransferStats) -> dict[str, float]:
    """Seconds by phase, to a tenth of a millisecond."""
    resumed = {"resume": stats.resume_s} if stats.resume_s else {}
    return {phase: round(seconds, 4) for phase, seconds in (resumed | timer.phases).items()}
