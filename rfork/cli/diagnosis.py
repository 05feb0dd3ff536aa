"""Diagnosis of a fork: the main cause of its duration or failure, in one or two sentences, with advice.

Pure functions over the planner's records: `ForkStats` sums up what a fork reported, `time_losses` attributes its
time to causes, and `diagnose` states the main cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from rfork import weights_version
from rfork.cli import fleet_queries, formatters
from rfork.schema import ForkInfo, ModelInfo, source_type

Cause = Literal[
    "link", "rate_limit", "storage", "sources", "repeated", "unsteady", "planning", "opening", "target", "unknown"
]
"""`link`: the fork was as fast as its link. All others cost extra time; `unknown`: too little was reported."""
DiagnosisType = (
    Literal["running", "fallback", "failed", "interrupted", "relay", "first_of_version", "several_versions"] | Cause
)
"""The state of a fork that did not succeed, or the largest cause of lost time.

`relay`: its source was still receiving; `first_of_version`: only other versions are served;
`several_versions`: the target states no version and more than one is served.
"""

LOCAL_PHASES: Final = ("capture", "digest", "resume")
NEAR_MINIMUM: Final = 1.25
"""A transfer within this factor of its minimum time counts as limited by the link."""
MIN_LOSS_S: Final = 0.2
"""Shorter losses are ignored."""
MIN_LIMITED_SHARE: Final = 0.6
"""A rate limit explains a transfer if it accounts for at least this share of its time."""
MAX_RELAY_SPEEDUP: Final = 1.5
"""A fork that is faster than its relay by more than this factor was not slowed down by it."""

NEW_VERSION_ADVICE: Final = (
    "None needed during a rollout of new weights: later instances of this version fork from this one. If both "
    "versions are the same weights, set one RFORK_VERSION for both."
)
UNSTATED_VERSION_ADVICE: Final = f"S{weights_version.STATE_VERSION_HINT[1:]}."
DEFAULT_ADVICE: Final = "Check the target's log around that time."
SLOW_SOURCES: Final = "SlowSources"
"""Error of a fork whose sources were slower than the target's own storage."""
CONSEQUENCES: Final = ("NoSource", "DeadlineExceeded", "AllSourcesFailed", "ForkFailed")
"""Errors that usually follow from earlier ones, which are the ones to fix."""
ADVICE: Final[dict[str, str]] = {
    "NoSource": "Start a seed (`rfork seed`), or set RFORK_SNAPSHOT so that a cold start reads verified bytes "
    "from storage once for the group.",
    "SlowSources": "Find what slows its sources down: their load, a rate limit or the link. The target's own "
    "storage was faster.",
    "PlannerUnreachable": "Check RFORK_PLANNER and the network between target and planner: run `rfork doctor` "
    "on the target's host.",
    "PlannerRejected": "Set RFORK_TOKEN on the target to a token that the planner accepts. The planner's log "
    "names the rejected request.",
    "DeadlineExceeded": "Find what slowed its sources down (phases and errors above), or raise RFORK_DEADLINE_S.",
    "ForkCancelled": "None is needed: a holder fetched an image that was no longer wanted.",
    "LayoutMismatch": "Build the target exactly like its seed: same revision, dtype, parallel ranks and "
    "quantisation. The error names the first tensor that differs.",
    "WrongVersion": "Use one version of the weights for all ranks of a replica: the same files on all nodes, or "
    "one RFORK_VERSION.",
    "LeaseRejected": "Synchronise the clocks of both hosts (NTP), and set the same RFORK_PLANNER_LEASE_KEYS on "
    "all planner replicas.",
    "SourceUnavailable": "Check the source's log for why it exited. Drain instances before they exit: `rfork drain "
    "INSTANCE --wait 60`.",
    "SourceUnreachable": "Allow connections from the target to the source's ports. A firewall or network policy "
    "drops them, or the path's MTU is smaller than the interface's.",
    "SourceTimeout": "Check the source's host and network: it sent nothing for RFORK_SOURCE_IDLE_TIMEOUT_S "
    "seconds, or less than RFORK_MIN_SOURCE_BYTES_PER_S.",
    "SourceCorrupt": "Replace the source: its memory or its network corrupts data. `rfork status` shows what its "
    "readers reported.",
    "SourceWeightsChanged": "The source's weights changed during the fork. Update weights inside "
    "`seed.updating()`, which waits for readers.",
    "SourceBusy": "Start another seed, or raise RFORK_MAX_READERS on the existing ones.",
    "NotSameHost": "Share what the transport needs between both containers: `rfork doctor` on the host names it.",
    "PeerAccessUnavailable": "Run `rfork doctor` on the host: it shows why one GPU cannot access the other.",
    "GpuDirectUnavailable": "Load nvidia-peermem, or use a driver with dma-buf: `rfork doctor` shows which is missing.",
    "DeviceDown": "Repair the RDMA device or its port, or correct RFORK_RDMA_DEVICES: see `rfork doctor`.",
    "VersionMismatch": "Install the same libraries on both sides: `rfork doctor` names those that differ.",
    "TransportUnavailable": "Run `rfork doctor` on both hosts: it shows why the transport is unavailable.",
    "StorageNotFound": "Correct the URI (RFORK_SNAPSHOT), or write the snapshot: `rfork snapshot write URI --name "
    "MODEL`.",
    "StorageAccessDenied": "Configure credentials on the target that may read it. Test them there with "
    "`rfork snapshot ls URI`.",
    "StorageChanged": "Write snapshots under a new name instead of overwriting one that is being read.",
    "StorageCorrupt": "Find the damage with `rfork snapshot verify URI`, and write the snapshot again.",
    "StorageFull": "Free space on the target's disk.",
    "StorageError": "Check the disk or object store that the error names.",
    "CheckpointError": "Use a checkpoint that fits the target's model: the error names what does not fit.",
    "MissingExtra": "Install the extra that the error names.",
    "UnsupportedTensor": "Exclude the tensor (`exclude`), or allocate separate memory for it: the error names it.",
    "SettingsError": "Correct the setting that the error names.",
    "ModelError": "Correct the model folder: the error names the problem.",
    "EngineMismatch": "Install a tested version of the engine: the error names what this one lacks.",
    "PortInUse": "Stop the process that uses the port, or set RFORK_PEER_PORT and RFORK_HTTP_PORT to 0 "
    "(any free port), or raise RFORK_PORT_RANGE_SIZE.",
    "ForkFailed": "Fix what the error names: no way to load the weights was left.",
    "AllSourcesFailed": "Fix the first of its errors: each source and each fallback failed for its own reason.",
}
"""Advice by the error with which a reason begins."""


