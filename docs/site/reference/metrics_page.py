"""Metrics reference: metrics of the planner and its integrations, read from their registries."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from docs.site.reference.markdown import anchor_of, heading, nowrap_code, sentence, table
from planner.clock import Clock
from planner.integrations.health import IntegrationMetrics, IntegrationStatus
from planner.integrations.keda.metric_source import EngineClient, MetricSource
from planner.integrations.keda.scaler import Scaler
from planner.integrations.kubernetes.certificates import ServingCertificate
from planner.integrations.kubernetes.controller.actions import ControllerMetrics as ControllerMetrics
from planner.integrations.kubernetes.webhook import NodeTopology, admission_app
from planner.integrations.planner_api import PlannerApi
from planner.metrics import Metrics as PlannerMetrics
from rfork.settings import KubernetesSettings

UNITS = (("_seconds", "seconds"), ("_bytes", "bytes"), ("_efficiency", "share, 0 to 1"))


@dataclass(frozen=True)
class Metric:
    """One metric of the page."""

    name: str
    metric_type: str
    labels: tuple[str, ...]
    text: str


def registries() -> Mapping[str, CollectorRegistry]:
    """Return the registry of each process, by the name of the process."""
    return {
        "Planner": PlannerMetrics().registry,
        "Every integration": _integrations(),
        "Webhook": _webhook(),
        "Controller": _controller(),
        "Scaler": _scaler(),
    }


def metrics(registry: CollectorRegistry) -> Iterator[Metric]:
    """Return all metrics of rfork, in the order of registration."""
    labels = {
        collector._name: tuple(collector._labelnames)
        for collector in registry._collector_to_names
        if isinstance(collector, MetricWrapperBase)
    }
    for family in registry.collect():
        if family.name.startswith("rfork_"):
            label_names = labels.get(family.name) or tuple(getattr(family, "_labelnames", ()))
            ending = "_total" if family.type == "counter" else ""
            yield Metric(family.name + ending, family.type, label_names, family.documentation)


def page() -> str:
    """Render a table for each process."""
    parts = []
    for component, registry in registries().items():
        parts.append(heading(2, component, anchor_of(component)))
        rows = (
            [
                nowrap_code(each.name, anchor_of(each.name)),
                each.metric_type,
                " ".join(map(nowrap_code, each.labels)),
                _unit(each.name),
                sentence(each.text),
            ]
            for each in metrics(registry)
        )
        parts.append(table(["metric", "type", "labels", "unit", "description"], rows))
    return "\n".join(parts)


def _unit(metric: str) -> str:
    return next((unit for end, unit in UNITS if metric.removesuffix("_total").endswith(end)), "")


def _integrations() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(IntegrationMetrics(lambda: (IntegrationStatus("webhook"),)))
    return registry


def _webhook() -> CollectorRegistry:
    status, settings = IntegrationStatus("webhook"), KubernetesSettings()
    admission_app(settings, "http://planner:8700", NodeTopology(settings), status.registry)
    ServingCertificate(status, Clock())
    return status.registry


def _controller() -> CollectorRegistry:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    return registry


def _scaler() -> CollectorRegistry:
    # No planner is contacted: only the registered metrics are read.
    status, no_planner = IntegrationStatus("scaler"), cast(PlannerApi, None)
    Scaler(MetricSource(no_planner, cast(EngineClient, None), time.monotonic, status.registry), status)
    return status.registry
