"""Pods after the webhook, and what to look for in them."""

from __future__ import annotations

from typing import Any

from planner.integrations.kubernetes.inject import inject
from planner.integrations.kubernetes.pod_request import InjectionRequest, parse_request
from rfork.settings import KubernetesSettings
from tests.unit.planner.integrations.kubernetes.pod_documents import PLANNER, Document, webhook_settings


def injected_pod(document: Document, **options: object) -> Document:
    """The Pod after the webhook, which has nothing to say."""
    patched, notes = inject_pod(document, webhook_settings(**options))
    assert () == notes
    return patched


def inject_pod(
    document: Document, settings: KubernetesSettings, *, led: bool = True
) -> tuple[Document, tuple[str, ...]]:
    """The Pod after the webhook, and its notes; a controller leads unless told otherwise."""
    request = parse_request(document)
    assert isinstance(request, InjectionRequest), request
    return inject(document, request, settings, PLANNER, has_leader=led)


def engine_container(document: Document) -> Document:
    """The container of the name that `container` gives."""
    request: Document = next(each for each in document["spec"]["containers"] if each["name"] == "engine")
    return request


def engine_env(document: Document) -> dict[str, Any]:
    """Its variables: the value, or where it comes from."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in engine_container(document)["env"]}


def field_ref(path: str) -> Document:
    """Where a variable comes from, of the Pod."""
    return {"fieldRef": {"fieldPath": path}}