# -- what a fork reported -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Bytes received from one source; `share` is its part of all received bytes, from 0 to 1."""

    source: str
    nbytes: int
    share: float
    transport: str | None
    rate_limit: int | None
    """Bytes per second to which the source limited all its readers together; None: no limit."""
    rate: float | None = None
    """Reported bytes per second: current, or in the fastest second of a finished fork; None: not reported."""

    @property
    def from_storage(self) -> bool:
        """Return whether the source is storage, not an instance."""
        return source_type(self.source) != "peer"

    @property
    def throttled_seconds(self) -> float:
        """Minimum seconds to send these bytes at the rate limit; 0: no limit."""
        return self.nbytes / self.rate_limit if self.rate_limit else 0.0


@dataclass(frozen=True)
class ForkStats:
    """Statistics of one fork, running or finished: sizes in bytes, times in seconds.

    Old clients do not report phases, link speed and transports; they are unknown here too.
    """

    fork: ForkInfo
    model: ModelInfo | None = None
    """Row with the medians of the model's forks and loads, if known."""
    upstream: ForkStats | None = None
    """Fork of the main source, if that was still receiving the weights."""

    @property
    def seconds(self) -> float:
        """Duration of the fork, or its age if it is still running."""
        return self.fork.finish.seconds if self.fork.finish is not None else self.fork.age_s

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds by phase."""
        last = self.fork.finish or self.fork.progress
        return last.phases if last is not None else {}

    @property
    def link(self) -> float | None:
        """Bytes per second in the fastest second; None: unknown."""
        last = self.fork.finish or self.fork.progress
        return (last.link_bytes_per_s or None) if last is not None else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """The errors of a finished fork, in order."""
        return self.fork.finish.reasons if self.fork.finish is not None else ()

    @property
    def error_kinds(self) -> list[str]:
        """The names of these errors."""
        return [fleet_queries.error_kind_of(reason) for reason in self.reasons]

    @property
    def bytes_repeated(self) -> int:
        """Bytes that were read more than once."""
        return self.fork.finish.bytes_repeated if self.fork.finish is not None else 0

    @property
    def replans(self) -> int:
        """Number of plans after the first."""
        return self.fork.finish.replans if self.fork.finish is not None else 0

    @cached_property
    def sources(self) -> tuple[SourceStats, ...]:
        """The sources, largest first."""
        sources = fleet_queries.sources_of(self.fork)
        transports, rates = fleet_queries.transports_of(self.fork), fleet_queries.rates_of(self.fork)
        limits, total = self.fork.source_rate_limits, sum(sources.values())
        return tuple(
            SourceStats(
                name, count, count / total if total else 0.0, transports.get(name), limits.get(name), rates.get(name)
            )
            for name, count in sources.items()
        )

    @property
    def transfer_s(self) -> float:
        """Seconds of the transfer; 0 if unknown."""
        return self.phases.get("transfer", 0.0)

    @property
    def received(self) -> int:
        """Bytes received from all sources."""
        return sum(each.nbytes for each in self.sources)

    @property
    def fetched(self) -> int:
        """Bytes that had to be fetched: the image without chunks kept by a previous process."""
        return self.received if "resume" in self.phases and self.received else self.fork.image_bytes

    @property
    def min_transfer_s(self) -> float | None:
        """Fetched bytes divided by the link's measured speed; None if that is unknown."""
        return self.fetched / self.link if self.link else None

    @property
    def storage_share(self) -> float:
        """Share of the bytes read from the target's own storage."""
        return sum(each.share for each in self.sources if each.from_storage)

    @property
    def peer_bytes(self) -> int:
        """Bytes read from other instances."""
        return sum(each.nbytes for each in self.sources if not each.from_storage)

    @property
    def storage_bytes(self) -> int:
        """Bytes read from the target's own storage."""
        return sum(each.nbytes for each in self.sources if each.from_storage)

    @property
    def mean_rate(self) -> float:
        """Bytes per second over the entire fork; 0 if nothing was read."""
        return self.received / self.seconds if self.seconds > 0 else 0.0

    @property
    def slowest_throttled(self) -> SourceStats | None:
        """Source whose rate limit cost the most time; None if no source had a limit."""
        throttled = [each for each in self.sources if each.throttled_seconds > 0]
        return max(throttled, key=lambda each: each.throttled_seconds) if throttled else None

    def to_dict(self) -> dict[str, object]:
        """Return the statistics for JSON; unknown values are null."""
        return {
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "link_bytes_per_s": self.link,
            "min_transfer_s": self.min_transfer_s,
            "transfer_s": self.transfer_s or None,
            "sources": [
                {
                    "source": each.source,
                    "bytes": each.nbytes,
                    "share": each.share,
                    "bytes_per_s": each.rate,
                    "transport": each.transport,
                    "rate_limit_bytes_per_s": each.rate_limit,
                }
                for each in self.sources
            ],
            "bytes_repeated": self.bytes_repeated,
            "replans": self.replans,
            "reasons": list(self.reasons),
            "median_fork_s": self.model.fork_s if self.model is not None else None,
            "median_storage_s": self.model.storage_s if self.model is not None else None,
        }


