"""Forks of a few architectures of the zoo; its other models are run by hand, see `tests.engines.zoo`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine_server import ROOT, engine_python
from tests.engines.planner_process import PlannerProcess

VLLM = ("llama-tied", "qwen3_moe", "deepseek_v2", "bert", "qwen2-embedding")
"""Shared weights, experts, latent attention, an encoder, and a decoder without a head."""
SGLANG = ("llama-tied", "qwen3_moe")
TIMEOUT_S = 500


@pytest.fixture(scope="module")
def zoo_planner() -> Iterator[PlannerProcess]:
    """A planner for all models."""
    with PlannerProcess() as planner:
        yield planner


def run(engine: str, module: str, *arguments: str | Path) -> dict[str, dict[str, str]]:
    """Run a module in an engine's Python; returns the results by architecture."""
    done = subprocess.run(
        [engine_python(engine), "-m", f"tests.engines.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr
    return {result["architecture"]: result for result in found}


@pytest.fixture(scope="module")
def vllm_results(zoo_planner: PlannerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Results of all models in one process."""
    folder = tmp_path_factory.mktemp("zoo")
    run("vllm", "zoo", folder, *VLLM)
    return run("vllm", "vllm_zoo", zoo_planner.url, folder, *VLLM)


@pytest.mark.parametrize("name", VLLM)
def test_vllm_forks(vllm_results: dict[str, dict[str, str]], name: str) -> None:
    """Tensors and outputs of the fork are those of the source."""
    assert vllm_results[name]["level"] == "forked", vllm_results[name]["note"]


@pytest.mark.parametrize("name", SGLANG)
def test_sglang_forks(zoo_planner: PlannerProcess, tmp_path: Path, name: str) -> None:
    """Tensors of the fork are those of the source."""
    run("sglang", "zoo", tmp_path, name)
    result = run("sglang", "sglang_zoo", zoo_planner.url, tmp_path, name)[name]
    assert result["level"] == "forked", result["note"]
