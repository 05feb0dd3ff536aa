"""rfork as files, for engines' containers whose image lacks it: what an init container copies to /opt/rfork.

======================  ==================================================================================
``path/``               on PYTHONPATH: rfork, and the metadata by which vLLM and SGLang find its plug-ins
``deps/cp3XY/``         what rfork needs beside torch, for one Python: behind all that the image has
``bin/rfork``           the command, by the image's Python: for preStop hooks
======================  ==================================================================================

`path` holds names that begin with ``rfork`` and nothing else, as it goes before the image's own packages. The
planner stays out of it for that reason.
"""

from __future__ import annotations

import platform
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from deploy.docker.requirements import requirements
from rfork.engine_command import ENTRY_POINTS, PLUGIN

PYTHONS: Final = ("3.11", "3.12", "3.13")
"""The Pythons that engines' images have."""
LAYER: Final = Path(__file__).parent / "layer"
HOOK: Final = "_files"
"""The module of rfork's package that only these files have."""
SHIMS: Final = {group: f"rfork.{HOOK}:{group.partition('.')[0]}" for group in ENTRY_POINTS}
"""What engines call first: see `layer/_files.py`."""
LIBCS: Final = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")
"""Wheels for these run on any Linux with glibc 2.28 (2018) or newer."""
UNUSED: Final = ("*.pyi", "*.pyx", "*.pxd", "*.pxi", "*.so.debug")
"""Files of packages that nothing reads when they run."""

Install = Callable[[Sequence[str], str, Path], None]
"""Put requirements, for a Python (``3.12``), into a folder."""


def build(folder: Path, wheel: Path, pythons: Sequence[str], install: Install) -> None:
    """Make the folder anew, from rfork's wheel. Raises ValueError for a Python that is no version."""
    if wrong := [each for each in pythons if not re.fullmatch(r"3\.\d+", each)]:
        raise ValueError(f"not a version of Python, as in {PYTHONS[0]}: {', '.join(wrong)}")
    if folder.exists():
        shutil.rmtree(folder)
    _unpack(wheel, folder / "path")
    for python in pythons:
        target = folder / "deps" / f"cp{python.replace('.', '')}"
        target.mkdir(parents=True)
        # `packaging` says whether what the image has will do.
        install((*requirements(), "packaging"), python, target)
        _remove_unused(target)
    (folder / "bin").mkdir()
    for name in ("rfork", "rfork.py"):
        shutil.copyfile(LAYER / name, folder / "bin" / name)
    (folder / "bin" / "rfork").chmod(0o755)


def by_pip(pip: Callable[..., None], constraints: Path) -> Install:
    """The installer for images: wheels from a package index, for another Python than this one.

    pip asks markers of the Python that it runs on; of what rfork needs none differs between `PYTHONS`, and
    the files say at run time if something were missing.
    """

    def install(wanted: Sequence[str], python: str, target: Path) -> None:
        abi = f"cp{python.replace('.', '')}"
        machine = platform.machine()
        tags = [word for libc in LIBCS for word in ("--platform", f"{libc}_{machine}")]
        pip(
            "install", "--no-cache-dir", "--no-compile", "--only-binary", ":all:", "--target", target,
            "--implementation", "cp", "--python-version", python,
            "--abi", abi, "--abi", "abi3", "--abi", "none", *tags, "--constraint", constraints, *wanted,
        )  # fmt: skip

    return install


def _unpack(wheel: Path, path: Path) -> None:
    """rfork's package, with the hook, and its metadata, with entry points that lead to the hook."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            top = name.partition("/")[0]
            if top == "rfork" or (top.endswith(".dist-info") and name.rpartition("/")[2] == "METADATA"):
                archive.extract(name, path)
    shutil.copyfile(LAYER / f"{HOOK}.py", path / "rfork" / f"{HOOK}.py")
    package = path / "rfork" / "__init__.py"
    # Whatever of rfork is imported first, in whatever process (a pickle may come before any plug-in), its
    # dependencies are found from then on.
    package.write_text(f"{package.read_text('utf-8')}\nfrom rfork import {HOOK} as {HOOK}  # noqa: E402\n", "utf-8")
    (metadata,) = path.glob("rfork-*.dist-info")
    points = "".join(f"[{group}]\n{PLUGIN} = {shim}\n" for group, shim in SHIMS.items())
    (metadata / "entry_points.txt").write_text(points, "utf-8")


def _remove_unused(target: Path) -> None:
    """Leave out what is not read at run time: stubs, sources of C, scripts."""
    shutil.rmtree(target / "bin", ignore_errors=True)
    for pattern in UNUSED:
        for file in target.rglob(pattern):
            file.unlink()
