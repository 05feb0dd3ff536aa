"""Rewrites links of a page that is shown outside its repository: on a package index, or with a release.

The repository does not know its own address; the release workflow passes it. Addresses have GitHub's form.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

LINK: Final = re.compile(r"```.*?^ *```|`[^`\n]*`|(?<=\]\()(?P<target>[^)\s]+)(?=\))", re.DOTALL | re.MULTILINE)
"""Code, which is left alone, or the target of a link or an image."""
PICTURES: Final = frozenset({".svg", ".png"})


def relative(page: str) -> list[str]:
    """Return the targets of a page's links to files in the repository."""
    return [found["target"] for found in LINK.finditer(page) if found["target"] and _is_relative(found["target"])]


def absolute(page: str, root: Path, repository: str, version: str) -> str:
    """Return the page with these links as addresses of that tag of the repository, whose files are in `root`."""

    def address(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or not _is_relative(target):
            return found[0]
        path = target.partition("#")[0]
        view = "raw" if Path(path).suffix in PICTURES else "tree" if (root / path).is_dir() else "blob"
        return f"{repository.rstrip('/')}/{view}/{version}/{target}"

    return LINK.sub(address, page)


def _is_relative(target: str) -> bool:
    return re.match(r"[a-z]+:|#|//", target) is None
