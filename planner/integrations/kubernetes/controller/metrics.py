"""What the controller tells Prometheus, in the registry of its hook."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

RECONCILE_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ACTIONS: Final = ("announce", "withdraw", "remove", "annotate", "condition", "event")


class ControllerMetrics:
    """The controller's metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leader = Gauge("rfork_controller_leader", "Whether this replica acts", registry=registry)
        self.planner_down = Gauge(
            "rfork_controller_planner_away", "Whether the planner does not answer", registry=registry
        )
        self.pods = Gauge("rfork_controller_pods", "Pods that are watched", registry=registry)
        self.pending_replicas = Gauge(
            "rfork_controller_coming_replicas", "Replicas that are waited for", registry=registry
        )
        self.mixed_versions = Gauge(
            "rfork_controller_mixed_versions",
            "Workloads whose Pods have had several versions of a model for longer than RFORK_K8S_VERSIONS_S",
            registry=registry,
        )
        self.actions = Counter(
            "rfork_controller_actions", "What was done: scale-ups announced, Events told, …", ("action",),
            registry=registry,
        )  # fmt: skip
        self.failures = Counter(
            "rfork_controller_failed_actions", "What could not be done, and is tried again", ("action",),
            registry=registry,
        )  # fmt: skip
        self.decide_seconds = Histogram(
            "rfork_controller_decide_seconds", "Time to decide what is to be done", buckets=RECONCILE_S,
            registry=registry,
        )  # fmt: skip
        self.reconcile_seconds = Histogram(
            "rfork_controller_reconcile_seconds", "Time to decide it and to do it", buckets=RECONCILE_S,
            registry=registry,
        )  # fmt: skip
        for action in ACTIONS:
            self.actions.labels(action)
            self.failures.labels(action)
