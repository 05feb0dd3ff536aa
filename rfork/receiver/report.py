"""Report of a fork, which `rfork.fork` returns and every command prints, and the measurements in it. Runs on the
target.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from rfork import schema
from rfork.schema import CrossLayoutResult, ForkResult, source_type
from rfork.storage.base import storage_name
from rfork.tracing import NOOP_TRACER, Span, Tracer, current_context
from rfork.weights_version import FIRST, UNSTATED
from rfork.weights_version import short as short_version

if TYPE_CHECKING:
    from rfork.image.layout import Layout
    from rfork.receiver.fallback import Fallback
    from rfork.source.seed import Seed

Outcome = Literal["forked", "fallback"]
RESUME_SOURCE_ID = "resume"
"""Source id of chunks from the spool of a previous process."""
FINAL_REPORT_S: Final = 0.3
"""Time to report the end of a fork whose deadline has passed."""
WINDOW_S: Final = 1.0
"""Approximate length of the windows for rates: shorter ones would measure single chunks, not the link."""
NO_SOURCES: Final[Mapping[str, int]] = MappingProxyType({})


class ForkTimer:
    """Deadline of a fork, and the durations of its phases. Thread-safe.

    Each second counts for one phase: the innermost active one. Phases with the same name add up. Phases of
    several threads must be nested too.
    """

    def __init__(self, deadline_s: float, tracer: Tracer = NOOP_TRACER) -> None:
        """With `tracer`, each phase is also a span."""
        self._tracer = tracer
        self.began = time.monotonic()
        self.deadline = self.began + deadline_s
        """As a `time.monotonic()` value. It is extended while this instance reads its own storage for waiting
        instances and makes progress: starting over elsewhere would take longer.
        """
        self._lock = threading.Lock()
        self._ended: dict[str, float] = {}
        self._running: list[str] = []
        self._since = self.began  # when the innermost active phase began or resumed

    @property
    def seconds(self) -> float:
        """Seconds since the timer was created."""
        return time.monotonic() - self.began

    def extend_deadline(self, until: float) -> None:
        """Move the deadline to `until`, if that is later."""
        self.deadline = max(self.deadline, until)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase so far, in the order in which they began; the active phase is last."""
        with self._lock:
            totals = dict(self._ended)
            if self._running:
                name = self._running[-1]
                totals[name] = totals.pop(name) + time.monotonic() - self._since
            return totals

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        """Time the `with` block as part of phase `name`."""
        with self._lock:
            self._record()
            if name not in self._ended:
                self._ended[name] = 0.0
                for around in self._running:  # nested phases are recorded before the enclosing one
                    self._ended[around] = self._ended.pop(around)
            self._running.append(name)
        try:
            with self._tracer.span(name) as span:
                yield span
        finally:
            with self._lock:
                self._record()
                self._running.pop()

    def _record(self) -> None:
        """Add the elapsed time to the active phase, if any; the caller holds the lock."""
        now = time.monotonic()
        if self._running:
            self._ended[self._running[-1]] += now - self._since
        self._since = now


