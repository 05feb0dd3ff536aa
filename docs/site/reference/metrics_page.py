"""Metrics: what planner and hooks expose, read from their own registries."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from docs.site.reference.markdown import anchor_of, heading, sentence, table, whole
from planner.hooks.fleet import Fleet
from planner.hooks.keda.load import Asks, Load
from planner.hooks.keda.scaler import Scaler
from planner.hooks.kubernetes.admission import admission_app
from planner.hooks.kubernetes.controller.metrics import Metrics as ControllerMetrics
from planner.hooks.kubernetes.showing import LiveContext, Watch
from planner.hooks.kubernetes.topology import Topology
from planner.hooks.probes import HookMetrics, Status
from planner.leases import Clock
from planner.metrics import Metrics as PlannerMetrics
from rfork.settings import HookSettings

UNITS = (("_seconds", "seconds"), ("_bytes", "bytes"), ("_efficiency", "share, 0 to 1"))


@dataclass(frozen=True)
class Metric:
    """One metric as the page tells it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def registries() -> Mapping[str, CollectorRegistry]:
    """What each process registers, by who it is."""
    return {
        "Planner": PlannerMetrics().registry,
        "Every hook": _hooks(),
        "Webhook": _webhook(),
        "Controller": _controller(),
        "Scaler": _scaler(),
    }


def metrics(registry: CollectorRegistry) -> Iterator[Metric]:
    """All that are rfork's own, in the order of registration."""
    labels = {
        collector._name: tuple(collector._labelnames)
        for collector in registry._collector_to_names
        if isinstance(collector, MetricWrapperBase)
    }
    for family in registry.collect():
        if family.name.startswith("rfork_"):
            told = labels.get(family.name) or tuple(getattr(family, "_labelnames", ()))
            ending = "_total" if family.type == "counter" else ""
            yield Metric(family.name + ending, family.type, told, family.documentation)


def page() -> str:
    """A table for each process."""
    parts = []
    for who, registry in registries().items():
        parts.append(heading(2, who, anchor_of(who)))
        rows = (
            [
                whole(each.name, anchor_of(each.name)),
                each.kind,
                " ".join(map(whole, each.labels)),
                _unit(each.name),
                sentence(each.text),
            ]
            for each in metrics(registry)
        )
        parts.append(table(["metric", "type", "labels", "unit", "what it counts"], rows))
    return "\n".join(parts)


def _unit(metric: str) -> str:
    return next((unit for end, unit in UNITS if metric.removesuffix("_total").endswith(end)), "")


def _hooks() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(HookMetrics(lambda: (Status("webhook"),)))
    return registry


def _webhook() -> CollectorRegistry:
    status, settings = Status("webhook"), HookSettings()
    admission_app(settings, "http://planner:8700", Topology(settings), status.registry)
    Watch(LiveContext(), status, Clock())
    return status.registry


def _controller() -> CollectorRegistry:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    return registry


def _scaler() -> CollectorRegistry:
    # Nobody is asked: only what they register is looked at.
    status, nobody = Status("scaler"), cast(Fleet, None)
    Scaler(Load(nobody, cast(Asks, None), time.monotonic, status.registry), status)
    return status.registry
