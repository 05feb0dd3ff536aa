"""Runs in SGLang's Python: checks how a model of SGLang is recorded and loaded from tensors, in one rank.

``python -m tests.engines.sglang_relocation_probe FOLDER [RANK RANKS PORT]`` writes one line ``RESULT`` and a JSON
object; see `tests.engines.relocation_checks`. Its name is one of `MODELS` there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

from tests.engines.relocation_checks import MODELS, check
from tests.engines.sglang_zoo import set_up


def trace() -> object:
    """Return what models change in the process."""
    from rfork.engines.sglang import compat

    return (
        {str(key): id(table) for key, table in compat.rotary_tables().items()},
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_rng_state().tolist(),
    )


def result_of(folder: Path, rank: int = 0, ranks: int = 1, port: int | None = None) -> dict[str, object]:
    """Check the model of a folder."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig

    from rfork.engines.sglang.loader import SglangEngine

    dtype = MODELS[folder.name].dtype
    set_up(folder, dtype, rank, port, tp_size=ranks)
    model_config = ModelConfig(str(folder), dtype=dtype)
    return check(SglangEngine(LoadConfig(load_format="auto"), model_config, DeviceConfig("cpu", 0)), folder, trace)


def main(folder: Path, *layout: int) -> None:
    """Print the result."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    try:
        result = result_of(folder, *layout)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps({"folder": str(folder), **result}), flush=True)
    os._exit(0)  # SGLang's threads would keep the process


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
