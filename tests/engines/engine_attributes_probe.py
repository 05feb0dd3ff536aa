"""Finds attributes that an engine's classes lack. Runs in the engine's Python, without starting a server.

Input: a JSON list of ``[[class path, …], attribute]``. Output: one line ``RESULT`` with the pairs of which no
class has the attribute.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys


def has_attribute(owner: object, name: str) -> bool:
    """Return True if a class (or module) defines the name, declares it, or sets it on its instances."""
    if hasattr(owner, name):
        return True
    assigned = re.compile(rf"\bself\.{name}\b[^=\n]*=[^=]")
    return any(
        name in getattr(base, "__annotations__", {}) or assigned.search(_source(base))
        for base in (inspect.getmro(owner) if isinstance(owner, type) else [owner])
    )


def _source(owner: object) -> str:
    try:
        return inspect.getsource(owner)  # type: ignore[arg-type]
    except (OSError, TypeError):  # built-in or generated
        return ""


if __name__ == "__main__":
    used = json.loads(sys.stdin.read())
    classes = {path: pkgutil.resolve_name(path) for paths, _ in used for path in paths}
    missing = [[paths, name] for paths, name in used if not any(has_attribute(classes[path], name) for path in paths)]
    print("RESULT " + json.dumps(missing))
