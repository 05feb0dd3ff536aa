"""Triton's groups: the one file in its cache that holds absolute paths, made to fit where it is put.

``__grp__NAME.json`` is ``{"child_paths": {FILE: PATH}}`` (`triton/runtime/cache.py`); all files of a group
lie beside it. Triton leaves out paths that do not exist, takes the group for a hit where that of the metadata
is left, and fails on the binary that is not: so a group only travels, and is only taken, with all its
files. On its way it holds each file's bare name.
Runs on both sides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from pydantic import JsonValue, TypeAdapter, ValidationError

PREFIX, SUFFIX, CHILDREN = "__grp__", ".json", "child_paths"
MAX_GROUP_BYTES: Final = 1 << 20
_group: Final[TypeAdapter[dict[str, JsonValue]]] = TypeAdapter(dict[str, JsonValue])


def is_group(name: str) -> bool:
    """Whether a file of this name (without folders) is a group, so put in place after what it refers to."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def to_portable(path: Path, content: bytes) -> bytes:
    """The group at `path` as it travels; other content as it is. Runs on the source."""
    parsed_group = _parsed(path.name, content)
    if parsed_group is None:
        return content
    group, children = parsed_group
    # Named by another spelling of the same folder (a link, a mount) it is the same file all the same.
    in_same_folder = all(
        os.path.basename(child) == name and os.path.basename(os.path.dirname(child)) in ("", path.parent.name)
        for name, child in children.items()
    )
    if not in_same_folder:
        return content
    return json.dumps({**group, CHILDREN: {name: name for name in children}}).encode()


def to_local(path: Path, content: bytes) -> bytes:
    """The group as it must be to lie at `path`; other content as it is. Runs on the target."""
    parsed_group = _parsed(path.name, content)
    if parsed_group is None:
        return content
    group, children = parsed_group
    if any(child != name for name, child in children.items()):
        return content
    return json.dumps({**group, CHILDREN: {name: str(path.parent / name) for name in children}}).encode()


def missing_file(path: Path, content: bytes, there: Collection[str]) -> str | None:
    """A file of the group at `path` that is not among the names `there` beside it, if any. On both sides."""
    parsed_group = _parsed(path.name, content)
    return min((child for child in parsed_group[1] if child not in there), default=None) if parsed_group else None


def _parsed(name: str, content: bytes) -> tuple[dict[str, JsonValue], dict[str, str]] | None:
    """A group and its children, or None where it is none."""
    if not is_group(name) or len(content) > MAX_GROUP_BYTES:
        return None
    try:
        group = _group.validate_json(content)
    except ValidationError:
        return None
    children = group.get(CHILDREN)
    if not isinstance(children, dict):
        return None
    found = {child: path for child, path in children.items() if isinstance(path, str) and "/" not in child}
    return (group, found) if len(found) == len(children) else None
