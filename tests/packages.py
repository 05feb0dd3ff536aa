"""Packages of the test environment, copied into folders: a package index without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from deploy.docker.install import WHEELS, copy_sources
from deploy.docker.requirements import canonical

NOT_LINKED = {"numpy", "setuptools", "typing-extensions"}
CUDA = ("nvidia-", "cuda-")


def dependency_closure(requirements: Iterable[str]) -> Iterator[str]:
    """Return the names of all installed packages that requirements depend on."""
    left, seen = [(Requirement(line), "") for line in requirements], set()
    while left:
        requirement, extra = left.pop()
        name = canonical(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for extra in sorted(requirement.extras) or [""]:
            if (name, extra) not in seen:
                seen.add((name, extra))
                left += [(Requirement(line), extra) for line in metadata.requires(name) or ()]
        yield name


def copy_packages(requirements: Iterable[str], target: Path) -> None:
    """Copy packages to a folder, as ``pip install --target`` would."""
    for name in sorted(set(dependency_closure(requirements))):
        for file in metadata.distribution(name).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target / file)


def build_wheel(folder: Path) -> Path:
    """Build rfork's wheel with this environment's build backend."""
    copy_sources(folder / "sources")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel", "--no-index",
            "--no-deps", "--no-build-isolation", "--wheel-dir", folder / WHEELS, folder / "sources",
        ],
        check=True,
    )  # fmt: skip
    (built,) = (folder / WHEELS).glob("rfork-*.whl")
    return built


def bare_python(folder: Path) -> tuple[Path, Path]:
    """Create a Python with only its standard library; return it and its package folder."""
    venv.create(folder, with_pip=False)
    packages = folder / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    return folder / "bin" / "python", packages


def link_packages(requirements: Iterable[str], target: Path) -> None:
    """Link packages that are too large to copy into a folder."""
    for name in sorted(set(dependency_closure(requirements))):
        _link(metadata.distribution(name), target)


def link_torch(source: Path, target: Path) -> bool:
    """Link torch and the packages that only it needs from one package folder to another; False if it is not there.

    What rfork needs too is not linked: pip may replace it, and would remove files of the source.
    """
    found = {canonical(each.metadata["Name"]): each for each in metadata.distributions(path=[str(source)])}
    left, seen = ["torch"], set[str]()
    while left:
        name = left.pop()
        if name in found and name not in seen and name not in NOT_LINKED:
            seen.add(name)
            # CUDA's packages are extras of one another.
            lines = [line for line in found[name].requires or () if "extra ==" not in line or line.startswith(CUDA)]
            left += [canonical(line) for line in lines]
            _link(found[name], target)
    return bool(seen)


def _link(distribution: metadata.Distribution, target: Path) -> None:
    for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
        if top != "__pycache__" and not (target / top).exists():
            (target / top).symlink_to(str(distribution.locate_file(top)))