def final_report_deadline(deadline: float) -> float:
    """Return the deadline of the calls that end a fork: its own, but at least `FINAL_REPORT_S` from now."""
    return max(deadline, time.monotonic() + FINAL_REPORT_S)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Byte counts at one time."""

    at: float
    total: int
    by_source: Mapping[str, int]


class ThroughputMeter:
    """Current and maximum rates over windows of about `window_s`, in total and by source."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.bytes_per_s = 0.0
        """Over the last window; before its end, the mean so far."""
        self.max_bytes_per_s: float | None = None
        """None before the end of the first window."""
        self.source_bytes_per_s: Mapping[str, float] = {}
        """Same as `bytes_per_s`, by source, for sources that served bytes in the window."""
        self.max_source_bytes_per_s: Mapping[str, float] = {}
        """By source, each over its own fastest window; empty before the end of the first."""
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()

    def add(self, now: float, total: int, by_source: Mapping[str, int] = NO_SOURCES) -> None:
        """Record that `total` bytes had arrived at `now`, and the bytes from each source.

        They need not add up: bytes of a source may count only once they are verified.
        """
        self._samples.append(_Sample(now, total, by_source))
        while len(self._samples) > 2 and now - self._samples[1].at >= self._window_s:
            self._samples.popleft()
        before = self._samples[0]
        elapsed_s = now - before.at
        if elapsed_s > 0:
            self.bytes_per_s = max(0.0, (total - before.total) / elapsed_s)
            added = {name: count - before.by_source.get(name, 0) for name, count in by_source.items()}
            self.source_bytes_per_s = {name: count / elapsed_s for name, count in added.items() if count > 0}
        if elapsed_s >= self._window_s:
            self.max_bytes_per_s = max(self.max_bytes_per_s or 0.0, self.bytes_per_s)
            self.max_source_bytes_per_s = {
                **self.max_source_bytes_per_s,
                **{
                    name: max(rate, self.max_source_bytes_per_s.get(name, 0.0))
                    for name, rate in self.source_bytes_per_s.items()
                },
            }

    def efficiency(self, nbytes: int, seconds: float) -> float | None:
        """Return the rate of `nbytes` in `seconds` relative to the maximum; None if that is unknown."""
        return nbytes / seconds / self.max_bytes_per_s if self.max_bytes_per_s and seconds else None


