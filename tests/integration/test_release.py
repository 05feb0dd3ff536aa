"""The wheel that a release is made of, built as the release workflow builds it, less the package index."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.release import check, contents
from rfork import __version__


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows."""
    return check.clean_copy(tmp_path_factory.mktemp("release") / "source")


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """A wheel of them."""
    folder = source.parent
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    return check.found(folder, "*.whl")


def test_it_has_what_it_should(wheel: Path, source: Path) -> None:
    """Both packages whole, with types, generated code and the planner's page; no tests; its entry points."""
    assert contents.check_wheel(wheel, source, __version__)


@pytest.mark.parametrize("missing", ["planner/py.typed", "rfork/peer/v1/peer_pb2.py"])
def test_what_it_lacks_is_named(wheel: Path, source: Path, missing: str, tmp_path: Path) -> None:
    """A file that is left out is found."""
    damaged = copy_of(wheel, tmp_path, without=missing)
    with pytest.raises(contents.WrongContents, match=missing):
        contents.check_wheel(damaged, source, __version__)


@pytest.mark.parametrize("added", ["tests/__init__.py", "rfork/tests/test_it.py"])
def test_what_does_not_belong_is_named(wheel: Path, source: Path, added: str, tmp_path: Path) -> None:
    """Neither a package beside ours, nor tests within."""
    damaged = copy_of(wheel, tmp_path)
    with zipfile.ZipFile(damaged, "a") as archive:
        archive.writestr(added, "")
    with pytest.raises(contents.WrongContents, match=added.partition("/")[0]):
        contents.check_wheel(damaged, source, __version__)


def test_another_version_is_found(wheel: Path, source: Path) -> None:
    """A wheel is of the version that it says."""
    with pytest.raises(contents.WrongContents):
        contents.check_wheel(wheel, source, "9.9.9")


def copy_of(wheel: Path, folder: Path, without: str = "") -> Path:
    """The same wheel elsewhere, less one file."""
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(target, "w") as copy:
        for name in archive.namelist():
            if name != without:
                copy.writestr(name, archive.read(name))
    return target
