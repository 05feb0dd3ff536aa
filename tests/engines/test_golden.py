"""Golden checks in the installed engines: the methods that rfork lists as proven on a CPU pass them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rfork.engines.sglang.methods import METHODS as SGLANG_METHODS
from rfork.engines.vllm.methods import METHODS as VLLM_METHODS
from tests.engines.engine_server import ROOT, engine_python

CONFIGURATIONS = (
    "none",
    "none+float32",
    "fp8-block",
    "awq",
    "gptq",
    "compressed-fp8",
    "compressed-int8",
    "compressed-w4a16",
)
"""Quantisation configurations whose kernels vLLM has for a CPU."""


def results_of(engine: str, configuration: str) -> list[dict[str, Any]]:
    """Return the results of a configuration."""
    command: list[str | Path] = [
        engine_python(engine),
        "-m",
        f"rfork.engines.{engine}.methods",
        configuration,
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert found, run.stderr
    return found


@pytest.fixture(scope="module")
def passed() -> set[str]:
    """Return the methods that pass with vLLM."""
    results = [result for name in CONFIGURATIONS for result in results_of("vllm", f"{name}+experts")]
    failed = {result["method"] for result in results if result["failure"]}
    return {result["method"] for result in results} - failed


@pytest.mark.timeout(3600)
def test_methods_listed_for_a_cpu_pass(passed: set[str]) -> None:
    """The list has no method that fails or that does not run."""
    assert set() == set(VLLM_METHODS.proven["cpu"]) - passed


def test_methods_that_pass_are_listed(passed: set[str]) -> None:
    """A new kernel of vLLM is listed, or its models are not forked; methods judged by reading have no kernel."""
    assert set() == {name for name in passed if "/" in name} - set(VLLM_METHODS.proven["cpu"])


@pytest.mark.parametrize("configuration", ["none+mla", "fp8-block+mla"])
def test_latent_attention_passes(configuration: str) -> None:
    """Tensors that MLA derives from a weight, which it may drop, determine what it computes."""
    (result,) = [each for each in results_of("vllm", configuration) if each["method"].startswith("MLAAttention")]
    assert result["failure"] is None


def test_sglangs_unquantised_layers_pass() -> None:
    """They are listed without a device and a kernel."""
    results = results_of("sglang", "none+experts")
    read = {name.rpartition(".")[2] for name in SGLANG_METHODS.read}
    assert [] == [result for result in results if result["failure"]]
    assert {result["method"].partition("/")[0] for result in results} <= read