@dataclass(frozen=True, slots=True)
class SourceShare:
    """Chunks and bytes from one source: a peer, local storage as ``KIND:URI``, or the spool (``resume``)."""

    source_id: str
    host: str
    transport: str
    verified_chunks: int
    verified_bytes: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Statistics of a transfer; sizes in bytes. `bytes_read` counts the chunks that have arrived, valid or not;
    `sources` are in descending order of their bytes.
    """

    bytes_read: int
    bytes_repeated: int
    replans: int
    sources: tuple[SourceShare, ...]
    resume_s: float = 0.0
    """Seconds spent reading chunks from the spool of a previous process."""
    loader_bytes: int = 0
    """Those of `bytes_read` that a loader read, which are counted only at its end, so they have no rate."""
    joined_storage: str | None = None
    """Source id of own storage that was read besides peers: its chunks are those of their version."""

    @property
    def shares(self) -> tuple[SourceShare, ...]:
        """The sources without that spool."""
        return tuple(share for share in self.sources if share.source_id != RESUME_SOURCE_ID)

    @property
    def resumed_bytes(self) -> int:
        """Bytes read from that spool."""
        return sum(share.verified_bytes for share in self.sources if share.source_id == RESUME_SOURCE_ID)


@dataclass(frozen=True, slots=True)
class ForkReport:
    """Describes how one rank got its weights. Sizes in bytes, times in seconds.

    `fork_id` and `instance_id` identify this fork and this process to the planner; `model` and `version` are
    the weights. `version_from` is ``served`` if this instance had no version and adopted the served one,
    ``none`` if several were served, otherwise ``own``. `first` is set if other versions were served and this
    instance was the first of its version.

    `layout_id` identifies the tensors of the image, `weights_id` their bytes; the image has `image_bytes` in
    `chunks` chunks, of which `chunks_verified` were compared with a digest.

    `outcome` is ``forked`` if all chunks came through the planner's plans (from peers or, if it elected this
    instance or its peers were slow, from local storage), and ``fallback`` if this instance loaded them itself.

    `seconds` is the duration of the call; `phases` are its parts (capture, offer, plan, transfer, fallback,
    digest), which do not overlap, and `resume`, which is concurrent with the transfer.

    `bytes_read` counts all chunks that arrived, valid or not, `bytes_repeated` those that were read again;
    `peer_bytes` is what this instance read from others, and `storage_bytes` from storage: for waiting instances,
    besides slow peers, or as its fallback (which counts as the complete image, in addition to earlier reads).
    `resumed_bytes` come from the spool of a
    process that died during its fork (setting `resume_dir`); the other fields do not count them.

    `link_bytes_per_s` is the transfer's maximum rate over about one second, `efficiency` its mean rate
    relative to that; None if it was too short to measure. `sources` has the bytes from each source in
    descending order; `replans` counts the plans after the first; `fallback` is what was loaded instead of a
    fork, if anything; `cross_layout` is what came from which other layout then. `reasons` has one line for each
    failure, and why the planner assigned this instance its own storage. `trace_id` identifies the spans, if they are
    exported. `seed` is this process's seed, still open: close it, or leave it open until the process ends.
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
    cross_layout: CrossLayoutResult | None = None
    reasons: tuple[str, ...] = ()
    trace_id: str | None = None
    seed: Seed | None = field(default=None, repr=False, compare=False)

    @property
    def gb_per_s(self) -> float:
        """Image bytes per second of the transfer phase, in GB/s; 0 if nothing was transferred."""
        transfer = self.phases.get("transfer", 0.0)
        return self.image_bytes / transfer / 1e9 if transfer and self.outcome == "forked" else 0.0

    @property
    def storage_bytes(self) -> int:
        """Bytes that this instance read from its own storage, when elected, besides peers or as its fallback."""
        return sum(share.verified_bytes for share in self.sources if source_type(share.source_id) != "peer")

    @property
    def peer_bytes(self) -> int:
        """Bytes that this instance read from other instances."""
        return sum(
            share.verified_bytes
            for share in self.sources
            if source_type(share.source_id) == "peer" and share.source_id != RESUME_SOURCE_ID
        )

    @property
    def resumed_bytes(self) -> int:
        """Valid bytes from the spool of a previous process."""
        return sum(share.verified_bytes for share in self.sources if share.source_id == RESUME_SOURCE_ID)

    def to_dict(self) -> dict[str, object]:
        """Return all values, ready for JSON (without the live `seed`)."""
        converted = ("seed", "sources", "cross_layout")
        values = {name: getattr(self, name) for name in self.__slots__ if name not in converted}
        return {
            **values,
            "sources": [asdict(share) for share in self.sources],
            "cross_layout": self.cross_layout.model_dump() if self.cross_layout is not None else None,
            "peer_bytes": self.peer_bytes,
            "storage_bytes": self.storage_bytes,
            "resumed_bytes": self.resumed_bytes,
            "gb_per_s": self.gb_per_s,
        }

    def describe(self, span: Span) -> None:
        """Add the report's values to the fork's span."""
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
        """Return the report as one line, for logs and terminals."""
        size = f"{self.image_bytes / 1e9:.3f} GB"
        if self.outcome == "fallback":
            reason = self.reasons[-1] if self.reasons else "unknown"
            version_text = "" if FIRST in reason or UNSTATED in reason else self._version_text()
            return f"loaded {size} from {self.fallback} in {self.seconds:.2f} s{version_text}; reason: {reason}"
        sources_text = ", ".join(
            f"{short_id(share.source_id)}@{share.host} ({share.transport})"
            if source_type(share.source_id) == "peer"
            else share.source_id
            for share in self.sources
            if share.source_id != RESUME_SOURCE_ID
        )
        if self.resumed_bytes:
            sources_text = " and ".join(filter(None, (sources_text, f"{self.resumed_bytes / 1e9:.3f} GB resumed")))
        explained = [each for each in self.reasons if each.startswith(("NoSource", "SlowSources"))]
        reason_text = f"; reason: {explained[0]}" if self.storage_bytes and explained else ""
        if self.storage_bytes and self.peer_bytes:
            sources_text += (
                f" ({self.peer_bytes / 1e9:.3f} GB from peers, {self.storage_bytes / 1e9:.3f} GB from storage)"
            )
        reread_text = f", {self.bytes_repeated / 1e6:.1f} MB read again" if self.bytes_repeated else ""
        return (
            f"forked {size} in {self.seconds:.2f} s ({self.gb_per_s:.2f} GB/s) from {sources_text}"
            f"{self._version_text()}; "
            f"{self.chunks_verified}/{self.chunks} chunks verified{reread_text}{reason_text}"
        )

    def _version_text(self) -> str:
        """Describe the version if it may be unexpected: the first one served, or an adopted one."""
        if self.first:
            return f", {FIRST} {short_version(self.version)}"
        if self.version_from == "served":
            return f", adopted version {short_version(self.version)}"
        if self.version_from == "none":
            return ", as several versions are served and this target states none"
        return ""


