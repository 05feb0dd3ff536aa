"""Converts Triton's group files, the only files of its cache with absolute paths, between machines.

``__grp__NAME.json`` is ``{"child_paths": {FILE: PATH}}`` (`triton/runtime/cache.py`). All files of a group
are in the same folder. Triton ignores paths that do not exist: if the metadata file is left, the group counts
as a hit, and loading the missing binary fails. So a group is copied and installed only with all of its files.
In the image it contains only file names. Runs on the source and on the target.
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
    """Return True for the file name of a group, which must be moved into place after its files."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def to_portable(path: Path, content: bytes) -> bytes:
    """Return the group at `path` with file names instead of paths; other content unchanged. Runs on the source."""
    parsed_group = _parsed(path.name, content)
    if parsed_group is None:
        return content
    group, children = parsed_group
    # The paths may spell the same folder differently (a link, a mount), so only base names are compared.
    in_same_folder = all(
        os.path.basename(child) == name and os.path.basename(os.path.dirname(child)) in ("", path.parent.name)
        for name, child in children.items()
    )
    if not in_same_folder:
        return content
    return json.dumps({**group, CHILDREN: {name: name for name in children}}).encode()


def to_local(path: Path, content: bytes) -> bytes:
    """Return the group with the paths it needs at `path`; other content unchanged. Runs on the target."""
    parsed_group = _parsed(path.name, content)
    if parsed_group is None:
        return content
    group, children = parsed_group
    if any(child != name for name, child in children.items()):
        return content
    return json.dumps({**group, CHILDREN: {name: str(path.parent / name) for name in children}}).encode()


def missing_file(path: Path, content: bytes, there: Collection[str]) -> str | None:
    """Return a file of the group at `path` that is missing from the names `there`, or None. Runs on both sides."""
    parsed_group = _parsed(path.name, content)
    return min((child for child in parsed_group[1] if child not in there), default=None) if parsed_group else None


def _parsed(name: str, content: bytes) -> tuple[dict[str, JsonValue], dict[str, str]] | None:
    """Return a group and its children, or None if the file is not a group."""
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
