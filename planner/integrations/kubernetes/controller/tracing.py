"""Span names and attributes of the controller's actions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from planner.integrations.kubernetes.cluster import ObjectRef, ObservedPod
from planner.integrations.kubernetes.controller.pending_replicas import PendingScaleUp
from rfork.tracing import Value

SPAN_NAMES: Final[Mapping[str, str]] = {
    "announce": "announce scale-up",
    "withdraw": "withdraw scale-up",
    "remove": "remove instance",
    "annotate": "annotate pod",
    "condition": "set pod condition",
    "event": "write event",
}
"""Span name of each action type."""
RESOURCE_NAMES: Final[Mapping[str, str]] = {
    "Deployment": "deployment",
    "StatefulSet": "statefulset",
    "Pod": "pod",
}
"""Kinds for which OpenTelemetry has name attributes."""

SpanAttributes = Mapping[str, Value]
"""Attributes of a span."""


def object_attributes(subject: ObjectRef) -> SpanAttributes:
    """Attributes of any object."""
    attributes = {"namespace": subject.namespace, "object": f"{subject.kind}/{subject.name}"}
    if subject.kind in RESOURCE_NAMES:
        attributes[RESOURCE_NAMES[subject.kind]] = subject.name
    return attributes | ({"pod_uid": subject.uid} if subject.kind == "Pod" else {})


def pod_attributes(pod: ObservedPod) -> SpanAttributes:
    """Attributes of a Pod."""
    return object_attributes(pod.ref)


def scaleup_attributes(pending: PendingScaleUp) -> SpanAttributes:
    """Attributes of expected replicas."""
    scaleup = pending.scaleup
    return {
        **object_attributes(pending.workload_ref),
        "scaleup": scaleup.scaleup_id,
        "model": scaleup.model,
        "replicas": scaleup.replicas,
    }
