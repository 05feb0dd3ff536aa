"""Converts Triton's group files, the only files of its cache with absolute paths, between machines.

``__grp__NAME.json`` is ``{"child_paths": {FILE: PATH}}`` (`triton/runtime/cache.py`). All files of a group
are in the same folder. Triton ignores paths that do not exist: if only the metadata file is left, the group
counts as a cache hit, and loading the missing binary fails. So a group is copied and installed only with all
of its files. In the image, a group contains file names instead of paths. Runs on the source and on the target.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from pydantic import JsonValue, TypeAdapter, ValidationError

PREFIX, SUFFIX = "__grp__", ".json"
CHILDREN: Final = "child_paths"
MAX_GROUP_BYTES: Final = 1 << 20
_JSON_OBJECT: Final[TypeAdapter[dict[str, JsonValue]]] = TypeAdapter(dict[str, JsonValue])


def is_group(name: str) -> bool:
    """Return True for the file name of a group, which must be moved into place after its files."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def to_portable(path: Path, content: bytes) -> bytes:
    """Return the group at `path` with file names instead of paths; other content unchanged. Runs on the source."""
    parsed = _parse(path.name, content)
    if parsed is None:
        return content
    group, children = parsed
    # The paths may spell the same folder differently (a link, a mount), so only base names are compared.
    in_same_folder = all(
        os.path.basename(child_path) == name and os.path.basename(os.path.dirname(child_path)) in ("", path.parent.name)
        for name, child_path in children.items()
    )
    if not in_same_folder:
        return content
    return json.dumps({**group, CHILDREN: {name: name for name in children}}).encode()


def to_local(path: Path, content: bytes) -> bytes:
    """Return the group with the paths it needs at `path`; other content unchanged. Runs on the target."""
    parsed = _parse(path.name, content)
    if parsed is None:
        return content
    group, children = parsed
    if any(child_path != name for name, child_path in children.items()):
        return content
    return json.dumps({**group, CHILDREN: {name: str(path.parent / name) for name in children}}).encode()


def missing_file(path: Path, content: bytes, siblings: Collection[str]) -> str | None:
    """Return the name of a file of the group at `path` that is not among its `siblings`, or None.

    Runs on the source and on the target.
    """
    parsed = _parse(path.name, content)
    if parsed is None:
        return None
    _, children = parsed
    return min((name for name in children if name not in siblings), default=None)


def _parse(name: str, content: bytes) -> tuple[dict[str, JsonValue], dict[str, str]] | None:
    """Return a group and the path of each of its files by name; None if the content is not a group."""
    if not is_group(name) or len(content) > MAX_GROUP_BYTES:
        return None
    try:
        group = _JSON_OBJECT.validate_json(content)
    except ValidationError:
        return None
    children = group.get(CHILDREN)
    if not isinstance(children, dict):
        return None
    child_paths = {child: path for child, path in children.items() if isinstance(path, str) and "/" not in child}
    return (group, child_paths) if len(child_paths) == len(children) else None
