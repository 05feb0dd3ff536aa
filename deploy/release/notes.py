"""Prints the section of a version in CHANGELOG.md. Needs only Python.

    python -m deploy.release.notes VERSION [REPOSITORY]

With the repository's https address, relative links are replaced.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from deploy.release import links

CHANGELOG: Final = Path(__file__).parents[2] / "CHANGELOG.md"


def notes(changelog: str, version: str) -> str:
    """Return the section of that version. Raises KeyError if there is none."""
    parts = re.split(r"^## \[([^\]]+)\].*$", changelog, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    return re.split(r"^\[[^\]]+\]: ", sections[version], maxsplit=1, flags=re.MULTILINE)[0].strip()


def main() -> int:
    """Run the command."""
    try:
        version, repository = (*sys.argv[1:], "")[:2]
        release_notes = notes(CHANGELOG.read_text(), version)
        print(
            links.absolute(release_notes, CHANGELOG.parent, repository, f"v{version}") if repository else release_notes
        )
    except (KeyError, ValueError):
        print(f"error: {CHANGELOG.name} has no section {' '.join(sys.argv[1:])}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
