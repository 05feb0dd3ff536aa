"""Checks which files the distributions contain."""

from __future__ import annotations

import configparser
import tarfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path
from typing import Final

from deploy.release import links

PACKAGES: Final = ("rfork", "planner")
NEEDED: Final = (
    "rfork/py.typed",
    "planner/py.typed",
    "rfork/peer/v1/peer_pb2.py",
    "rfork/peer/v1/peer_pb2.pyi",
    "rfork/peer/v1/peer_pb2_grpc.py",
    "rfork/net/health/v1/health_pb2.py",
    "planner/integrations/keda/v1/externalscaler_pb2.py",
    "planner/integrations/keda/v1/externalscaler_pb2_grpc.py",
)
ENTRY_POINTS: Final = {
    "console_scripts": {"rfork": "rfork.cli.app:main"},
    "vllm.general_plugins": {"rfork": "rfork.engines.vllm.plugin:register"},
    "sglang.srt.plugins": {"rfork": "rfork.engines.sglang.plugin:register"},
}
UNWANTED: Final = ("tests", "benchmarks", "deploy", "docs", "__pycache__", "node_modules")
LICENCE: Final = "Apache-2.0 AND ISC"
"""ISC is the licence of the UI's d3.js."""
LICENSES: Final = ("LICENSE", "planner/ui/vendor/LICENSE")


class InvalidContents(Exception):
    """A distribution lacks a file or has an unexpected one."""


def check_wheel(wheel: Path, root: Path, version: str) -> str:
    """Check a wheel built from `root`, and return a one-line summary. Raises InvalidContents."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"rfork-{version}.dist-info"
        wanted = {*NEEDED, *assets(root), *modules(root), f"{info}/METADATA"}
        wanted |= {f"{info}/licenses/{path}" for path in LICENSES}
        if missing := sorted(wanted - names):
            raise InvalidContents(f"{wheel.name} lacks {_listed(missing)}")
        tops = {name.partition("/")[0] for name in names}
        if foreign := sorted(tops - {*PACKAGES, info}):
            raise InvalidContents(f"{wheel.name} contains {foreign[0]}, which is not in {', '.join(PACKAGES)}")
        if unwanted := sorted(name for name in names if set(UNWANTED) & set(name.split("/"))):
            raise InvalidContents(f"{wheel.name} contains {_listed(unwanted)}, which belongs in no wheel")
        points = configparser.ConfigParser()
        points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        if (declared := {name: dict(points[name]) for name in points.sections()}) != ENTRY_POINTS:
            raise InvalidContents(f"{wheel.name} declares the entry points {declared} instead of {ENTRY_POINTS}")
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    declared_metadata = (metadata["Name"], metadata["Version"], metadata["License-Expression"])
    if declared_metadata != ("rfork", version, LICENCE):
        expected_metadata = ("rfork", version, LICENCE)
        raise InvalidContents(f"{wheel.name} has the metadata {declared_metadata} instead of {expected_metadata}")
    return f"{len(names)} files, {len(modules(root))} modules, {len(assets(root))} files of the UI"


def check_links(wheel: Path, repository: str) -> None:
    """Check that the links which a package index shows for a wheel are valid. Raises InvalidContents."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    if left := links.relative(str(metadata.get_payload())):
        raise InvalidContents(f"{wheel.name}: its README has a relative link, which a package index breaks: {left[0]}")
    if f"Repository, {repository}" not in metadata.get_all("Project-URL", ()):
        raise InvalidContents(f"{wheel.name} does not name the repository {repository} in its metadata")


def check_source(source: Path, version: str) -> None:
    """Check a source distribution. Raises InvalidContents."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        tops = {name.partition("/")[0] for name in archive.getnames()}
    if tops != {f"rfork-{version}"}:
        raise InvalidContents(f"{source.name} unpacks to {sorted(tops)} instead of rfork-{version}")
    if missing := sorted({"pyproject.toml", "README.md", "LICENSE", *NEEDED} - names):
        raise InvalidContents(f"{source.name} lacks {_listed(missing)}")


def _listed(files: Sequence[str]) -> str:
    """Return the name of the first file, and how many others there are."""
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def modules(root: Path) -> set[str]:
    """Return all modules of both packages."""
    return {path.relative_to(root).as_posix() for package in PACKAGES for path in (root / package).rglob("*.py")}


def assets(root: Path) -> set[str]:
    """Return the files of the planner's UI."""
    found = (root / "planner" / "ui").rglob("*")
    return {path.relative_to(root).as_posix() for path in found if path.is_file() and "__pycache__" not in path.parts}
