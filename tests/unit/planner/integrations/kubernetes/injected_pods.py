"""Pods after injection, and accessors for their parts."""

from __future__ import annotations

from typing import Any

from planner.integrations.kubernetes.inject import inject
from planner.integrations.kubernetes.pod_request import InjectionRequest, parse_request
from rfork.errors import SettingsError
from rfork.settings import KubernetesSettings
from tests.unit.planner.integrations.kubernetes.pod_documents import PLANNER, Document, webhook_settings


def request_of(document: Document) -> InjectionRequest | None:
    """Return the Pod's request, or None if there is none that can be fulfilled."""
    try:
        return parse_request(document)
    except SettingsError:
        return None


def injected_pod(document: Document, **options: object) -> Document:
    """Return the Pod after injection without notes."""
    patched, notes = inject_pod(document, webhook_settings(**options))
    assert () == notes
    return patched


def inject_pod(
    document: Document, settings: KubernetesSettings, *, led: bool = True
) -> tuple[Document, tuple[str, ...]]:
    """Return the Pod after injection, and the notes. By default a controller leads."""
    request = parse_request(document)
    assert isinstance(request, InjectionRequest), request
    return inject(document, request, settings, PLANNER, has_leader=led)


def engine_container(document: Document) -> Document:
    """Return the container named as `container` names it."""
    request: Document = next(each for each in document["spec"]["containers"] if each["name"] == "engine")
    return request


def engine_env(document: Document) -> dict[str, Any]:
    """Return its variables: values or sources."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in engine_container(document)["env"]}


def field_ref(path: str) -> Document:
    """Return the source of a variable from a Pod's field."""
    return {"fieldRef": {"fieldPath": path}}