def stats_with_upstream(fork: ForkInfo, forks: Sequence[ForkInfo], model: ModelInfo | None) -> ForkStats:
    """Return the statistics of a fork, linked to those of the relays upstream of it, up to a complete source."""
    latest = fleet_queries.latest_forks(forks)
    chain, visited = [fork], {fork.instance_id}
    while (relay := _relay_of(chain[-1], latest)) is not None and relay.instance_id not in visited:
        chain.append(relay)
        visited.add(relay.instance_id)
    stats = ForkStats(chain.pop(), model)
    while chain:
        stats = ForkStats(chain.pop(), model, stats)
    return stats


def _relay_of(fork: ForkInfo, latest: Mapping[str, ForkInfo]) -> ForkInfo | None:
    """Return the fork of the main source, if it was still running when this fork began."""
    sources = fleet_queries.sources_of(fork)
    source_fork = latest.get(next(iter(sources), ""))
    return source_fork if source_fork is not None and fleet_queries.finished_ago_s(source_fork) < fork.age_s else None


def row_of(fork: ForkInfo, models: Sequence[ModelInfo]) -> ModelInfo | None:
    """Return the row of a fork's model, version and rank; one with medians is preferred."""
    key = (fork.model, fork.version, fork.rank.key)
    rows = [row for row in models if (row.model, row.version, row.rank_key) == key]
    return max(rows, key=lambda row: (row.fork_s is not None, row.image_bytes == fork.image_bytes), default=None)


# -- where its time went --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimeLoss:
    """Seconds lost to a cause, beyond the minimum transfer time."""

    cause: Cause
    seconds: float


