"""Models that the SGLang plug-in builds without weights have the layout of loaded ones, which forks require."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import torch

from tests.engines.engine_server import ROOT, engine_python
from tests.engines.matrix_sglang import check_builders
from tests.ports import free_port

# Entries of a hub checkpoint's configuration that transformers does not write.
HUB = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "ep_size": 1,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def make_deepseek(folder: Path, tokenizer: Path) -> None:
    """Write a random model like DeepSeek-V3, with latent attention (MLA) and experts, in three layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, n_shared_experts=1, max_position_embeddings=1024,
        bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    folder.mkdir()
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(written | HUB))


def test_a_model_with_derived_tensors(tiny_model: Path, tmp_path: Path) -> None:
    """DeepSeek: tensors that SGLang derives from the loaded weights exist and are part of the image."""
    python = engine_python("sglang")
    folder = tmp_path / "deepseek"
    make_deepseek(folder, tiny_model)
    ran = subprocess.run(
        [python, ROOT / "tests/engines/sglang_layout_probe.py", folder, str(free_port())],
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 0 == ran.returncode, ran.stderr
    layouts = json.loads(ran.stdout.splitlines()[-1])
    assert layouts["difference"] is None
    derived = {"w_kc", "w_vc", "cos_sin_cache", "e_score_correction_bias"}
    assert derived <= {name.rpartition(".")[2] for name in layouts["names"]}


def test_both_of_sglangs_loaders_take_the_same_steps(tmp_path: Path) -> None:
    """A model with quantised layers and derived tensors has the same layout with and without its weights."""
    check_builders(engine_python("sglang"), tmp_path)
