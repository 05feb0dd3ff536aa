"""What the spans of the controller's actions say they are about. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from planner.hooks.kubernetes.cluster import ObjectRef, PodSeen
from planner.hooks.kubernetes.controller.coming import Coming
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
KINDS: Final[Mapping[str, str]] = {"Deployment": "deployment", "StatefulSet": "statefulset", "Pod": "pod"}
"""Kinds of objects whose names OpenTelemetry has attributes for."""

Told = Mapping[str, Value]
"""Attributes of a span."""


def of_object(about: ObjectRef) -> Told:
    """An object, whatever its kind."""
    told = {"namespace": about.namespace, "object": f"{about.kind}/{about.name}"}
    if about.kind in KINDS:
        told[KINDS[about.kind]] = about.name
    return told | ({"pod_uid": about.uid} if about.kind == "Pod" else {})


def of_pod(pod: PodSeen) -> Told:
    """A Pod."""
    return of_object(pod.ref)


def of_scaleup(one: Coming) -> Told:
    """Replicas that are waited for."""
    said = one.scaleup
    return {
        **of_object(one.about),
        "scaleup": said.scaleup_id,
        "model": said.model,
        "replicas": said.replicas,
    }
