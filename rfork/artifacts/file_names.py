"""Rules for the names of files in an image of artifacts. Runs on the source and on the target."""

from __future__ import annotations

from typing import Final

from rfork.artifacts.cache_types import CacheType

MAX_PATH_CHARS: Final = 1024
MAX_COMPONENT_BYTES: Final = 255
METADATA_TENSOR: Final = "rfork.artifacts"
"""Name of the metadata tensor. It cannot be the name of a file, because those contain a slash."""


def path_problem(path: str, cache_type: CacheType) -> str | None:
    """Return why a relative path is not allowed for a file of this cache type, or None.

    Both sides apply the same check: the source skips such a file, the target rejects the complete image.
    """
    if not path or len(path) > MAX_PATH_CHARS:
        return "the path is empty or too long"
    if not path.isprintable() or "\\" in path:
        return "the path has characters that no cache uses"
    for component in path.split("/"):
        if component in ("", ".", ".."):
            return "it is not a plain relative path"
        if len(component.encode()) > MAX_COMPONENT_BYTES:
            return "a path component is too long"
        if cache_type.excludes(component):
            return f"{component!r} is a lock, a log or a temporary file"
    return None
