"""Runs in vLLM's Python: checks how vLLM's models are recorded and loaded from tensors, in one rank.

``python -m tests.engines.vllm_relocation_probe RENDEZVOUS RANK RANKS FOLDER…`` writes one line ``RESULT`` and a JSON
object per folder; see `tests.engines.relocation_checks`. Its name is one of `MODELS` there.
RENDEZVOUS is the path of a file that does not exist yet.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from rfork.engines.vllm import compat
from rfork.engines.vllm.model_builder import VllmEngine
from tests.engines.relocation_checks import MODELS, check


def trace_of(vllm_config: Any) -> object:
    """Return what models change in vLLM's configuration and in the process."""
    compilation = vllm_config.compilation_config
    return (
        {name: id(layer) for name, layer in compilation.static_forward_context.items()},
        list(compilation.static_all_moe_layers),
        compilation.mode,
        {str(key): id(table) for key, table in compat.rotary_tables().items()},
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_rng_state().tolist(),
    )


def result_of(folder: Path, ranks: int) -> dict[str, object]:
    """Check the model of one folder."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    architecture = MODELS[folder.name]
    options: dict[str, Any] = {"runner": "pooling"} if architecture.task == "embed" else {}
    vllm_config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        dtype=architecture.dtype,
        tensor_parallel_size=ranks,
        kv_cache_memory_bytes=64 << 20,
        **options,
        **architecture.vllm,
    ).create_engine_config()
    with set_current_vllm_config(vllm_config):
        engine = VllmEngine(vllm_config.load_config, vllm_config, vllm_config.model_config, {"prefix": ""})
        return check(engine, folder, lambda: trace_of(vllm_config))


def main(rendezvous: str, rank: int, ranks: int, folders: list[str]) -> None:
    """Check one model after the other."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    os.environ["VLLM_DIST_IDENT"] = Path(rendezvous).name  # name of the memory that ranks share, as its executor sets
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker on a CPU does
    compat.keep_weights_on_cpu()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"file://{rendezvous}", rank, "gloo")
        initialize_model_parallel(ranks, 1)
    for folder in folders:
        try:
            result = result_of(Path(folder), ranks)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps({"folder": folder, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
