"""rfork's wheel, installed by pip into environments like those of engines: with the oldest and the newest versions
of its base requirements, and with versions of engines' images.

Needs a package index. `RFORK_TEST_OLDEST_PYTHON` and `RFORK_TEST_NEWEST_PYTHON` name the Pythons of the first two
environments, for example 3.10 and 3.13; torch is linked from where they have it, or installed. Default: this Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

from deploy.docker import files
from deploy.docker.install import pip
from deploy.docker.requirements import CONSTRAINTS, ROOT, canonical, for_python, pinned, requirements
from tests.conftest import StartRfork
from tests.integration.test_base_install import FORK as FORK_IN_PROCESS
from tests.integration.test_base_install import IMPORT_ALL, OPTIONAL_MODULES, OWNERS
from tests.packages import build_wheel, link_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PYTHONS: Final = {
    name: os.environ.get(f"RFORK_TEST_{name.upper()}_PYTHON", sys.executable) for name in ("oldest", "newest")
}
SEED: Final = """
import sys, rfork, torch
torch.manual_seed(1)
with rfork.seed(torch.nn.Linear(64, 64), model=sys.argv[1], planner=sys.argv[2]) as seed:
    print("ready" if seed.wait_registered(60) else "not registered", flush=True)
    sys.stdin.read()
