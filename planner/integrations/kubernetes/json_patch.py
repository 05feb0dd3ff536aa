"""Computes the JSON Patch between two documents. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

from planner.integrations.kubernetes.manifests import Document


def json_patch(before: Document, after: Document | None) -> str | None:
    """Return the JSON Patch (RFC 6902) between two documents in base64. None if they are equal."""
    if after is None or after == before:
        return None
    return base64.b64encode(json.dumps([*_diff(before, after)]).encode("ascii")).decode("ascii")


def _diff(before: object, after: object, at: str = "") -> Iterator[Document]:
    """Yield the operations from one value to another. Optimized for additions; moves are not detected.

    A general differ (jsonpatch) takes milliseconds per Pod, which delays the next review. Numbers and
    booleans that Python considers equal are left alone: `inject` changes no such value.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() - after.keys():
            yield {"op": "remove", "path": f"{at}/{_escaped(key)}"}
        for key, value in after.items():
            if key not in before:
                yield {"op": "add", "path": f"{at}/{_escaped(key)}", "value": value}
            elif before[key] != value:
                yield from _diff(before[key], value, f"{at}/{_escaped(key)}")
    elif isinstance(before, list) and isinstance(after, list) and 0 < len(before) <= len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            if old != new:
                yield from _diff(old, new, f"{at}/{index}")
        for value in after[len(before) :]:
            yield {"op": "add", "path": f"{at}/-", "value": value}
    else:
        yield {"op": "replace", "path": at, "value": after}


def _escaped(key: str) -> str:
    """Escape a part of a JSON Pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
