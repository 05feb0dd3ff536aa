"""Names of files in an image of artifacts: which are allowed, and the paths they stand for. Runs on both sides."""

from __future__ import annotations

from typing import Final

from rfork.artifacts.cache_types import CacheType

MAX_COMPONENT: Final = 255
MAX_NAME: Final = 1024
META: Final = "rfork.artifacts"
"""Name of the metadata tensor. Names of files always contain a slash."""


def name_problem(path: str, cache_type: CacheType) -> str | None:
    """Return why a relative path is not allowed for a file of this cache type, or None.

    Both sides apply the same check: the source skips such a file, the target rejects the complete image.
    """
    if not path or len(path) > MAX_NAME:
        return "the path is empty or too long"
    if not path.isprintable() or "\\" in path:
        return "the path has characters that no cache uses"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "it is not a plain relative path"
        if len(part.encode()) > MAX_COMPONENT:
            return "a path component is too long"
        if cache_type.excludes(part):
            return f"{part!r} is a lock, a log or a temporary file"
    return None