def short_id(source_id: str) -> str:
    """Return a source as shown in logs: 8 characters of an instance, or the complete name of storage."""
    return source_id[:8] if source_type(source_id) == "peer" else source_id


def add_fallback_share(
    shares: Sequence[SourceShare], fallback: Fallback, layout: Layout, host: str
) -> tuple[SourceShare, ...]:
    """Add the complete image that this instance read by `fallback`.

    Returns the shares by bytes in descending order. What was read from instances is in the results of its own forks.
    """
    if fallback.reads_instances:
        return tuple(shares)
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
    """Return the transport that each peer last used; if there are too many, of those that served most."""
    peers = [
        share for share in shares if source_type(share.source_id) == "peer" and share.source_id != RESUME_SOURCE_ID
    ]
    peers.sort(key=lambda share: -share.verified_bytes)
    return {share.source_id: share.transport for share in peers[: schema.MAX_TRANSPORTS]}


def build_fork_result(
    outcome: schema.Outcome,
    timer: ForkTimer,
    stats: TransferStats,
    meter: ThroughputMeter,
    reasons: Sequence[BaseException],
    report: ForkReport | None,
) -> ForkResult:
    """Return the result of a fork for the planner; without a report, that of the transfer until it failed."""
    sources = report.sources if report is not None else stats.sources
    return ForkResult(
        outcome=outcome,
        seconds=timer.seconds,
        bytes_read=stats.bytes_read,
        # No source served the resumed chunks.
        sources={share.source_id: share.verified_bytes for share in sources if share.source_id != RESUME_SOURCE_ID},
        fallback=report.fallback if report is not None else None,
        cross_layout=report.cross_layout if report is not None else None,
        efficiency=report.efficiency if report is not None else None,
        reasons=tuple(f"{type(error).__name__}: {error}" for error in reasons),
        bytes_repeated=stats.bytes_repeated,
        replans=stats.replans,
        link_bytes_per_s=meter.max_bytes_per_s,
        source_bytes_per_s=top_rates(meter.max_source_bytes_per_s),
        transports=transports_by_source(sources),
        phases=phase_seconds(timer, stats),
    )


def current_trace_id() -> str | None:
    """Return the trace id of this thread, if its spans are exported."""
    context = current_context()
    return context.trace_id if context is not None and context.sampled else None


def phase_seconds(timer: ForkTimer, stats: TransferStats) -> dict[str, float]:
    """Return seconds by phase, rounded to 0.1 ms."""
    resumed = {"resume": stats.resume_s} if stats.resume_s else {}
    return {phase: round(seconds, 4) for phase, seconds in (resumed | timer.phases).items()}


def measurable_bytes(bytes_by_source: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of sources that have a rate: a loader's bytes are known only at its end."""
    return {name: count for name, count in bytes_by_source.items() if source_type(name) != "loader"}


def top_rates(rates: Mapping[str, float]) -> dict[str, float]:
    """Return rates by source for reports: whole bytes per second, fastest first, at most `MAX_RATES`."""
    ranked = sorted(rates.items(), key=lambda item: -item[1])[: schema.MAX_RATES]
    return {name: float(round(rate)) for name, rate in ranked}
