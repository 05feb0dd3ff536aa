"""The rfork command in a container that has rfork as files only; started by the script `rfork`.

In this process rfork's dependencies precede the image's, which may be too old. Child processes (`rfork
launch`) are not affected: only `sys.path` changes.
"""

from __future__ import annotations

import sys
from pathlib import Path

FILES = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the command."""
    # Python put this file's directory first, where `rfork` would be this file.
    sys.path[:] = [each for each in sys.path if Path(each).resolve() != FILES / "bin"]
    dependencies = FILES / "deps" / f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if not dependencies.is_dir():
        supported = ", ".join(sorted(each.name for each in (FILES / "deps").iterdir()))
        sys.exit(f"rfork: its files in {FILES} are for {supported}, and this Python is {dependencies.name}")
    sys.path[:0] = [str(FILES / "path"), str(dependencies)]
    from rfork.cli.app import main as run

    sys.argv[0] = "rfork"
    run()


main()