def time_losses(stats: ForkStats) -> list[TimeLoss]:
    """Return the causes that cost time, largest first. Nothing is known if no phases were reported."""
    phases = stats.phases
    found = [
        TimeLoss("planning", phases.get("plan", 0.0)),
        TimeLoss("opening", phases.get("offer", 0.0)),
        TimeLoss("target", sum(phases.get(name, 0.0) for name in LOCAL_PHASES)),
        *_losses_in_transfer(stats),
    ]
    if phases and stats.fork.finish is not None:
        found.append(TimeLoss("unknown", stats.seconds - sum(phases.values()) + phases.get("resume", 0.0)))
    return sorted((loss for loss in found if loss.seconds > 0), key=lambda loss: -loss.seconds)


def _losses_in_transfer(stats: ForkStats) -> list[TimeLoss]:
    transfer_s, min_transfer_s = stats.transfer_s, stats.min_transfer_s
    if transfer_s <= 0:
        return []
    if stats.storage_share >= 0.5:
        # Reads from storage do not use the network link.
        return [TimeLoss("storage", transfer_s * stats.storage_share)]
    throttled = stats.slowest_throttled
    if throttled is not None and throttled.throttled_seconds >= MIN_LIMITED_SHARE * transfer_s:
        # The measured link speed is then the rate limit itself, so there is no excess to attribute.
        return [TimeLoss("rate_limit", min(throttled.throttled_seconds, transfer_s))]
    if min_transfer_s is None:
        return []
    excess_s = transfer_s - min_transfer_s
    received = stats.fetched + stats.bytes_repeated
    repeated_s = max(0.0, min(excess_s, transfer_s * stats.bytes_repeated / received if received else 0.0))
    remaining_cause: Cause = "sources" if stats.replans or stats.reasons else "unsteady"
    return [TimeLoss("repeated", repeated_s), TimeLoss(remaining_cause, excess_s - repeated_s)]


def _main_loss(stats: ForkStats) -> TimeLoss:
    """Return the largest cause, or `link` if no cause is large compared with the transfer itself."""
    if not stats.phases:
        return TimeLoss("unknown", stats.seconds)
    transfer_s = stats.min_transfer_s if stats.min_transfer_s is not None else stats.transfer_s
    losses = time_losses(stats)
    if not losses or losses[0].seconds <= max(MIN_LOSS_S, (NEAR_MINIMUM - 1) * transfer_s):
        return TimeLoss("link", transfer_s)
    return losses[0]


def comparison(stats: ForkStats) -> str:
    """Compare the duration with other forks and loads of the model; empty if there are none."""
    if stats.model is None:
        return ""
    medians = {"median fork": stats.model.fork_s, "median load from storage": stats.model.storage_s}
    return ", ".join(
        f"{stats.seconds / median_s:.1f}x the {name} ({formatters.duration(median_s)})"
        for name, median_s in medians.items()
        if median_s
    )


# -- the diagnosis --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause, description and advice; `advice` is empty if nothing needs to be done."""

    cause: DiagnosisType
    text: str
    advice: str = ""


def diagnose(stats: ForkStats) -> Diagnosis:
    """Return the diagnosis of a fork, running or finished."""
    finish, after = stats.fork.finish, formatters.duration(stats.seconds)
    if (diagnosis := _diagnose_version(stats)) is not None:
        return diagnosis
    if finish is None:
        return _diagnose_running(stats)
    if finish.outcome == "fallback":
        return _diagnose_fallback(stats, finish.fallback or "the engine's loader")
    last = f": {stats.reasons[-1].rstrip('.')}." if stats.reasons else ", without a reported reason."
    if finish.outcome == "interrupted":
        return Diagnosis("interrupted", f"The fork was stopped after {after}{last}")
    if finish.outcome == "failed":
        return _with_rate_limit(stats, "failed", f"The fork failed after {after}{last}")
    if stats.storage_bytes and stats.peer_bytes and SLOW_SOURCES in stats.error_kinds:
        return _diagnose_joined(stats)
    loss = _main_loss(stats)
    if loss.cause in ("link", "unsteady") and stats.upstream is not None:
        return _diagnose_relayed(stats, stats.upstream, loss)
    return _diagnose_loss(stats, loss)


