"""The contents of the planner's container image, in a Python environment with the same packages: no torch, no
pip, no tools.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from deploy.docker.requirements import PLANNER_EXTRAS, requirements
from tests.packages import bare_python, build_wheel, copy_packages

pytestmark = pytest.mark.slow  # also: tests/integration/test_imports.py and tests/unit/deploy/test_dockerfiles.py

COMMANDS = ("planner", "k8s", "drain", "status", "launch", "doctor")
"""The commands that the image runs."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of the image's virtual environment."""
    folder = tmp_path_factory.mktemp("image")
    found, packages = bare_python(folder / "venv")
    copy_packages(requirements(PLANNER_EXTRAS), packages)
    with zipfile.ZipFile(build_wheel(folder)) as wheel:
        wheel.extractall(packages)
    return found


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it with an empty environment, as an unprivileged user."""
    environment = {"PATH": os.defpath, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python), *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs(python: Path, command: str) -> None:
    """Without torch, and without a writable home directory."""
    done = run(python, "-m", "rfork", command, "--help")
    assert "" == done.stderr
    assert 0 == done.returncode


def test_every_planner_module_imports(python: Path) -> None:
    """Each module of the planner and of its integrations is imported, and none needs torch."""
    done = run(
        python,
        "-c",
        "import importlib, importlib.util, pkgutil, planner\n"
        "for each in pkgutil.walk_packages(planner.__path__, 'planner.'):\n"
        "    importlib.import_module(each.name)\n"
        "print(importlib.util.find_spec('torch'))",
    )
    assert 0 == done.returncode
    assert "None\n" == done.stdout
    assert "" == done.stderr


def test_the_planner_serves_and_exits(python: Path) -> None:
    """It becomes ready, and SIGTERM ends it with code 0."""
    with subprocess.Popen(
        [python, "-m", "rfork", "planner", "--port", "0", "--json"],
        env={"PATH": os.defpath, "HOME": "/nonexistent"}, cwd="/", stdout=subprocess.PIPE, text=True,
    ) as planner:  # fmt: skip
        try:
            assert planner.stdout is not None
            assert "ready" == json.loads(planner.stdout.readline())["event"]
            planner.send_signal(signal.SIGTERM)
            assert 0 == planner.wait(60)
        finally:
            planner.kill()
