"""The release's wheel, built as in the release workflow but without the package index, and the installation
commands of the pages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from deploy.release import check, contents, links
from rfork import __version__
from tests.docs.pages import PageBlock
from tests.docs.run_by import blocks_run_by

pytestmark = pytest.mark.slow  # also: `make release-check`

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://host.example/people/rfork"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of git's files, with the repository's address in its links."""
    folder = check.clean_copy(tmp_path_factory.mktemp("release") / "source")
    check.set_repository_links(folder, REPOSITORY)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """A wheel built from the copy."""
    folder = source.parent
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, check=False
    )
    assert "" == done.stderr
    assert 0 == done.returncode
    return check.find_files(folder, "*.whl")


def test_the_wheel_is_complete(wheel: Path, source: Path) -> None:
    """Both packages with types, generated code, the planner's page and entry points; no tests."""
    assert contents.check_wheel(wheel, source, __version__)


@pytest.mark.parametrize("missing", ["planner/py.typed", "rfork/peer/v1/peer_pb2.py"])
def test_a_missing_file_is_named(wheel: Path, source: Path, missing: str, tmp_path: Path) -> None:
    """The check finds a file that is left out."""
    damaged = copy_of(wheel, tmp_path, without=missing)
    with pytest.raises(contents.InvalidContents, match=missing):
        contents.check_wheel(damaged, source, __version__)


@pytest.mark.parametrize("added", ["tests/__init__.py", "rfork/tests/test_it.py"])
def test_an_unexpected_file_is_named(wheel: Path, source: Path, added: str, tmp_path: Path) -> None:
    """The check finds another top-level package, and tests inside a package."""
    damaged = copy_of(wheel, tmp_path)
    with zipfile.ZipFile(damaged, "a") as archive:
        archive.writestr(added, "")
    with pytest.raises(contents.InvalidContents, match=added.partition("/")[0]):
        contents.check_wheel(damaged, source, __version__)


def test_a_wrong_version_is_detected(wheel: Path, source: Path) -> None:
    """The check compares the wheel's version."""
    with pytest.raises(contents.InvalidContents):
        contents.check_wheel(wheel, source, "9.9.9")


def test_the_readmes_links_are_absolute(wheel: Path) -> None:
    """Links and pictures of the README are addresses of this version of the repository."""
    contents.check_links(wheel, REPOSITORY)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"rfork-{__version__}.dist-info/METADATA").decode()
    description = str(Parser().parsestr(metadata).get_payload())
    at = f"v{__version__}"
    assert f"({REPOSITORY}/raw/{at}/docs/img/overview.svg)" in description
    assert f"({REPOSITORY}/blob/{at}/LICENSE)" in description
    sources = links.relative((ROOT / "README.md").read_text())
    assert len(sources) > 20
    assert len(sources) == description.count(f"/{at}/")


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    """A README without repository links is refused, and so is an invalid address."""
    wheel = tmp_path / "rfork.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rfork-1.dist-info/METADATA", "Name: rfork\n\nSee [it](docs/index.md), `[a](b)`.\n")
    with pytest.raises(contents.InvalidContents, match=r"README has a relative link.*: docs/index\.md"):
        contents.check_links(wheel, REPOSITORY)
    with pytest.raises(check.ReleaseError, match="is not an https address"):
        check.set_repository_links(tmp_path, "host.example/people/rfork")


@pytest.mark.parametrize("block", blocks_run_by(__file__), ids=lambda block: block.location)
def test_the_installation_commands_of_the_pages_work(
    block: PageBlock, source: Path, wheel: Path, tmp_path: Path
) -> None:
    """From a directory instead of the index, without dependencies; from a clone, up to its extras."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    if "-e" in block.text:
        # It must not be installed into the running environment, and need not be: all requirements are there.
        environment["PIP_DRY_RUN"] = "1"
        folder = Path(shutil.copytree(source, tmp_path / "clone"))
    else:
        environment |= {
            "PIP_FIND_LINKS": str(wheel.parent), "PIP_NO_DEPS": "1", "PIP_TARGET": str(tmp_path / "lib"),
        }  # fmt: skip
        folder = tmp_path
    done = subprocess.run(
        ["bash", "-e", "-c", block.text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout
    assert "" == done.stderr, done.stdout
    assert f"Would install rfork-{__version__}" in done.stdout or (tmp_path / "lib/rfork/py.typed").is_file()


def copy_of(wheel: Path, folder: Path, without: str = "") -> Path:
    """Copy the wheel without one file."""
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(target, "w") as copy:
        for name in archive.namelist():
            if name != without:
                copy.writestr(name, archive.read(name))
    return target