def _diagnose_version(stats: ForkStats) -> Diagnosis | None:
    """Return the diagnosis of a fork that has no sources because of its version; None for other forks."""
    fork, finish = stats.fork, stats.fork.finish
    if (finish is not None and finish.outcome not in ("fallback", "failed")) or (finish is None and fork.plan):
        return None
    reason = fork.reason if finish is None else fleet_queries.last_error(fork)
    detail = reason.removeprefix("NoSource: ").rstrip(".")
    if weights_version.UNSTATED in reason:
        return Diagnosis("several_versions", f"No source: {detail}.", UNSTATED_VERSION_ADVICE)
    if not weights_version.is_first(reason):
        return None
    action = "No source, so the target loads without peers"
    if finish is not None:
        loaded = finish.fallback or "the engine's loader"
        action = f"The target loaded from {loaded}" if finish.outcome == "fallback" else "Loading without peers failed"
    return Diagnosis("first_of_version", f"{action}: {detail}.", NEW_VERSION_ADVICE)


def _diagnose_running(stats: ForkStats) -> Diagnosis:
    fork = stats.fork
    share, speed, left_s = (fleet_queries.verified_share(fork), fleet_queries.rate_of(fork), fleet_queries.eta_s(fork))
    if not fork.plan:
        reason = fork.reason or "the planner has no source"
        advice = (
            "If no source appears within RFORK_NO_SOURCE_TIMEOUT_S, or RFORK_DEADLINE_S passes, the target falls back "
            "automatically."
        )
        return Diagnosis("running", f"Waiting for a source: {reason}.", advice)
    if left_s is None:
        text = f"No data is arriving: {share:.0%} verified after {formatters.duration(stats.seconds)}."
        return Diagnosis("running", text, "If the source has stalled, the target requests another one automatically.")
    text = f"Running: {share:.0%} verified, {formatters.rate(speed)}, about {formatters.duration(left_s)} left."
    throttled = stats.slowest_throttled
    if throttled is not None and speed >= 0.5 * (throttled.rate_limit or 0):
        return Diagnosis("running", f"{text} {_throttled_text(throttled)}.", _raise_limit_advice(throttled))
    return Diagnosis("running", text)


def _diagnose_fallback(stats: ForkStats, fallback_name: str) -> Diagnosis:
    if not stats.reasons:
        text = f"The target loaded from {fallback_name} without reporting a reason."
        return Diagnosis("fallback", text, DEFAULT_ADVICE)
    text = f"The target loaded from {fallback_name} because of {stats.reasons[-1].rstrip('.')}."
    if earlier := stats.error_kinds[:-1]:
        text += f" Earlier errors: {_counted(earlier)}."
    return _with_rate_limit(stats, "fallback", text)


def _with_rate_limit(stats: ForkStats, cause: DiagnosisType, text: str) -> Diagnosis:
    """Return the diagnosis of a fork that did not succeed: of a rate limit if the time ran out because of it."""
    throttled = stats.slowest_throttled
    if throttled is None or stats.error_kinds[-1:] not in (["DeadlineExceeded"], [SLOW_SOURCES]):
        return Diagnosis(cause, text, advice_on(stats.error_kinds))
    return Diagnosis(cause, f"{text} {_throttled_text(throttled)}.", _raise_limit_advice(throttled))


def _diagnose_joined(stats: ForkStats) -> Diagnosis:
    """Return the diagnosis of a fork that read its own storage besides slow sources."""
    reason = next(each for each in stats.reasons if fleet_queries.error_kind_of(each) == SLOW_SOURCES)
    peers, storage = formatters.size(stats.peer_bytes), formatters.size(stats.storage_bytes)
    text = f"It read {peers} from peers and {storage} from its own storage: {reason.split(': ', 2)[-1].rstrip('.')}."
    throttled = stats.slowest_throttled
    if throttled is not None:
        return Diagnosis("sources", f"{text} {_throttled_text(throttled)}.", _raise_limit_advice(throttled))
    return Diagnosis("sources", text, ADVICE[SLOW_SOURCES])


def _diagnose_relayed(stats: ForkStats, relay: ForkStats, loss: TimeLoss) -> Diagnosis:
    """Return the diagnosis of a fork that read from a relay, which may have limited its speed."""
    if stats.mean_rate > MAX_RELAY_SPEEDUP * relay.mean_rate:
        return _diagnose_loss(stats, loss)
    first = relay
    while first.upstream is not None:
        first = first.upstream
    first_diagnosis = diagnose(first)
    text = (
        f"It read from {formatters.short(relay.fork.instance_id)}, which was still receiving, at "
        f"{formatters.rate(relay.mean_rate)}. First relay in the chain "
        f"({formatters.short(first.fork.instance_id)}): {first_diagnosis.text}"
    )
    return Diagnosis("relay", text, first_diagnosis.advice)


