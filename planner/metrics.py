"""Prometheus metrics of the planner. Every label has few values, whatever callers send."""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from planner.core.group_history import Origin, origin_of
from planner.core.holders import PrefetchResult
from planner.core.records import ForkRecord, HolderRecord, InstanceRecord
from planner.core.scaleups import ExpectedReplicas
from rfork import errors, weights_version
from rfork.net.tls import not_after
from rfork.schema import (
    GPU_KERNEL_TRANSPORTS,
    ForkResult,
    InstanceState,
    Outcome,
    SourceFault,
    SourceType,
    StorageType,
    source_type,
)
from rfork.settings import TransportName

FAULT_OF: Final = {
    name: error_class.fault
    for name, error_class in vars(errors).items()
    if isinstance(error_class, type) and issubclass(error_class, errors.RforkError)
}
"""Fault attribution of each rfork error class."""
ERROR_TYPES: Final = frozenset(FAULT_OF)
REFUSALS: Final = (
    "unauthorized", "forbidden", "too-many-requests", "body-too-large", "request-timeout", "other",
)  # fmt: skip
"""Problem slugs of requests that are rejected before they reach a route."""
PLAN_SECONDS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
FORK_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
PHASES: Final = ("capture", "offer", "plan", "transfer", "resume", "fallback", "digest", "other")
FIRST_OF_VERSION: Final = "FirstOfVersion"
"""Reason of a fallback caused by a rollout: other versions are served, but not this one."""
VersionChoice = Literal["served", "several", "conflict"]
"""Resolution of a target's version: `served`, for a target without a version of its own; or
none, because `several` are served, or because of a `conflict` with another rank of the replica.
"""
BATCH_SIZE_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
EFFICIENCY: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
TRANSPORTS: Final = (*get_args(TransportName), "other")
MAX_BYTES: Final = 1 << 60
"""Maximum bytes per source and fork that are counted, so that one caller cannot overflow a counter."""


