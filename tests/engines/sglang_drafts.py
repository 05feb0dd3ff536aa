"""Runs in SGLang's Python: forks a main model and its draft between two loads within one process.

``python -m tests.engines.sglang_drafts PLANNER FOLDER NAME``: SGLang loads the models of that name (see
`tests.engines.draft_models`), shares their tensors as its speculative workers do, and serves them as seeds; then it
forks them into a second pair, whose folders have no weights. Prints a JSON object: what was seen in both pairs.
SGLang's speculative workers do not run on a CPU, so tokens are not compared.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.engines.draft_models import DRAFTS, write
from tests.engines.model_folders import copy_without_weights
from tests.engines.served_state import state_of
from tests.engines.sglang_zoo import set_up


def load_pair(main: Path, draft: Path, algorithm: str) -> tuple[nn.Module, nn.Module]:
    """Load both models with rfork's loader, and share tensors as SGLang's worker does."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    main_runner = _runner(main, is_draft=False)
    draft_runner = _runner(draft, is_draft=True)
    worker: Any = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=main_runner),
        draft_runner=draft_runner,
        speculative_algorithm=SpeculativeAlgorithm.from_string(algorithm),
        hot_token_id=None,
    )
    worker._resolve_shared_embed_and_head = lambda: EagleDraftWorker._resolve_shared_embed_and_head(worker)
    EagleDraftWorker.init_lm_head(worker)
    return main_runner.model, draft_runner.model


def _runner(folder: Path, *, is_draft: bool) -> Any:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig

    from rfork.engines.sglang.loader import RforkLoader

    config = ModelConfig(str(folder), dtype="float32", is_draft_model=is_draft)
    load_config = LoadConfig(load_format="auto")
    model = RforkLoader(load_config).load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
    return SimpleNamespace(model=model, model_config=config, load_config=load_config)


def content_of(pair: tuple[nn.Module, Any]) -> Mapping[str, Any]:
    """Return the state of both models, and the names of the draft's tensors that are the main model's."""
    main, draft = pair
    addresses = {tensor.data_ptr() for tensor in main.parameters() if tensor.numel()}
    shared = [name for name, tensor in draft.named_parameters() if tensor.data_ptr() in addresses]
    hot_tokens = {"hot_token_id": draft.hot_token_id} if getattr(draft, "hot_token_id", None) is not None else {}
    return {"main": state_of(main), "draft": state_of(draft, **hot_tokens), "shared": shared}


def main() -> None:
    """Print what was seen."""
    planner, folder, name = sys.argv[1:]
    os.environ |= {"RFORK_PLANNER": planner, "RFORK_DRAIN_TIMEOUT_S": "0", "RFORK_NO_SOURCE_TIMEOUT_S": "1"}
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    algorithm = {"mtp": "NEXTN"}.get(DRAFTS[name].kind, DRAFTS[name].kind.upper())
    main_folder, draft_folder = write(Path(folder), name, "sglang")
    set_up(
        main_folder,
        "float32",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(draft_folder),
        speculative_num_steps=2,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=3,
    )
    source = content_of(load_pair(main_folder, draft_folder, algorithm))
    with tempfile.TemporaryDirectory() as scratch:
        bare = copy_without_weights(main_folder, Path(scratch))
        bare_draft = bare if main_folder == draft_folder else copy_without_weights(draft_folder, Path(scratch))
        target = content_of(load_pair(bare, bare_draft, algorithm))
    print(json.dumps({"name": name, "source": source, "target": target}), flush=True)
    os._exit(0)  # SGLang's threads would keep the process


if __name__ == "__main__":
    main()
