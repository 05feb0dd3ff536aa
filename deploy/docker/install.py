"""The steps of Dockerfile: ``python -m deploy.docker.install STEP FOLDER``, from the repository's root.

Each step is a list of pip's arguments or a function, so that tests run the very same on any machine. Needs
nothing but Python with pip, and a package index.
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
"""Where in the image's folder rfork's wheel lies, for engine.Dockerfile."""
PLANNER: Final = "venv"
"""Where what the planner runs with lies."""
FILES: Final = "files"
"""Where what engines' containers get lies."""
SOURCES: Final = ("pyproject.toml", "README.md", "LICENSE", "rfork", "planner")
"""What rfork's wheel is built from."""
STEPS: Final = ("wheel", "planner", "files")
"""In this order."""


def pip(*arguments: str | Path) -> None:
    """Run this Python's pip. Raises CalledProcessError; pip has said why by then."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    subprocess.run([sys.executable, "-m", "pip", *quiet, *map(str, arguments)], check=True)


def wheel(folder: Path) -> None:
    """Build rfork's wheel, with the build backend that constraints.txt names."""
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
    """What the wheel is built from; setuptools builds where it lies, and takes what an earlier build left."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)


def planner(folder: Path) -> None:
    """A virtual environment with the planner and its hooks, but neither torch nor pip."""
    output = folder / PLANNER
    venv.create(output, with_pip=False, clear=True)
    destination = ("--python", output, "install", "--no-cache-dir")
    pip(*destination, "--only-binary", ":all:", "--constraint", CONSTRAINTS, *requirements(PLANNER_EXTRAS))
    pip(*destination, "--no-deps", "--no-index", built(folder))


def layer(folder: Path, pythons: Sequence[str]) -> None:
    """The files for engines' containers: see `deploy.docker.files`."""
    files.build(folder / FILES, built(folder), pythons, files.by_pip(pip, CONSTRAINTS))


def built(folder: Path) -> Path:
    """The wheel that `wheel` has built. Raises FileNotFoundError where there is not just one."""
    found = sorted((folder / WHEELS).glob("rfork-*.whl"))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder / WHEELS} holds {len(found)} wheels of rfork, and not one")
    return found[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(prog="python -m deploy.docker.install", description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("folder", type=Path, help="what becomes /opt/rfork")
    parser.add_argument("--pythons", default=" ".join(files.PYTHONS), help="for `files`: versions, with blanks")
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
