"""Runs in SGLang's Python: forks one model between two loads within one process, without a scheduler.

``python -m tests.engines.sglang_zoo PLANNER FOLDER NAME``: SGLang loads the model of FOLDER (see
`tests.engines.zoo`) and serves it as a seed, then forks it from there into a second model, whose folder has no
weights. Prints one JSON object: ``{"architecture", "level", "note"}``. Compares the SHA-256 of all tensors; tokens
need a scheduler and are compared for the models of `tests.engines.test_sglang`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engines.model_folders import copy_without_weights
from tests.engines.reference_digests import digest
from tests.engines.zoo import ARCHITECTURES


def set_up(folder: Path, dtype: str, rank: int = 0, port: int | None = None, **options: Any) -> None:
    """Initialise SGLang's runtime for one rank of a model. `options` are further server arguments.

    Several ranks meet at a port; one rank chooses it.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        load_format="rfork",
        skip_tokenizer_init=True,
        dtype=dtype,
        **options,
    )
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(arguments))


def load(folder: Path) -> nn.Module:
    """Load a model with rfork's loader."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig

    from rfork.engines.sglang.loader import RforkLoader

    model_config = ModelConfig(str(folder), dtype=ARCHITECTURES[folder.name].dtype)
    loaded: nn.Module = RforkLoader(LoadConfig(load_format="auto")).load_model(
        model_config=model_config, device_config=DeviceConfig("cpu", 0)
    )
    return loaded


def digests(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each tensor."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: digest(tensor) for name, tensor in tensors if tensor.numel()}


def result_of(folder: Path, name: str) -> tuple[str, str]:
    """Return the level of one architecture, ``forked`` or the reason why not."""
    from rfork.engines.served_model import served_model

    source: Any = load(folder / name)
    if served_model(source) is None:
        return "refused", ""
    with tempfile.TemporaryDirectory() as scratch:
        target = load(copy_without_weights(folder / name, Path(scratch)))
    served = served_model(target)
    if served is None or served.report.outcome != "forked":
        return "failed", "not forked" if served is None else "; ".join(served.report.reasons)
    expected, found = digests(source), digests(target)
    if expected != found:
        return "failed", f"tensors differ {[key for key in expected if expected[key] != found.get(key)][:3]}"
    return "forked", f"{len(expected)} tensors only"


def main() -> int:
    """Print the result."""
    planner, folder, name = sys.argv[1:]
    os.environ |= {"RFORK_PLANNER": planner, "RFORK_DRAIN_TIMEOUT_S": "0", "RFORK_NO_SOURCE_TIMEOUT_S": "1"}
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    if name not in ARCHITECTURES:
        raise SystemExit(f"unknown architecture {name}")
    try:
        set_up(Path(folder) / name, ARCHITECTURES[name].dtype)
        level, note = result_of(Path(folder), name)
    except Exception as error:  # an engine may raise anything for an architecture that it cannot run here
        traceback.print_exc()
        level, note = "not run", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    print(json.dumps({"architecture": name, "level": level, "note": note}), flush=True)
    os._exit(0)  # SGLang's threads would keep the process


if __name__ == "__main__":
    main()
