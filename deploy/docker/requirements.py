"""Requirements of images, read from pyproject.toml, with the versions of constraints.txt.

Needs only the standard library, because nothing else is installed yet.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:  # in the tests of Python 3.10
    import tomli as tomllib

ROOT: Final = Path(__file__).parents[2]
CONSTRAINTS: Final = ROOT / "constraints.txt"
PLANNER_EXTRAS: Final = ("planner", "kubernetes", "redis", "tracing")
"""Extras of the planner's image."""
NOT_OURS: Final = frozenset({"numpy", "torch"})
"""Packages that planners do not need and engine images provide."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
BELOW_PYTHON: Final = re.compile(r"python_version < '3\.(\d+)'")
"""The only marker of requirements in pyproject.toml."""
OWN_EXTRAS: Final = re.compile(r"rfork\[([a-z0-9,-]+)\]")
"""A requirement of one extra that includes other extras."""


def canonical(requirement: str) -> str:
    """Return the normalized name of a requirement."""
    if (found := NAME.match(requirement)) is None:
        raise ValueError(f"no name in the requirement {requirement!r}")
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def pyproject_table(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, Any]:
    """Return the content of pyproject.toml."""
    return tomllib.loads(pyproject.read_text("utf-8"))


def requirements(extras: Iterable[str] = (), *, pyproject: Path = ROOT / "pyproject.toml") -> tuple[str, ...]:
    """Return the requirements of rfork and some extras from pyproject.toml, without `NOT_OURS`."""
    project = pyproject_table(pyproject)["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    listed = dict.fromkeys([*project["dependencies"], *_requirements_of_extras(extras, optional)])
    return tuple(each for each in listed if canonical(each) not in NOT_OURS)


def _requirements_of_extras(extras: Iterable[str], optional: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for extra in extras:
        for each in optional[extra]:
            if included := OWN_EXTRAS.fullmatch(each):
                yield from _requirements_of_extras(included[1].split(","), optional)
            else:
                yield each


def for_python(lines: Iterable[str], python: str) -> Iterator[str]:
    """Yield the requirements for one Python version (``3.10``), without their markers.

    Raises ValueError for a marker of another form.
    """
    for line in lines:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if marker and (below := BELOW_PYTHON.fullmatch(marker)) is None:
            raise ValueError(f"unknown marker in the requirement {line!r}")
        if not marker or (below and int(python.partition(".")[2]) < int(below[1])):
            yield requirement


def build_requirements(*, pyproject: Path = ROOT / "pyproject.toml") -> tuple[str, ...]:
    """Return the requirements for building rfork's wheel."""
    required: Sequence[str] = pyproject_table(pyproject)["build-system"]["requires"]
    return tuple(required)


def pinned(*, constraints: Path = CONSTRAINTS) -> dict[str, str]:
    """Return the pinned version of each package in constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text("utf-8").splitlines())
    return {canonical(line): line.partition("==")[2] for line in lines if line}
