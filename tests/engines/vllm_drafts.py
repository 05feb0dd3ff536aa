"""Runs in vLLM's Python: forks main models with drafts that share tensors with them, within one process.

``python -m tests.engines.vllm_drafts PLANNER FOLDER NAME…``: for each name of `tests.engines.draft_models`, vLLM loads
the models in FOLDER and serves them as seeds, then forks them into a second server, whose folders have no weights.
Prints one JSON object per name: what was seen in both servers.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rfork.engines.served_model import served_model
from tests.engines.draft_models import DRAFTS, write
from tests.engines.model_folders import copy_without_weights
from tests.engines.served_state import state_of
from tests.engines.vllm_zoo import set_up
from tests.engines.zoo import PROMPTS, TOKENS


@contextmanager
def server(main: Path, draft: Path, kind: str, planner: str) -> Iterator[Any]:
    """A main model and its draft in vLLM, whose process groups are removed at the end."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    speculative = {"method": kind, "num_speculative_tokens": 1 if kind == "mtp" else 2}
    if kind != "mtp":
        speculative["model"] = str(draft)
    llm = None
    try:
        llm = LLM(
            str(main),
            dtype="float32",
            max_model_len=64,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
            skip_tokenizer_init=True,
            load_format="rfork",
            model_loader_extra_config={"planner": planner},
            speculative_config=speculative,
            disable_log_stats=False,
        )
        yield llm
    finally:
        if llm is not None:
            llm.collective_rpc(_close)
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def content_of(llm: Any) -> Mapping[str, Any]:
    """Return tokens, the number of accepted draft tokens, and the state of both models."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    (models,) = llm.collective_rpc(_models)
    drafted = {
        metric.name.removeprefix("vllm:"): metric.value
        for metric in llm.get_metrics()
        if metric.name in ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")
    }
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], **drafted, **models}


def _close(worker: Any) -> None:
    for model in (worker.get_model(), worker.get_draft_model()):
        if (served := served_model(model)) is not None:
            served.close(0.0)


def _models(worker: Any) -> dict[str, Any]:
    main, draft = worker.get_model(), worker.get_draft_model()
    addresses = {tensor.data_ptr() for tensor in main.parameters() if tensor.numel()}
    aliases = [name for name, tensor in draft.named_parameters() if tensor.data_ptr() in addresses and tensor.numel()]
    return {"main": state_of(main), "draft": state_of(draft), "shared": aliases}


def main() -> int:
    """Print what was seen."""
    planner, folder, *names = sys.argv[1:]
    set_up()
    for name in names or list(DRAFTS):
        main_folder, draft_folder = write(Path(folder), name, "vllm")
        kind = DRAFTS[name].kind
        with server(main_folder, draft_folder, kind, planner) as llm, tempfile.TemporaryDirectory() as scratch:
            source = content_of(llm)
            bare = copy_without_weights(main_folder, Path(scratch))
            bare_draft = bare if kind == "mtp" else copy_without_weights(draft_folder, Path(scratch))
            with server(bare, bare_draft, kind, planner) as second:
                target = content_of(second)
        print(json.dumps({"name": name, "source": source, "target": target}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
