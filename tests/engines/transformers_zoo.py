"""Forks models of many architectures through transformers, within one process.

``python -m tests.engines.transformers_zoo PLANNER FOLDER NAME…``: `rfork.fork_pretrained` loads each model of FOLDER
(see `tests.engines.zoo`) and serves it, then builds a second model from a folder without weights. Prints one JSON
object per model: ``{"architecture", "level", "note"}``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import rfork
from rfork.settings import InstanceSettings
from tests.engines.model_folders import copy_without_weights
from tests.engines.reference_digests import digest
from tests.engines.zoo import ARCHITECTURES, PROMPTS, TOKENS, Architecture


def outputs_of(model: Any, architecture: Architecture) -> list[list[float]]:
    """Return greedy tokens, or embeddings; nothing for models whose input is no text."""
    prompts = torch.tensor(PROMPTS)
    with torch.no_grad():
        if architecture.task == "embed":
            embedded: list[list[float]] = model(prompts).last_hidden_state[:, 0].tolist()
            return embedded
        if architecture.task == "transcribe":
            return []
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        generated: list[list[float]] = model.generate(prompts, **options).tolist()
        return generated


def content_of(model: Any, architecture: Architecture) -> Mapping[str, Any]:
    """Return the outputs, and the SHA-256 of each tensor."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "tensors": {name: digest(tensor) for name, tensor in tensors if tensor.numel()},
        "outputs": outputs_of(model, architecture),
    }


def result_of(folder: Path, name: str, planner: str) -> tuple[str, str]:
    """Return the level of one architecture, ``forked`` or the reason why not."""
    architecture = ARCHITECTURES[name]
    settings = InstanceSettings(planner=planner, no_source_timeout_s=0.2, drain_timeout_s=0)
    with tempfile.TemporaryDirectory() as scratch:
        bare = copy_without_weights(folder / name, Path(scratch))
        source = rfork.fork_pretrained(folder / name, settings=settings)
        target = rfork.fork_pretrained(bare, settings=settings)
    report = rfork.fork_report(target)
    if report is None or report.outcome != "forked":
        return "failed", "not forked" if report is None else "; ".join(report.reasons)
    expected, found = content_of(source, architecture), content_of(target, architecture)
    for key in ("tensors", "outputs"):
        if expected[key] != found[key]:
            return "failed", f"{key} differ"
    compared = "and outputs" if expected["outputs"] else "only"
    return "forked", f"{len(expected['tensors'])} tensors {compared}"


def main() -> int:
    """Print the results."""
    planner, folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    for name in names or [name for name, found in ARCHITECTURES.items() if found.quantise is None]:
        try:
            level, note = result_of(Path(folder), name, planner)
        except Exception as error:  # transformers may raise anything for an architecture that it cannot run here
            level, note = "not run", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(json.dumps({"architecture": name, "level": level, "note": note}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
