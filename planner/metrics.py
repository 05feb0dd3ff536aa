"""What the planner tells Prometheus. Every label has few values, whatever callers send."""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
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

from planner.fork_stats import Origin, origin_of
from planner.store.records import ForkRecord, InstanceRecord
from rfork import errors, weights_version
from rfork.schema import ForkResult, SourceFault, source_kind
from rfork.schema.types import GPU_KERNEL_TRANSPORTS, InstanceState, Outcome, SourceKind, StorageKind
from rfork.settings import TransportName
from rfork.tls_expiry import not_after

FAULT_OF: Final = {
    name: error_class.fault
    for name, error_class in vars(errors).items()
    if isinstance(error_class, type) and issubclass(error_class, errors.RforkError)
}
"""Whose fault each error of ours is."""
ERROR_TYPES: Final = frozenset(FAULT_OF)
REFUSALS: Final = (
    "unauthorized", "forbidden", "too-many-requests", "body-too-large", "request-timeout", "other",
)  # fmt: skip
"""Problems (the last part of their type) that whoever guards the routes answers with."""
PLAN_SECONDS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
FORK_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
PHASES: Final = ("capture", "offer", "plan", "transfer", "resume", "fallback", "digest", "other")
FIRST_OF_VERSION: Final = "FirstOfVersion"
"""Reason of a fallback that a change of version explains: other versions are served, and not this one."""
VersionChoice = Literal["served", "several", "conflict"]
"""How the planner settled the version of a target: one that is served, for a target that has none; none, as
several are served; none, as another rank of the replica has another version."""
BATCH_SIZE_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
EFFICIENCY: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
TRANSPORTS: Final = (*get_args(TransportName), "other")
MAX_BYTES: Final = 1 << 60
"""What one source of one fork can be told to have given; a counter must not overflow for one caller."""


