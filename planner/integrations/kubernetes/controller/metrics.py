"""Prometheus metrics of the controller."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

RECONCILE_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ACTIONS: Final = ("announce", "withdraw", "remove", "annotate", "condition", "event")


class ControllerMetrics:
    """The controller's metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leader = Gauge("rfork_controller_leader", "1 if this replica is the leader", registry=registry)
        self.planner_down = Gauge(
            "rfork_controller_planner_unavailable", "1 if the planner does not respond", registry=registry
        )
        self.pods = Gauge("rfork_controller_pods", "Watched Pods", registry=registry)
        self.pending_replicas = Gauge(
            "rfork_controller_pending_replicas", "Replicas that are expected to fork", registry=registry
        )
        self.mixed_versions = Gauge(
            "rfork_controller_mixed_versions",
            "Workloads whose Pods have had several versions of a model for more than an hour",
            registry=registry,
        )
        self.actions = Counter(
            "rfork_controller_actions", "Completed actions: scale-ups announced, Events written, …", ("action",),
            registry=registry,
        )  # fmt: skip
        self.failures = Counter(
            "rfork_controller_failed_actions", "Failed actions, which are retried", ("action",),
            registry=registry,
        )  # fmt: skip
        self.decide_seconds = Histogram(
            "rfork_controller_decide_seconds", "Time to decide the actions", buckets=RECONCILE_S,
            registry=registry,
        )  # fmt: skip
        self.reconcile_seconds = Histogram(
            "rfork_controller_reconcile_seconds", "Time to decide and run the actions", buckets=RECONCILE_S,
            registry=registry,
        )  # fmt: skip
        for action in ACTIONS:
            self.actions.labels(action)
            self.failures.labels(action)
