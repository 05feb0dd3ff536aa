"""What the spans of the controller's actions say they are about. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from planner.integrations.kubernetes.cluster import ObjectRef, ObservedPod
from planner.integrations.kubernetes.controller.pending_replicas import PendingScaleUp
from rfork.tracing import Value

NAMES: Final[Mapping[str, str]] = {
    "announce": "announce scale-up",
    "withdraw": "withdraw scale-up",
    "remove": "remove instance",
    "annotate": "annotate pod",
    "condition": "set pod condition",
    "event": "write event",
}
"""The span of each kind of action."""
RESOURCE_NAMES: Final[Mapping[str, str]] = {
    "Deployment": "deployment",
    "StatefulSet": "statefulset",
    "Pod": "pod",
}
"""Kinds of objects whose names OpenTelemetry has attributes for."""

SpanAttributes = Mapping[str, Value]
"""Attributes of a span."""


def object_attributes(subject: ObjectRef) -> SpanAttributes:
    """An object, whatever its kind."""
    attributes = {"namespace": subject.namespace, "object": f"{subject.kind}/{subject.name}"}
    if subject.kind in RESOURCE_NAMES:
        attributes[RESOURCE_NAMES[subject.kind]] = subject.name
    return attributes | ({"pod_uid": subject.uid} if subject.kind == "Pod" else {})


def pod_attributes(pod: ObservedPod) -> SpanAttributes:
    """A Pod."""
    return object_attributes(pod.ref)


def scaleup_attributes(pending: PendingScaleUp) -> SpanAttributes:
    """Replicas that are waited for."""
    scaleup = pending.scaleup
    return {
        **object_attributes(pending.workload_ref),
        "scaleup": scaleup.scaleup_id,
        "model": scaleup.model,
        "replicas": scaleup.replicas,
    }