class Metrics:
    """The planner's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._instances = self._gauge("instances", "Instances known", "state")
        self._live = self._gauge("live_forks", "Forks under way: with a plan, or without one", "state")
        self._leases = self._gauge("active_leases", "Routes of the forks under way")
        self._readers = self._gauge("storage_readers", "Forks under way elected to read storage", "kind")
        self._orphaned = self._gauge(
            "orphaned_groups", "Ranks of models with instances, but no seed any more, though there was one"
        )
        self._mixed = self._gauge(
            "mixed_models", "Models of which instances serve more than one version, updates in place aside"
        )
        self._versions = self._counter(
            "version_choices",
            "Forks whose version the planner chose (served), or refused to choose (several, conflict)",
            "choice",
        )
        self._forks = self._counter(
            "forks", "Forks that ended; lost: given up, and counted again if they end after all", "outcome"
        )
        self._fallbacks = self._counter(
            "fallbacks",
            "Forks that loaded otherwise: what, and the last error before, or FirstOfVersion",
            "fallback",
            "reason",
        )
        self._faults = self._counter("source_faults", "Faults that targets reported", "fault", "error")
        self._quarantines = self._counter("quarantines", "Sources put into quarantine")
        self._bytes = self._counter(
            "verified_bytes", "Bytes verified by forks that ended: from peers, or what storage gave", "source"
        )
        self._routes = self._counter("routes", "Routes planned, by the transport that is tried first", "transport")
        self._kernels = self._counter("kernel_routes", "Routes planned that run kernels on the source's GPU")
        self._scaleups = self._gauge("scaleups", "Scale-ups under way that were announced")
        self._expected = self._gauge("expected_replicas", "Replicas that they expect and that have not come")
        self._scaling: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._scaleup_batches = self._counter(
            "gathered_batches", "Batches of scale-ups: whether nobody was missing at their end", "whole"
        )
        self._refused = self._counter("refused_requests", "Requests that met no route", "reason")
        self._conflicts = self._counter("store_conflicts", "Changes made anew because another replica was quicker")
        self._unavailable = self._counter("store_unavailable", "Changes that the store did not take")
        self.plan_seconds = Histogram(
            "rfork_planner_plan_seconds",
            "Time to make one plan",
            buckets=PLAN_SECONDS,
            registry=self.registry,
        )
        self._batch_sizes = Histogram(
            "rfork_planner_plan_forks",
            "Forks planned together",
            buckets=BATCH_SIZE_BUCKETS,
            registry=self.registry,
        )
        self._seconds = Histogram(
            "rfork_planner_fork_seconds",
            "Time of forks that ended, waits included, by outcome and where what they read came from",
            ("outcome", "origin"),
            buckets=FORK_SECONDS,
            registry=self.registry,
        )
        self._phases = Histogram(
            "rfork_planner_fork_phase_seconds",
            "Time of forks that ended, by phase",
            ("phase",),
            buckets=FORK_SECONDS,
            registry=self.registry,
        )
        self._seconds_saved = self._counter(
            "saved_seconds", "Time by which forks from one another were quicker than storage"
        )
        self._abandoned = self._counter("lost_seconds", "Time by which forks from one another were slower")
        self._efficiency = Histogram(
            "rfork_planner_fork_efficiency",
            "Image bytes over the seconds of the transfer, against the fastest second's rate",
            buckets=EFFICIENCY,
            registry=self.registry,
        )
        self._certificate = self._gauge(
            "certificate_not_after_seconds",
            "When the planner's certificate ends, in seconds since the epoch; 0: it has none",
        )
        self._initialise_series()

    def planned(self, batch_size: int) -> None:
        """So many forks share one plan that was made."""
        self._batch_sizes.observe(batch_size)

    def track_scaleups(self, scaling: Callable[[], tuple[int, int]]) -> None:
        """Ask `scaling` for the scale-ups under way, and how many replicas they expect."""
        self._scaling = scaling

    def follow_certificate(self, certificate: Path) -> None:
        """Show when the planner's certificate ends, as its file says at each scrape; 0: it says nothing."""
        self._certificate.set_function(lambda: _end_of(certificate))

    def scaleup_batched(self, is_complete: bool) -> None:
        """A batch of a scale-up waits no longer."""
        self._scaleup_batches.labels("true" if is_complete else "false").inc()

    def route_planned(self, transports: Sequence[str]) -> None:
        """A fork is to read from a source that it did not read from before, over these, the first first."""
        first = transports[0] if transports else "other"
        self._routes.labels(first if first in TRANSPORTS else "other").inc()
        if first in GPU_KERNEL_TRANSPORTS:
            self._kernels.inc()

    def fault(self, fault: SourceFault) -> None:
        """A target reported a source."""
        self._faults.labels(fault.fault, _error_type(fault.error)).inc()

    def version_chosen(self, choice: VersionChoice) -> None:
        """A fork asked for the first time, and its version was not its target's own."""
        self._versions.labels(choice).inc()

    def quarantined(self) -> None:
        """A source went into quarantine."""
        self._quarantines.inc()

    def fork_abandoned(self) -> None:
        """A fork was given up: its target is silent, removed, or began another. It may yet end otherwise."""
        self._forks.labels("lost").inc()

    def ended(self, finish: ForkResult, seconds_saved: float | None = None) -> None:
        """A fork ended; `seconds_saved`: it took so much less than storage would have, if that is known."""
        self._forks.labels(finish.outcome).inc()
        self._seconds.labels(finish.outcome, origin_of(finish)).observe(finish.seconds)
        for phase, seconds in finish.phases.items():
            self._phases.labels(phase if phase in PHASES else "other").observe(seconds)
        if seconds_saved is not None:
            (self._seconds_saved if seconds_saved >= 0 else self._abandoned).inc(abs(seconds_saved))
        for source, verified_bytes in finish.sources.items():
            self._bytes.labels(source_kind(source)).inc(min(max(verified_bytes, 0), MAX_BYTES))
        if finish.outcome == "fallback":
            fallback = source_kind(finish.fallback) if finish.fallback else "loader"
            self._fallbacks.labels(fallback, _fallback_reason(finish.reasons)).inc()
        if finish.efficiency is not None and math.isfinite(finish.efficiency):
            self._efficiency.observe(finish.efficiency)

    def request_refused(self, slug: str) -> None:
        """A request was turned away before a route saw it; `slug` is the last part of the problem's type."""
        self._refused.labels(slug if slug in REFUSALS else "other").inc()

    def store_conflict(self) -> None:
        """Another replica changed a group first: its plan is made anew."""
        self._conflicts.inc()

    def store_unavailable(self) -> None:
        """The store did not take a change."""
        self._unavailable.inc()

    def exposition(
        self,
        instances: Iterable[InstanceRecord],
        live: Iterable[ForkRecord],
        orphaned: int = 0,
        mixed: int = 0,
    ) -> bytes:
        """All metrics in Prometheus' text format; the gauges are counted now, in one pass over each.

        `orphaned`: groups that have members, and nobody to read from any more. `mixed`: models of which more
        than one version is served.
        """
        # Not by `record.source`, which a heartbeat since the last plan has to build first.
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
        for storage_type in get_args(StorageKind):
            self._readers.labels(storage_type).set(readers[storage_type])
        self._leases.set(leases)
        self._orphaned.set(orphaned)
        self._mixed.set(mixed)
        scaleups, expected = self._scaling()
        self._scaleups.set(scaleups)
        self._expected.set(expected)
        return generate_latest(self.registry)

    def _initialise_series(self) -> None:
        """What has not happened yet is 0 rather than missing, so that the first time shows as a rise."""
        self._forks.labels("lost")
        for outcome in get_args(Outcome):
            self._forks.labels(outcome)
            for origin in get_args(Origin):
                self._seconds.labels(outcome, origin)
        for phase in PHASES:
            self._phases.labels(phase)
        for source_type in get_args(SourceKind):
            self._bytes.labels(source_type)
        for name in sorted(ERROR_TYPES):
            self._faults.labels(FAULT_OF[name], name)
        for reason in REFUSALS:
            self._refused.labels(reason)
        for transport in TRANSPORTS:
            self._routes.labels(transport)
        for is_complete in ("true", "false"):
            self._scaleup_batches.labels(is_complete)
        for source_type in get_args(StorageKind):
            self._fallbacks.labels(source_type, FIRST_OF_VERSION)
        for choice in get_args(VersionChoice):
            self._versions.labels(choice)

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
    """Return the label for why a fork fell back: a rollout of new weights is told from all else."""
    last = reasons[-1] if reasons else ""
    return FIRST_OF_VERSION if weights_version.is_first(last) else _error_type(last)


def _error_type(reason: str) -> str:
    """The error class that a reason (`SourceTimeout: …`) begins with; `other` where it is none of ours."""
    error_type = reason.partition(":")[0].strip()
    return error_type if error_type in ERROR_TYPES else "other"
