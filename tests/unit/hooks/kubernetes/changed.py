"""Pods after the webhook, and what to look for in them."""

from __future__ import annotations

from typing import Any

from planner.hooks.kubernetes.mutate import mutated
from planner.hooks.kubernetes.pods import Wanted, wanted
from rfork.settings import HookSettings
from tests.unit.hooks.kubernetes.documents import PLANNER, Document, hook


def injected(document: Document, **options: object) -> Document:
    """The Pod after the webhook, which has nothing to say."""
    made, notes = change(document, hook(**options))
    assert () == notes
    return made


def change(
    document: Document, settings: HookSettings, *, led: bool = True
) -> tuple[Document, tuple[str, ...]]:
    """The Pod after the webhook, and its notes; a controller leads unless told otherwise."""
    found = wanted(document)
    assert isinstance(found, Wanted), found
    return mutated(document, found, settings, PLANNER, led=led)


def engine_of(document: Document) -> Document:
    """The container of the name that `container` gives."""
    found: Document = next(each for each in document["spec"]["containers"] if each["name"] == "engine")
    return found


def environment_of(document: Document) -> dict[str, Any]:
    """Its variables: the value, or where it comes from."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in engine_of(document)["env"]}


def field(path: str) -> Document:
    """Where a variable comes from, of the Pod."""
    return {"fieldRef": {"fieldPath": path}}
