"""``pip install rfork`` without extras: a Python environment with the base requirements only.

It serves and forks weights; commands that need more name the extra to install.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from deploy.docker.requirements import ROOT, requirements
from tests.conftest import StartRfork
from tests.packages import bare_python, copy_packages, link_packages

pytestmark = pytest.mark.slow

OPTIONAL_MODULES = {
    "triton": ["rfork.image.xxh3_triton"],
    "uvicorn": ["rfork.engines.sglang_bridge.sidecar"],
}
"""Packages of extras, with the modules that import them when they are imported."""
OWNERS = (
    *("rfork.engines.sglang.", "rfork.engines.vllm."),
    *("rfork.storage.object_store", "rfork.storage.s3.", "rfork.tracing."),
)
"""Packages of rfork whose modules import the package that they are for."""
IMPORT_ALL = """
import importlib, json, pkgutil, rfork
for name in rfork.__all__:
    getattr(rfork, name)
missing = {}
for module in pkgutil.walk_packages(rfork.__path__, "rfork."):
    if module.name != "rfork.__main__":
        try:
            importlib.import_module(module.name)
        except (ModuleNotFoundError, rfork.RforkError) as error:
            missing.setdefault(getattr(error, "name", ""), []).append(module.name)
print(json.dumps(missing))
"""
FORK = """
import sys, rfork, torch
trained, new = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
with rfork.seed(trained, model="layer", planner=sys.argv[1]) as seed:
    assert seed.wait_registered(30)
    report = rfork.fork(new, model="layer", planner=sys.argv[1])
    print(report.outcome, torch.equal(trained.weight, new.weight))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with rfork's base requirements; torch and numpy are links."""
    found, packages = bare_python(tmp_path_factory.mktemp("base") / "venv")
    copy_packages(requirements(), packages)
    link_packages(("torch", "numpy"), packages)
    for name in ("rfork", "planner"):
        (packages / name).symlink_to(ROOT / name)
    return found


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it with an empty environment."""
    environment = {"PATH": os.defpath, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python), *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)


def test_public_names_and_modules_import(python: Path) -> None:
    """Every public name, and every module except the listed ones and those of engines, needs no extra."""
    done = run(python, "-c", IMPORT_ALL)
    assert "" == done.stderr
    missing = json.loads(done.stdout)
    others = {name: modules for name, modules in missing.items() if not modules[0].startswith(OWNERS)}
    assert OPTIONAL_MODULES == others


def test_a_module_forks_from_a_seed(python: Path, rfork_process: StartRfork) -> None:
    """A planner elsewhere is enough: the seed and the fork run with the base install."""
    planner = rfork_process("planner", "--port", "0", "--json", until='"ready"')
    done = run(python, "-c", FORK, json.loads(planner.stdout.splitlines()[0])["url"])
    assert "forked True\n" == done.stdout, done.stderr


@pytest.mark.parametrize("command", ["seed", "planner", "sidecar"])
def test_help_needs_no_extra(python: Path, command: str) -> None:
    """Every command explains itself."""
    done = run(python, "-m", "rfork", command, "--help")
    assert "" == done.stderr
    assert 0 == done.returncode


def test_doctor_names_the_extra(python: Path) -> None:
    """`rfork doctor` runs, and shows that a planner cannot."""
    done = run(python, "-m", "rfork", "doctor", "--json")
    (check,) = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "planner extra"]
    assert "off" == check["status"]
    assert "pip install 'rfork[planner]'" == check["fix"]


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("planner",), "planner"),
        (("k8s", "webhook"), "kubernetes"),
        (("sidecar", "--planner", "http://127.0.0.1:9", "--engine", "http://127.0.0.1:9"), "sidecar"),
        (("demo",), "demo"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_command_names_its_missing_extra(python: Path, arguments: tuple[str, ...], extra: str) -> None:
    """It exits with 2, one line for the missing package and one for the remedy."""
    done = run(python, "-m", "rfork", *arguments)
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: `rfork {arguments[0]}` is not available: ")
    assert error.endswith(" is not installed")
    assert f"hint: pip install 'rfork[{extra}]'" == hint
    assert 2 == done.returncode
