"""Two processes that build a model from two folders get equal layouts, so that valid forks are accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from tests.fork_server import run_python

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def layouts_of(folder: Path, mode: str) -> dict[str, Any]:
    """Return the layouts printed by a separate process."""
    ran = run_python(["-m", "tests.unit.engines.model_layout", str(folder), mode])
    assert 0 == ran.returncode, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_a_used_model_and_a_new_one_have_equal_layouts(tmp_path: Path) -> None:
    """One was loaded and has generated text, the other was built elsewhere from the configuration alone."""
    seeds, targets = tmp_path / "seeds", tmp_path / "elsewhere" / "targets"
    for model_type in ("llama", "qwen2"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES)).save_pretrained(seeds / model_type)
    shutil.copytree(seeds, targets, ignore=shutil.ignore_patterns("*.safetensors"))
    assert layouts_of(seeds, "loaded") == layouts_of(targets, "built")