class Metrics:
    """The planner's metrics, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._instances = self._gauge("instances", "Registered instances", "state")
        self._live = self._gauge("live_forks", "Running forks, with or without a plan", "state")
        self._leases = self._gauge("active_leases", "Routes of the running forks")
        self._readers = self._gauge("storage_readers", "Running forks that are elected to read storage", "kind")
        self._orphaned = self._gauge(
            "orphaned_groups", "Ranks of models that have instances but no seed any more, though they had one"
        )
        self._mixed = self._gauge(
            "models_with_several_versions",
            "Models with instances that serve different versions; in-place updates do not count",
        )
        versions = self._counter(
            "version_choices",
            "Forks whose version the planner chose (served), or refused to choose (several, conflict)",
            "choice",
        )
        # Both are counted for each plan, so that their series are not searched by label.
        self._versions = {choice: versions.labels(choice) for choice in get_args(VersionChoice)}
        self._forks = self._counter(
            "forks",
            "Finished forks; abandoned: given up by the planner, counted again if they finish after all",
            "outcome",
        )
        self._fallbacks = self._counter(
            "fallbacks",
            "Forks that fell back, by fallback and by the last error before it, or FirstOfVersion",
            "fallback",
            "reason",
        )
        self._faults = self._counter("source_faults", "Faults that targets reported", "fault", "error")
        self._quarantines = self._counter("quarantines", "Sources quarantined")
        self._bytes = self._counter(
            "verified_bytes", "Bytes verified by finished forks, by origin: peers, or a type of storage", "source"
        )
        routes = self._counter("routes", "Planned routes, by preferred transport", "transport")
        self._routes = {transport: routes.labels(transport) for transport in TRANSPORTS}
        self._kernels = self._counter("kernel_routes", "Planned routes that run kernels on the source's GPU")
        self._scaleups = self._gauge("scaleups", "Announced scale-ups in progress")
        self._expected = self._gauge("expected_replicas", "Replicas of announced scale-ups that have not arrived")
        self._scaleup_batches = self._counter(
            "scaleup_batches", "Batches of scale-ups; complete: no replica was missing", "complete"
        )
        self._holders = self._gauge("holders", "Registered holders that keep images")
        self._held = self._gauge("held_bytes", "Memory that the images of holders use")
        self._refused_images = self._gauge("refused_images", "Images that holders were to keep and do not")
        self._prefetches = self._counter(
            "prefetches",
            "Announced images: used: forks that read an image of a holder on their host; unused: images that no engine"
            " had used when their holder dropped them; wrong_layout: images whose engine came with another layout",
            "result",
        )
        self._refused = self._counter("refused_requests", "Requests rejected before they reached a route", "reason")
        self._conflicts = self._counter(
            "store_conflicts", "Changes repeated because another replica changed the group first"
        )
        self._unavailable = self._counter("store_unavailable", "Changes that the store did not accept")
        self.plan_seconds = Histogram(
            "rfork_planner_plan_seconds",
            "Seconds to make one plan",
            buckets=PLAN_SECONDS,
            registry=self.registry,
        )
        self._batch_sizes = Histogram(
            "rfork_planner_plan_batch_size",
            "Forks planned together",
            buckets=BATCH_SIZE_BUCKETS,
            registry=self.registry,
        )
        self._seconds = Histogram(
            "rfork_planner_fork_seconds",
            "Seconds of finished forks, waits included, by outcome and by origin of the bytes",
            ("outcome", "origin"),
            buckets=FORK_SECONDS,
            registry=self.registry,
        )
        self._phases = Histogram(
            "rfork_planner_fork_phase_seconds",
            "Seconds of finished forks, by phase",
            ("phase",),
            buckets=FORK_SECONDS,
            registry=self.registry,
        )
        self._seconds_saved = self._counter("saved_seconds", "Seconds that forks from peers were faster than storage")
        self._seconds_lost = self._counter("lost_seconds", "Seconds that forks from peers were slower than storage")
        self._efficiency = Histogram(
            "rfork_planner_fork_efficiency",
            "Image bytes per second of the transfer, relative to its fastest second",
            buckets=EFFICIENCY,
            registry=self.registry,
        )
        self._certificate = self._gauge(
            "certificate_not_after_seconds",
            "Expiry of the planner's certificate, in seconds since the epoch; 0: none",
        )
        self._initialise_series()

    def planned(self, batch_size: int) -> None:
        """Count a plan that this many forks share."""
        self._batch_sizes.observe(batch_size)

    def follow_certificate(self, certificate: Path) -> None:
        """Export the expiry of the planner's certificate, read at each scrape; 0 if it cannot be read."""
        self._certificate.set_function(lambda: _end_of(certificate))

    def scaleup_batched(self, is_complete: bool) -> None:
        """Count a batch of a scale-up that stopped waiting."""
        self._scaleup_batches.labels("true" if is_complete else "false").inc()

    def route_planned(self, transports: Sequence[str]) -> None:
        """Count a new route of a fork, with its transports in order of preference."""
        first = transports[0] if transports else "other"
        self._routes.get(first, self._routes["other"]).inc()
        if first in GPU_KERNEL_TRANSPORTS:
            self._kernels.inc()

    def fault(self, fault: SourceFault) -> None:
        """Count a fault that a target reported."""
        self._faults.labels(fault.fault, _error_type(fault.error)).inc()

    def version_chosen(self, choice: VersionChoice) -> None:
        """Count a new fork whose version is not its target's own."""
        self._versions[choice].inc()

    def quarantined(self) -> None:
        """Count a quarantined source."""
        self._quarantines.inc()

    def fork_abandoned(self) -> None:
        """Count an abandoned fork: its target is silent, was removed, or began another. It may still finish."""
        self._forks.labels("abandoned").inc()

    def bytes_read(self, finish: ForkResult) -> None:
        """Count the bytes of a finished fork; of a holder's fork only these count, because no engine waits for it."""
        for source, verified_bytes in finish.sources.items():
            self._bytes.labels(source_type(source)).inc(min(max(verified_bytes, 0), MAX_BYTES))

    def ended(self, finish: ForkResult, seconds_saved: float | None = None) -> None:
        """Count a finished fork; `seconds_saved`: compared with storage, None if unknown."""
        self._forks.labels(finish.outcome).inc()
        self._seconds.labels(finish.outcome, origin_of(finish)).observe(finish.seconds)
        for phase, seconds in finish.phases.items():
            self._phases.labels(phase if phase in PHASES else "other").observe(seconds)
        if seconds_saved is not None:
            (self._seconds_saved if seconds_saved >= 0 else self._seconds_lost).inc(abs(seconds_saved))
        self.bytes_read(finish)
        if finish.outcome == "fallback":
            fallback = source_type(finish.fallback) if finish.fallback else "loader"
            self._fallbacks.labels(fallback, _fallback_reason(finish.reasons)).inc()
        if finish.efficiency is not None and math.isfinite(finish.efficiency):
            self._efficiency.observe(finish.efficiency)

    def prefetch(self, result: PrefetchResult, count: int = 1) -> None:
        """Count the result of prefetches."""
        self._prefetches.labels(result).inc(count)

    def request_refused(self, slug: str) -> None:
        """Count a request that was rejected before it reached a route; `slug` is the last part of the
        problem's type.
        """
        self._refused.labels(slug if slug in REFUSALS else "other").inc()

    def store_conflict(self) -> None:
        """Count a group change that another replica made first, so that its plan is repeated."""
        self._conflicts.inc()

    def store_unavailable(self) -> None:
        """Count a change that the store did not accept."""
        self._unavailable.inc()

    def exposition(
        self,
        instances: Iterable[InstanceRecord],
        live: Iterable[ForkRecord],
        orphaned: int = 0,
        mixed: int = 0,
        scaleups: Sequence[ExpectedReplicas] = (),
        holders: Sequence[HolderRecord] = (),
    ) -> bytes:
        """Return all metrics in Prometheus' text format; the gauges are computed now, in one pass over each.

        `orphaned`: groups that have members but no source left. `mixed`: models of which more than one
        version is served. `scaleups`: those in progress. `holders`: those registered.
        """
        # Not from `record.source`, which would have to be rebuilt after each heartbeat.
        states = Tally("draining" if record.drained else record.report.state for record in instances)
        forks: Tally[str] = Tally()
        readers: Tally[str] = Tally()
        leases = 0
        for fork in live:
            forks[fork.state] += 1
            leases += len(fork.reads)
            if fork.storage:
                readers.update({read.kind for read in fork.storage})
        for state in get_args(InstanceState):
            self._instances.labels(state).set(states[state])
        for fork_state in ("planning", "running"):
            self._live.labels(fork_state).set(forks[fork_state])
        for storage_type in get_args(StorageType):
            self._readers.labels(storage_type).set(readers[storage_type])
        self._leases.set(leases)
        self._orphaned.set(orphaned)
        self._mixed.set(mixed)
        self._scaleups.set(len(scaleups))
        self._expected.set(sum(each.record.expected - each.max_position_count for each in scaleups))
        self._holders.set(sum(holder.report.memory_bytes > 0 for holder in holders))
        self._held.set(sum(holder.report.used_bytes for holder in holders))
        self._refused_images.set(sum(len(holder.report.refused) for holder in holders))
        return generate_latest(self.registry)

    def _initialise_series(self) -> None:
        """Export events that have not happened as 0 instead of omitting them, so that the first one shows as
        a rise.
        """
        self._forks.labels("abandoned")
        for outcome in get_args(Outcome):
            self._forks.labels(outcome)
            for origin in get_args(Origin):
                self._seconds.labels(outcome, origin)
        for phase in PHASES:
            self._phases.labels(phase)
        for type_name in get_args(SourceType):
            self._bytes.labels(type_name)
        for name in sorted(ERROR_TYPES):
            self._faults.labels(FAULT_OF[name], name)
        for reason in REFUSALS:
            self._refused.labels(reason)
        for is_complete in ("true", "false"):
            self._scaleup_batches.labels(is_complete)
        for type_name in get_args(StorageType):
            self._fallbacks.labels(type_name, FIRST_OF_VERSION)
        for result in get_args(PrefetchResult):
            self._prefetches.labels(result)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"rfork_planner_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"rfork_planner_{name}", what, labels, registry=self.registry)


def _end_of(certificate: Path) -> float:
    try:
        return not_after(certificate)
    except (OSError, ValueError):
        return 0.0


def _fallback_reason(reasons: Sequence[str]) -> str:
    """Return the label for why a fork fell back; rollouts of new weights have a label of their own."""
    last = reasons[-1] if reasons else ""
    return FIRST_OF_VERSION if weights_version.is_first(last) else _error_type(last)


def _error_type(reason: str) -> str:
    """Return the error class at the start of a reason (`SourceTimeout: …`); `other` if it is not one of
    rfork's.
    """
    error_type = reason.partition(":")[0].strip()
    return error_type if error_type in ERROR_TYPES else "other"
