"""Runs in vLLM's Python: forks models of many architectures within one process.

``python -m tests.engines.vllm_zoo PLANNER FOLDER NAME…``: for each model of FOLDER (see `tests.engines.zoo`), vLLM
loads it and serves it as a seed, then forks it from there into a second model, whose folder has no weights. Prints
one JSON object per model: ``{"architecture", "level", "note"}``. Models that read images need torchvision, which the
venv of `tests.engines.setup` does not have: put the one of SGLang's venv, which works without CUDA, on PYTHONPATH.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import is_tensor, nn

from rfork.engines.served_model import ServedModel, served_model
from rfork.engines.vllm.compat import keep_weights_on_cpu
from tests.engines.model_folders import copy_without_weights
from tests.engines.reference_digests import digest
from tests.engines.zoo import ARCHITECTURES, PROMPTS, TOKENS, Architecture
from tests.engines.zoo_processors import IMAGE_SIZE, IMAGE_TOKEN, PROCESSORS

SAMPLE_RATE = 16_000
"""Samples of speech per second."""


@contextmanager
def vllm_model(folder: Path, architecture: Architecture, planner: str) -> Iterator[Any]:
    """A model in vLLM, whose process groups are removed at the end."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    options: dict[str, Any] = {"runner": "pooling"} if architecture.task == "embed" else {}
    llm = None
    try:
        llm = LLM(
            str(folder),
            dtype=architecture.dtype,
            max_model_len=128,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
            skip_tokenizer_init=not architecture.needs_processor,
            load_format="rfork",
            model_loader_extra_config={"planner": planner},
            **options,
            **architecture.vllm,
        )
        yield llm
    finally:
        if llm is not None:
            for served in llm.apply_model(served_model):
                if isinstance(served, ServedModel):
                    served.close(0.0)
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def outputs_of(llm: Any, architecture: Architecture) -> Any:
    """Return embeddings, or greedy tokens for prompts that may contain an image or speech."""
    from vllm import SamplingParams

    prompts = [prompt_of(tokens, architecture) for tokens in PROMPTS]
    if architecture.task == "embed":
        return [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompt_of(tokens: list[int], architecture: Architecture) -> dict[str, Any]:
    """Return a prompt for vLLM; the same one for the same tokens."""
    random = np.random.default_rng(sum(tokens))
    if architecture.task == "transcribe":
        speech = random.standard_normal(SAMPLE_RATE).astype(np.float32)
        return {"prompt_token_ids": tokens, "multi_modal_data": {"audio": (speech, SAMPLE_RATE)}}
    if architecture.model_type in PROCESSORS and "limit_mm_per_prompt" not in architecture.vllm:
        pixels = random.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        return {"prompt_token_ids": [*tokens[:2], IMAGE_TOKEN, *tokens[2:]], "multi_modal_data": {"image": image}}
    return {"prompt_token_ids": tokens}


def content_of(llm: Any, architecture: Architecture) -> Mapping[str, Any]:
    """Return the outputs, the SHA-256 of each tensor, and how the model got its weights."""
    ((outcome, reasons),) = llm.apply_model(_outcome)
    return {
        "outcome": outcome,
        "reasons": reasons,
        "tensors": llm.apply_model(_digests)[0],
        "outputs": outputs_of(llm, architecture),
    }


def _outcome(model: nn.Module) -> tuple[str, str]:
    served = served_model(model)
    return (served.report.outcome, "; ".join(served.report.reasons)) if served is not None else ("not forked", "")


def _digests(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each parameter and buffer, and of tensors that attention derived from them."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, layer in model.named_modules():
        if (backend := getattr(layer, "impl", None)) is not None:
            tensors |= {f"{name}.impl.{key}": each for key, each in vars(backend).items() if is_tensor(each)}
    return {name: digest(tensor) for name, tensor in tensors.items() if tensor.numel()}


def result_of(folder: Path, name: str, planner: str) -> tuple[str, str]:
    """Return the level of one architecture, ``forked`` or the reason why not."""
    architecture = ARCHITECTURES[name]
    with vllm_model(folder / name, architecture, planner) as llm, tempfile.TemporaryDirectory() as scratch:
        source = content_of(llm, architecture)
        if source["outcome"] == "not forked":
            return "refused", ""
        bare = copy_without_weights(folder / name, Path(scratch))
        with vllm_model(bare, architecture, planner) as second:
            target = content_of(second, architecture)
    if target["outcome"] != "forked":
        return "failed", f"{target['outcome']}: {target['reasons']}"
    for key in ("tensors", "outputs"):
        if source[key] != target[key]:
            differing = [one for one in source["tensors"] if source["tensors"][one] != target["tensors"].get(one)]
            return "failed", f"{key} differ {differing[:3]}"
    compared = "embeddings" if architecture.task == "embed" else "tokens"
    return "forked", f"{len(source['tensors'])} tensors and {compared}"


def set_up() -> None:
    """Prepare this process to run vLLM's engine itself, on a CPU."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    torch.set_num_threads(1)
    keep_weights_on_cpu()


def main() -> int:
    """Print the results."""
    planner, folder, *names = sys.argv[1:]
    set_up()
    for name in names or list(ARCHITECTURES):
        try:
            level, note = result_of(Path(folder), name, planner)
        except Exception as error:  # an engine may raise anything for an architecture that it cannot run here
            traceback.print_exc()
            level, note = "not run", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(json.dumps({"architecture": name, "level": level, "note": note}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