def _diagnose_loss(stats: ForkStats, loss: TimeLoss) -> Diagnosis:
    """Return the diagnosis of a successful fork by its largest loss of time."""
    total = formatters.duration(stats.seconds)
    lost = f"{formatters.duration(loss.seconds)} of {total}"
    version, throttled, advice = stats.fork.version, stats.slowest_throttled, advice_on(stats.error_kinds)
    served = f"served version {weights_version.short(version)}" if version else "had the weights"
    if loss.cause == "rate_limit" and throttled is not None:
        text = f"{_throttled_text(throttled)}: sending {formatters.size(throttled.nbytes)} took {lost}."
        advice = _raise_limit_advice(throttled)
    elif loss.cause == "storage":
        text = f"It read {stats.storage_share:.0%} from storage, because no instance {served}: {lost}."
        advice = "Keep a seed running, or move the snapshot to faster storage."
    elif loss.cause == "sources":
        replans = formatters.plural(stats.replans, "replan") if stats.replans else ""
        details = "; ".join(filter(None, (_counted(stats.error_kinds), replans)))
        text = f"Its sources failed or were too slow ({details}): about {lost} lost."
    elif loss.cause == "repeated":
        text = f"{formatters.size(stats.bytes_repeated)} had to be read again: about {lost} lost."
    elif loss.cause == "unsteady":
        text = f"Its link peaked at {formatters.rate(stats.link or 0.0)} but did not sustain it: about {lost} lost."
        advice = (
            "The link, the CPU or the sources were busy; check their load. Fewer readers per source "
            "(RFORK_MAX_READERS) or more seeds help."
        )
    elif loss.cause == "planning":
        text = f"It waited for a plan: {lost}."
        advice = "Check the planner's load (/metrics) and, if a scale-up was announced, RFORK_PLANNER_SCALEUP_WAIT_S."
    elif loss.cause == "opening":
        text = f"It opened its own snapshot or checkpoint, because no instance {served}: {lost}."
        advice = "Keep a seed running, or check the disk or object store that it opened."
    elif loss.cause == "target":
        phases = {name: stats.phases[name] for name in LOCAL_PHASES if name in stats.phases}
        named = ", ".join(f"{name} {formatters.duration(seconds)}" for name, seconds in phases.items())
        text = f"Local work on the target took most of the time ({named}): {lost}."
        advice = "Its CPU or GPU is busy or slow: `rfork doctor` on the target shows what computes its digests."
    elif loss.cause == "link" and stats.link is None:
        transfer = formatters.duration(stats.transfer_s)
        text = f"No delay found; the transfer of {transfer} was too short to measure the link."
        advice = ""
    elif loss.cause == "link":
        text = f"No delay found: it ran at {formatters.rate(stats.link or 0.0)}, the measured speed of its link."
        transports = sorted({each.transport for each in stats.sources if each.transport is not None})
        used = f" than {', '.join(transports)}" if transports else ""
        advice = f"Only a faster transport{used} would help: `rfork doctor` on both hosts lists the transports."
    elif not stats.phases:
        text = f"It took {total}; its rfork version is too old to report phases."
        advice = "Upgrade rfork on the target."
    else:
        unreported_s = stats.seconds - sum(stats.phases.values())
        text = f"{formatters.duration(unreported_s)} of {total} are in no reported phase."
        advice = DEFAULT_ADVICE
    return Diagnosis(loss.cause, text, advice)


def _throttled_text(throttled: SourceStats) -> str:
    limit = formatters.rate(throttled.rate_limit or 0)
    return f"{formatters.source(throttled.source)} limited its readers to {limit}"


def _raise_limit_advice(throttled: SourceStats) -> str:
    return (
        f"Raise RFORK_MAX_EGRESS_BYTES_PER_S on {formatters.source(throttled.source)}, or start another seed. If that "
        "is not set there, reads were throttled because its own requests were slow (RFORK_MAX_LATENCY_RATIO)."
    )


def _counted(error_kinds: Sequence[str]) -> str:
    counts = Counter(error_kinds).most_common(3)
    return ", ".join(kind if count == 1 else f"{count}x {kind}" for kind, count in counts)


def advice_on(error_kinds: Sequence[str]) -> str:
    """Return advice for errors in the order in which they occurred: for the last one that is a root cause."""
    known = [kind for kind in error_kinds if kind in ADVICE]
    root_causes = [kind for kind in known if kind not in CONSEQUENCES]
    return ADVICE[(root_causes or known)[-1]] if known else DEFAULT_ADVICE
