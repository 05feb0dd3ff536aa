"""Drafts of the installed engines that share tensors with their main model fork with it, from servers to servers
without weights.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.engines.draft_models import DRAFTS
from tests.engines.engine_server import ROOT, engine_python
from tests.engines.planner_process import PlannerProcess

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHARED: Final = {
    "eagle": {EMBEDDING, HEAD},
    "eagle-own-embedding": {HEAD},
    "eagle3": {EMBEDDING},
    "eagle3-own-head": {EMBEDDING},
    "mtp": {EMBEDDING, HEAD},
}
"""Tensors that each draft of `tests.engines.draft_models` has in common with its main model, in vLLM."""
IN_SGLANG: Final = ("eagle", "eagle3", "mtp")
"""SGLang shares by algorithm, whatever the files contain."""


def results_of(engine: str, planner: PlannerProcess, folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return what one process of the engine saw in its servers."""
    run = subprocess.run(
        [engine_python(engine), "-m", f"tests.engines.{engine}_drafts", planner.url, folder, *names],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"name"')]
    assert list(names) == [result["name"] for result in found], run.stdout[-4000:] + run.stderr[-4000:]
    return found


def check(result: dict[str, Any]) -> None:
    """Check that both models of the target were forked, and that it does not differ from the source."""
    source, target = result["source"], result["target"]
    for role in ("main", "draft"):
        assert ("fallback", "forked") == (source[role].pop("outcome"), target[role].pop("outcome")), result
        assert [] == target[role].pop("reasons")
        assert target[role]["serves"]
        source[role].pop("reasons")
    assert source == target


@pytest.mark.timeout(1000)
def test_vllm_forks_drafts_with_their_main_model(planner: PlannerProcess, tmp_path: Path) -> None:
    """Tokens, shared tensors and the SHA-256 of all tensors are equal, whatever the draft's files contain."""
    for result in results_of("vllm", planner, tmp_path, *DRAFTS):
        check(result)
        assert SHARED[result["name"]] == set(result["target"]["shared"])


@pytest.mark.parametrize("name", IN_SGLANG)
def test_sglang_forks_drafts_with_their_main_model(planner: PlannerProcess, tmp_path: Path, name: str) -> None:
    """Shared tensors and the SHA-256 of all tensors are equal."""
    (result,) = results_of("sglang", planner, tmp_path, name)
    check(result)
    assert SHARED[name] == set(result["target"]["shared"])
