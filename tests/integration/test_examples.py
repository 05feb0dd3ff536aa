"""Runs the examples of deploy/examples as documented: real processes, one planner."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import RforkProcess

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
RUN_BY_OTHER_TESTS = {
    "pytorch/server.py": "test_example_server.py",
    "pytorch/tensor_parallel.py": "test_tensor_parallel_example.py",
}
"""Examples that another test file runs."""
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("RFORK_")},
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

Start = Callable[..., RforkProcess]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts ``python -m MODULE ARGUMENTS``; running processes are ended with the module."""
    started: list[RforkProcess] = []

    def start_module(module: str, *arguments: str, **environment: str) -> RforkProcess:
        process = RforkProcess(arguments, {**ENVIRONMENT, **environment}, module=module)
        started.append(process)
        return process

    yield start_module
    for process in reversed(started):
        process.stop()


@pytest.fixture(scope="module")
def planner(start: Start) -> str:
    """URL of a planner."""
    line = start("rfork", "planner", "--port", "0", "--json").wait_for(r'^.*"event": ?"ready".*$').group()
    return str(json.loads(line)["url"])


@pytest.fixture(scope="module")
def seed(start: Start, planner: str) -> RforkProcess:
    """The plain module's seed, once the planner knows it."""
    process = start("deploy.examples.pytorch.module", "seed", "--planner", planner)
    process.wait_for(r"^seeding, checksum")
    return process


def checksums(text: str) -> list[str]:
    """Return the checksums that the modules print."""
    return re.findall(r"checksum (-?[\d.]+)", text)


@pytest.mark.slow  # logic: tests/unit/planner/scaleups/test_announcement.py
def test_replicas_that_an_autoscaler_announces(start: Start, planner: str, seed: RforkProcess) -> None:
    """Both fork the seed's weights with one plan, while watch.py follows them to their ends."""
    watch = start("deploy.examples.rest.watch", "--planner", planner, "--until-ended", "2")
    watch.wait_for("^following$")
    module = [sys.executable, "-m", "deploy.examples.pytorch.module", "fork", "--planner", planner, "--once"]
    scaler = start(
        "deploy.examples.rest.autoscaler",
        "--planner",
        planner,
        "--model",
        "mlp",
        "--replicas",
        "2",
        "--",
        *module,
    )
    codes = scaler.wait(), watch.wait()
    assert (0, 0) == codes, scaler.transcript() + watch.transcript()
    assert checksums(seed.stdout) * 2 == checksums(scaler.stdout)
    assert 2 == scaler.stdout.count(" chunks verified")
    assert "announced 2: " in scaler.stdout
    assert 2 == len(re.findall(r"^ended: .* mlp forked in ", watch.stdout, re.MULTILINE))


@pytest.mark.slow  # logic: tests/unit/planner/scaleups/test_announcement.py
def test_the_same_with_curl(planner: str, seed: RforkProcess) -> None:
    """Models, forks and instances as JSON, and the stream of events until its time ends."""
    if shutil.which("curl") is None:
        pytest.skip("NO curl ON PATH: watch.sh is NOT tested")
    done = subprocess.run(
        [str(EXAMPLES / "rest" / "watch.sh")],
        env={**ENVIRONMENT, "RFORK_PLANNER": planner, "SECONDS_OF_EVENTS": "5"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "" == done.stderr
    assert 0 == done.returncode
    models, forks, instances, *stream = done.stdout.splitlines()
    assert ["mlp"] == [model["model"] for model in json.loads(models)]
    assert 1 == len(json.loads(instances)["items"])
    assert "items" in json.loads(forks)
    assert [line for line in stream if line.startswith("retry:")]


def test_a_snapshot_round_trip(start: Start, tmp_path: Path) -> None:
    """Saved, and restored by each method that the example shows."""
    process = start("deploy.examples.pytorch.snapshot", str(tmp_path))
    assert 0 == process.wait(), process.transcript()
    output = process.stdout
    assert "verified: True, same: True" in output
    assert "empty module, same: True" in output
    assert "one tensor: (1000, 256)" in output


@pytest.mark.slow  # two processes import transformers
def test_pretrained(start: Start, planner: str, tiny_model: Path, tmp_path: Path) -> None:
    """The first loads the folder, the second forks without its weights, and both continue a prompt the same."""
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    common = ("--planner", planner, "--name", "tiny")
    module = "deploy.examples.pytorch.pretrained"
    first = start(module, str(tiny_model), *common, "--stay")
    second_begins = first.wait_for(r"^continued: .*$").group()
    second = start(module, str(bare), *common)
    assert 0 == second.wait(), second.transcript()
    assert second_begins in second.stdout
    assert "chunks verified" in second.stdout


def test_each_example_is_run_and_listed() -> None:
    """Each Python and shell example is run by a test, and the README lists all of them."""
    found = {
        file.relative_to(EXAMPLES).as_posix()
        for suffix in ("py", "sh")
        for file in EXAMPLES.rglob(f"*.{suffix}")
        if file.name != "__init__.py"
    }
    here, readme = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    run = {name for name in found if Path(name).name in here or Path(name).stem in here}
    for name, file in RUN_BY_OTHER_TESTS.items():
        assert Path(name).stem in (Path(__file__).parent / file).read_text()
    assert found == run | RUN_BY_OTHER_TESTS.keys()
    assert found == set(re.findall(r"\]\(([\w/]+\.(?:py|sh))\)", readme))
