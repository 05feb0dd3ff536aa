"""What the planner tells Prometheus. Every label has few values, whatever callers send."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from planner.store.records import ForkRecord, InstanceRecord
from rfork import errors
from rfork.wire import ForkFinish, InstanceState, SourceFault, SourceKind

ERROR_KINDS: Final = frozenset(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.RforkError)
)
SOURCE_KINDS: Final[tuple[str, ...]] = get_args(SourceKind)
BUCKETS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class Metrics:
    """The planner's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._instances = Gauge(
            "rfork_planner_instances", "Instances known", ["state"], registry=self.registry
        )
        self._leases = Gauge(
            "rfork_planner_active_leases", "Routes of the forks under way", registry=self.registry
        )
        self._forks = Counter("rfork_planner_forks", "Forks that ended", ["outcome"], registry=self.registry)
        self._fallbacks = Counter(
            "rfork_planner_fallbacks",
            "Forks that loaded otherwise: what, and the last error before",
            ["fallback", "reason"],
            registry=self.registry,
        )
        self._faults = Counter(
            "rfork_planner_source_faults",
            "Faults that targets reported",
            ["fault", "error"],
            registry=self.registry,
        )
        self._quarantines = Counter(
            "rfork_planner_quarantines", "Sources put into quarantine", registry=self.registry
        )
        self._bytes = Counter(
            "rfork_planner_verified_bytes",
            "Bytes verified by forks that ended",
            ["source"],
            registry=self.registry,
        )
        self.plan_seconds = Histogram(
            "rfork_planner_plan_seconds", "Time to make one plan", buckets=BUCKETS, registry=self.registry
        )

    def fault(self, fault: SourceFault) -> None:
        """A target reported a source."""
        self._faults.labels(fault.fault, _error_kind(fault.error)).inc()

    def quarantined(self) -> None:
        """A source went into quarantine."""
        self._quarantines.inc()

    def ended(self, finish: ForkFinish) -> None:
        """A fork ended."""
        self._forks.labels(finish.outcome).inc()
        for source, verified_bytes in finish.sources.items():
            self._bytes.labels(_source_kind(source)).inc(verified_bytes)
        if finish.outcome == "fallback":
            fallback = _source_kind(finish.fallback) if finish.fallback else "loader"
            self._fallbacks.labels(fallback, _error_kind(finish.reasons[-1] if finish.reasons else "")).inc()

    def exposition(self, instances: Iterable[InstanceRecord], live: Iterable[ForkRecord]) -> bytes:
        """All metrics in Prometheus' text format."""
        states = [record.source.state for record in instances]
        for state in get_args(InstanceState):
            self._instances.labels(state).set(states.count(state))
        self._leases.set(sum(len(fork.sources) for fork in live))
        return generate_latest(self.registry)


def _error_kind(reason: str) -> str:
    """The error class that a reason (`SourceStalled: …`) begins with; `other` where it is none of ours."""
    kind = reason.partition(":")[0].strip()
    return kind if kind in ERROR_KINDS else "other"


def _source_kind(source: str) -> str:
    """The kind that a source's name (`checkpoint:…`) begins with; all other names are peers'."""
    kind = source.partition(":")[0]
    return kind if kind in SOURCE_KINDS else "peer"
