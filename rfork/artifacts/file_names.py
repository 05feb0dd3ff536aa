"""Names of files in an image of artifacts: which are taken, and the paths they mean. Runs on both sides."""

from __future__ import annotations

from typing import Final

from rfork.artifacts.cache_types import CacheType

MAX_COMPONENT: Final = 255
MAX_NAME: Final = 1024
META: Final = "rfork.artifacts"
"""The tensor that says what the others are; no file's name is without a slash."""


def name_problem(path: str, cache_type: CacheType) -> str | None:
    """Why a relative path is not one that a file of this kind may have, or None.

    The same on both sides: who gives leaves such a file out, who takes refuses all that comes with it.
    """
    if not path or len(path) > MAX_NAME:
        return "it is empty or too long"
    if not path.isprintable() or "\\" in path:
        return "it has characters that no cache uses"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "it is not a plain relative path"
        if len(part.encode()) > MAX_COMPONENT:
            return "a part of it is too long"
        if cache_type.excludes(part):
            return f"{part!r} is a lock, a log or a temporary file"
    return None