"""
FORK: Final = """
import sys, rfork, torch
torch.manual_seed(1)
expected = torch.nn.Linear(64, 64)
module = torch.nn.Linear(64, 64)
report = rfork.fork(module, model=sys.argv[1], planner=sys.argv[2])
print(report.outcome, torch.equal(expected.weight, module.weight))
"""
FORK_PRETRAINED: Final = """
import sys, rfork, torch, transformers
from rfork.settings import InstanceSettings
shared = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
model_class = getattr(transformers, f"{sys.argv[1]}ForCausalLM")
settings = InstanceSettings(planner=sys.argv[2], no_source_timeout_s=0.2)
model_class(model_class.config_class(**shared, **heads)).to(torch.bfloat16).save_pretrained("full/tiny")
expected = model_class.from_pretrained("full/tiny", dtype="auto")
expected.config.save_pretrained("bare/tiny")
first = rfork.fork_pretrained("full/tiny", settings=settings)
second = rfork.fork_pretrained("bare/tiny", settings=settings)
reports = [rfork.fork_report(each) for each in (first, second)]
prompt = torch.tensor([[1, 5, 9, 60, 2, 77]])
print(transformers.__version__)
print(reports[0].outcome, reports[0].fallback)
print(reports[1].outcome, [each.source_id for each in reports[1].sources] == [reports[0].seed.identity.instance_id])
print(*(torch.equal(expected(prompt).logits, each(prompt).logits) for each in (first, second)))
"""
IMAGES: Final[Mapping[str, Sequence[str]]] = {
    "vllm": (
        "grpcio==1.78.0", "httpx==0.28.1", "numpy==2.2.6", "protobuf==6.33.6", "pydantic==2.12.5",
        "pydantic-settings==2.12.0", "pyjwt==2.10.1", "rich==14.2.0", "safetensors==0.7.0", "typer==0.20.0",
        "typing-extensions==4.15.0",
    ),
    "sglang": (
        "grpcio==1.75.1", "grpcio-health-checking==1.75.1", "httpx==0.28.1", "numpy==2.2.6", "protobuf==6.32.1",
        "pydantic==2.11.9", "rich==14.1.0", "safetensors==0.6.2", "typing-extensions==4.15.0", "xxhash==3.5.0",
    ),
    "protobuf 5": (
        "grpcio==1.62.3", "httpx==0.27.2", "numpy==1.26.4", "protobuf==5.29.6", "pydantic==2.8.2",
        "typing-extensions==4.15.0",
    ),
}  # fmt: skip
"""Versions of packages in engines' images."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with pip."""

    python: Path
    packages: Path

    @classmethod
    def create(cls, folder: Path, python: str) -> Environment:
        """Create one with torch for a Python."""
        subprocess.run([python, "-m", "venv", folder], check=True)
        found = cls(folder / "bin" / "python", next((folder / "lib").glob("python3.*")) / "site-packages")
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        source = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
        # The second command installs what torch needs and is not linked.
        linked = link_torch(Path(source), found.packages)
        found.pip("install", "torch" if linked else f"torch=={pinned()['torch']}")
        return found

    @property
    def version(self) -> str:
        """Version of its Python: ``3.10``."""
        return self.packages.parent.name.removeprefix("python")

    def pip(self, *arguments: str | Path) -> str:
        """Run pip; it must succeed."""
        done = self.run("-m", "pip", "--disable-pip-version-check", *map(str, arguments))
        assert 0 == done.returncode, done.stderr
        return done.stdout

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run its Python."""
        command = [str(self.python), *arguments]
        # pip would take rfork on PYTHONPATH for an installed package.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True, timeout=1200)

    def installed(self) -> dict[str, str]:
        """Return the version of each installed package."""
        return {canonical(each["name"]): each["version"] for each in json.loads(self.pip("list", "--format", "json"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rfork's wheel. Skips the tests without a package index."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), "typing-extensions"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    return build_wheel(folder)


def oldest(line: str) -> str:
    """Return a requirement of the oldest version that another requirement allows."""
    requirement = Requirement(line)
    (version,) = (each.version for each in requirement.specifier if each.operator == ">=")
    return f"{requirement.name}=={version}"


@dataclass(frozen=True)
class BaseInstall:
    """An environment in which rfork was installed, and its packages before and after that."""

    environment: Environment
    before: Mapping[str, str]
    after: Mapping[str, str]


@pytest.fixture(scope="module", params=["oldest", "newest"])
def install(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseInstall:
    """The oldest and the newest versions of the base requirements, and then rfork."""
    environment = Environment.create(tmp_path_factory.mktemp(request.param) / "venv", PYTHONS[request.param])
    wanted = (*for_python(requirements(), environment.version), "numpy>=1.24")
    versions = [oldest(line) for line in wanted] if request.param == "oldest" else list(wanted)
    environment.pip("install", "--upgrade", *versions)
    before = environment.installed()
    environment.pip("install", wheel)
    return BaseInstall(environment, before, environment.installed())


def test_installing_rfork_replaces_no_package(install: BaseInstall) -> None:
    """Only rfork itself is added, and every package keeps its version."""
    assert {**install.before, "rfork": install.after["rfork"]} == install.after


def test_all_modules_import(install: BaseInstall) -> None:
    """Every public name and module imports, except modules for packages of extras and engines."""
    done = install.environment.run("-c", IMPORT_ALL)
    assert "" == done.stderr
    missing = {name: modules for name, modules in json.loads(done.stdout).items() if not modules[0].startswith(OWNERS)}
    assert OPTIONAL_MODULES.items() >= missing.items()


@pytest.mark.parametrize(("seed", "target"), [("other", "other"), ("this", "other"), ("other", "this")])
def test_a_module_forks_between_versions(
    install: BaseInstall, rfork_process: StartRfork, seed: str, target: str
) -> None:
    """Seed and target run with these versions or those of the tests; the planner runs with those of the tests."""
    planner = rfork_process("planner", "--port", "0", "--json", until='"ready"')
    url = json.loads(planner.stdout.splitlines()[0])["url"]
    pythons = {"this": sys.executable, "other": str(install.environment.python)}
    environment = {"PATH": os.defpath, "HOME": "/nonexistent"}
    ours = {**environment, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [pythons[seed], "-c", SEED, "layer", url],
        env=ours if seed == "this" else environment,
        cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "ready\n" == process.stdout.readline()
        done = subprocess.run(
            [pythons[target], "-c", FORK, "layer", url],
            env=ours if target == "this" else environment,
            cwd="/", capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        _, seed_errors = process.communicate(timeout=60)
    assert "forked True\n" == done.stdout, done.stderr
    assert "Traceback" not in done.stderr + seed_errors


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_engine_images_keep_their_packages(image: str, wheel: Path, tmp_path: Path) -> None:
    """pip would install rfork and missing packages, and replace none."""
    environment = Environment.create(tmp_path / "venv", sys.executable)
    environment.pip("install", *IMAGES[image])
    report = tmp_path / "report.json"
    environment.pip("install", "--dry-run", "--report", report, wheel)
    added = {canonical(each["metadata"]["name"]) for each in json.loads(report.read_text())["install"]}
    assert "rfork" in added
    assert set() == added & environment.installed().keys()


def test_injected_files_use_the_images_packages(wheel: Path, rfork_process: StartRfork, tmp_path: Path) -> None:
    """The webhook's files fork in an image with protobuf 5 and an old grpcio, and add only what is missing."""
    environment = Environment.create(tmp_path / "venv", PYTHONS["oldest"])
    environment.pip("install", *IMAGES["protobuf 5"])
    files.build(tmp_path / "files", wheel, [environment.version], files.by_pip(pip, CONSTRAINTS))
    variables = {"PATH": os.defpath, "HOME": "/nonexistent", "PYTHONPATH": str(tmp_path / "files" / "path")}

    def run(code: str, *arguments: str) -> list[str]:
        command = [str(environment.python), "-B", "-c", code, *arguments]
        done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, timeout=300)
        assert 0 == done.returncode, done.stderr
        return done.stdout.splitlines()

    code = (
        "import rfork._files as files; print(repr(files.unusable_reason())); import google.protobuf, grpc, xxhash\n"
        "for each in (google.protobuf, grpc, xxhash): print(each.__file__)"
    )
    reason, protobuf, grpcio, xxhash = run(code)
    assert "''" == reason
    assert protobuf.startswith(str(environment.packages))
    assert grpcio.startswith(str(environment.packages))
    assert xxhash.startswith(str(tmp_path / "files" / "deps"))
    planner = rfork_process("planner", "--port", "0", "--json", until='"ready"')
    assert ["forked True"] == run(FORK_IN_PROCESS, json.loads(planner.stdout.splitlines()[0])["url"])


@pytest.fixture(scope="module")
def oldest_transformers(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, str]:
    """An environment with rfork and the oldest transformers that its extra allows, and that version."""
    environment = Environment.create(tmp_path_factory.mktemp("transformers") / "venv", sys.executable)
    (line,) = (each for each in requirements(["transformers"]) if canonical(each) == "transformers")
    environment.pip("install", oldest(line), wheel)
    return environment, environment.installed()["transformers"]


@pytest.mark.parametrize("architecture", ["Llama", "Mixtral"])
def test_the_oldest_transformers_forks(
    oldest_transformers: tuple[Environment, str], rfork_process: StartRfork, tmp_path: Path, architecture: str
) -> None:
    """The first model is read from the files by rfork, the second is forked, and both equal `from_pretrained`'s."""
    environment, version = oldest_transformers
    planner = rfork_process("planner", "--port", "0", "--json", until='"ready"')
    done = subprocess.run(
        [environment.python, "-c", FORK_PRETRAINED, architecture, json.loads(planner.stdout.splitlines()[0])["url"]],
        env={"PATH": os.defpath, "HOME": "/nonexistent"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert [version, "forked None", "forked True", "True True"] == done.stdout.splitlines(), done.stderr
    assert version.startswith("4.56.")
