"""Builds rfork as files for containers whose image lacks it: an init container copies them to /opt/rfork.

======================  ==================================================================================
``path/``               on PYTHONPATH: rfork, and the metadata by which vLLM and SGLang find its plug-ins
``deps/cp3XY/``         dependencies besides torch and numpy, for one Python version: after the image's own packages
``bin/rfork``           the command, run by the image's Python: for preStop hooks ======================
==================================================================================

`path` contains only names that begin with ``rfork``, because it precedes the image's own packages. The
planner is not included for that reason.
"""

from __future__ import annotations

import platform
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from deploy.docker.requirements import for_python, requirements
from rfork.engine_command import ENTRY_POINTS, PLUGIN

PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13")
"""Python versions of engine images."""
LAYER: Final = Path(__file__).parent / "layer"
HOOK: Final = "_files"
"""Module of the rfork package that only exists in these files."""
SHIMS: Final = {group: f"rfork.{HOOK}:{group.partition('.')[0]}" for group in ENTRY_POINTS}
"""Entry points for engines: see `layer/_files.py`."""
MARKED: Final = {"3.10": ("exceptiongroup",)}
"""Dependencies of dependencies for some Pythons only. pip evaluates markers for the Python that runs it."""
OLDER: Final = {"3.10": Path(__file__).parent / "constraints-3.10.txt"}
"""Constraints for Pythons that do not run the versions in constraints.txt."""
LIBCS: Final = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")
"""Wheels for these platforms run on any Linux with glibc 2.28 (2018) or newer."""
UNUSED: Final = ("*.pyi", "*.pyx", "*.pxd", "*.pxi", "*.so.debug")
"""Files of packages that are not needed at run time."""

Install = Callable[[Sequence[str], str, Path], None]
"""Installs requirements for a Python version (``3.12``) into a directory."""


def build(folder: Path, wheel: Path, pythons: Sequence[str], install: Install) -> None:
    """Build the directory from rfork's wheel, replacing it. Raises ValueError for an invalid Python version."""
    if wrong := [each for each in pythons if not re.fullmatch(r"3\.\d+", each)]:
        raise ValueError(f"invalid Python version, expected e.g. {PYTHONS[0]}: {', '.join(wrong)}")
    if folder.exists():
        shutil.rmtree(folder)
    _unpack(wheel, folder / "path")
    for python in pythons:
        target = folder / "deps" / f"cp{python.replace('.', '')}"
        target.mkdir(parents=True)
        # `packaging` checks the versions of the image's packages.
        wanted = (*for_python(requirements(), python), *MARKED.get(python, ()), "packaging")
        install(wanted, python, target)
        _remove_unused(target)
    (folder / "bin").mkdir()
    for name in ("rfork", "rfork.py"):
        shutil.copyfile(LAYER / name, folder / "bin" / name)
    (folder / "bin" / "rfork").chmod(0o755)


def by_pip(pip: Callable[..., None], constraints: Path) -> Install:
    """Return the installer for images: wheels from a package index, for another Python version than this one.

    Missing packages are reported at run time.
    """

    def install(wanted: Sequence[str], python: str, target: Path) -> None:
        abi = f"cp{python.replace('.', '')}"
        machine = platform.machine()
        tags = [word for libc in LIBCS for word in ("--platform", f"{libc}_{machine}")]
        pip(
            "install", "--no-cache-dir", "--no-compile", "--only-binary", ":all:", "--target", target,
            "--implementation", "cp", "--python-version", python,
            "--abi", abi, "--abi", "abi3", "--abi", "none", *tags,
            "--constraint", OLDER.get(python, constraints), *wanted,
        )  # fmt: skip

    return install


def _unpack(wheel: Path, path: Path) -> None:
    """Unpack the rfork package with the hook module, and its metadata with entry points to the hook module."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            top = name.partition("/")[0]
            if top == "rfork" or (top.endswith(".dist-info") and name.rpartition("/")[2] == "METADATA"):
                archive.extract(name, path)
    shutil.copyfile(LAYER / f"{HOOK}.py", path / "rfork" / f"{HOOK}.py")
    package = path / "rfork" / "__init__.py"
    # Whichever module of rfork is imported first, in any process (unpickling may precede the plug-ins), its
    # dependencies are found from then on.
    package.write_text(f"{package.read_text('utf-8')}\nfrom rfork import {HOOK} as {HOOK}  # noqa: E402\n", "utf-8")
    (metadata,) = path.glob("rfork-*.dist-info")
    points = "".join(f"[{group}]\n{PLUGIN} = {shim}\n" for group, shim in SHIMS.items())
    (metadata / "entry_points.txt").write_text(points, "utf-8")


def _remove_unused(target: Path) -> None:
    """Remove files that are not needed at run time: stubs, C sources, scripts."""
    shutil.rmtree(target / "bin", ignore_errors=True)
    for pattern in UNUSED:
        for file in target.rglob(pattern):
            file.unlink()
