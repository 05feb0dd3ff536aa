"""Build steps of Dockerfile: ``python -m deploy.docker.install STEP FOLDER``, run in the repository's root.

Each step is a list of pip arguments or a function, so that tests can run the same code on any machine. Needs
only Python with pip, and a package index.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deploy.docker import files
from deploy.docker.requirements import (
    CONSTRAINTS,
    PLANNER_EXTRAS,
    ROOT,
    build_requirements,
    requirements,
)

WHEELS: Final = "dist"
"""Directory of rfork's wheel in the image, for engine.Dockerfile."""
PLANNER: Final = "venv"
"""Directory of the planner's environment."""
FILES: Final = "files"
"""Directory of the files for engine containers."""
SOURCES: Final = ("pyproject.toml", "README.md", "LICENSE", "rfork", "planner")
"""Sources of rfork's wheel."""
STEPS: Final = ("wheel", "planner", "files")
"""In execution order."""


def pip(*arguments: str | Path) -> None:
    """Run this Python's pip. Raises CalledProcessError after pip has printed the reason."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    subprocess.run([sys.executable, "-m", "pip", *quiet, *map(str, arguments)], check=True)


def wheel(folder: Path) -> None:
    """Build rfork's wheel with the build backend pinned in constraints.txt."""
    with tempfile.TemporaryDirectory(prefix="rfork-wheel-") as output:
        sources, tools = Path(output, "sources"), Path(output, "tools")
        copy_sources(sources)
        venv.create(tools, with_pip=False)
        destination = ("--python", tools)
        pip(*destination, "install", "--no-cache-dir", "--constraint", CONSTRAINTS, *build_requirements())
        pip(
            *destination,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            folder / WHEELS,
            sources,
        )


def copy_sources(folder: Path) -> None:
    """Copy the sources of the wheel, because setuptools builds in place and reuses earlier builds."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)


def planner(folder: Path) -> None:
    """Create a virtual environment with the planner and its integrations, without torch, numpy and pip."""
    output = folder / PLANNER
    venv.create(output, with_pip=False, clear=True)
    destination = ("--python", output, "install", "--no-cache-dir")
    pip(*destination, "--only-binary", ":all:", "--constraint", CONSTRAINTS, *requirements(PLANNER_EXTRAS))
    pip(*destination, "--no-deps", "--no-index", built(folder))


def layer(folder: Path, pythons: Sequence[str]) -> None:
    """Build the files for engine containers: see `deploy.docker.files`."""
    files.build(folder / FILES, built(folder), pythons, files.by_pip(pip, CONSTRAINTS))


def built(folder: Path) -> Path:
    """Return the wheel built by `wheel`. Raises FileNotFoundError unless there is exactly one."""
    found = sorted((folder / WHEELS).glob("rfork-*.whl"))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder / WHEELS} contains {len(found)} wheels of rfork, expected one")
    return found[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(prog="python -m deploy.docker.install", description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("folder", type=Path, help="directory that becomes /opt/rfork")
    parser.add_argument(
        "--pythons", default=" ".join(files.PYTHONS), help="for `files`: Python versions, separated by spaces"
    )
    parsed = parser.parse_args(arguments)
    folder: Path = parsed.folder.resolve()
    if parsed.step == "wheel":
        wheel(folder)
    elif parsed.step == "planner":
        planner(folder)
    else:
        layer(folder, parsed.pythons.split())


if __name__ == "__main__":
    main()
