"""Tiny random main models with drafts that share tensors with them: EAGLE, EAGLE-3 and multi-token prediction.

Prompts are token ids, as in `tests.engines.zoo`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.engines.zoo import VOCABULARY

HIDDEN: Final = 128
INTERMEDIATE: Final = 256
HEADS: Final = 4
KEY_HEADS: Final = 2
HEAD_DIM: Final = 32
REDUCED_VOCABULARY: Final = 256
LAYERS: Final = 8
"""EAGLE-3 reads hidden states of layers 2, n/2 and n-3, which must differ."""
DEVIATION: Final = 0.1

Kind = Literal["eagle", "eagle3", "mtp"]
Engine = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model and what it has of its own."""

    kind: Kind
    embedding: Literal["absent", "equal", "own"] = "absent"
    """In the checkpoint: no input embedding, a copy of the main model's, or one of its own."""
    head: Literal["absent", "equal", "own", "reduced"] = "absent"
    """Likewise; ``reduced``: its own, for a part of the vocabulary."""


DRAFTS: Final[Mapping[str, Draft]] = {
    "eagle": Draft("eagle", embedding="equal"),
    "eagle-own-embedding": Draft("eagle", embedding="own"),
    "eagle3": Draft("eagle3", head="reduced"),
    "eagle3-own-head": Draft("eagle3", embedding="equal", head="own"),
    "mtp": Draft("mtp"),
}


def write_main(folder: Path, kind: Kind) -> None:
    """Write a main model with random weights: Llama, or MiMo with one layer that predicts the token after next."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_DIM, "max_position_embeddings": 256, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": DEVIATION, "dtype": "float32",
    }  # fmt: skip
    config = Qwen2Config(**shape) if kind == "mtp" else LlamaConfig(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        if kind == "mtp":
            _add_prediction_layer(folder)


def _add_prediction_layer(folder: Path) -> None:
    """Turn a Qwen2 model into a MiMo model, whose files contain its draft."""
    files = folder / "model.safetensors"
    prefix = "model.mtp_layers.0."
    tensors = {f"{prefix}{name}": tensor for name, tensor in _layer(HIDDEN, biases=True)}
    tensors |= {f"{prefix}{name}.weight": 1 + _random(HIDDEN) for name in ("input_layernorm", "token_layernorm")}
    tensors |= {f"{prefix}{name}.weight": 1 + _random(HIDDEN) for name in ("hidden_layernorm", "final_layernorm")}
    tensors[f"{prefix}input_proj.weight"] = _random(HIDDEN, 2 * HIDDEN)
    save_file({**load_file(files), **tensors}, files, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))


def write_draft(folder: Path, draft: Draft, main: Path, engine: Engine) -> None:
    """Write the files of an EAGLE draft of the main model in folder `main`, for one engine."""
    folder.mkdir(parents=True)
    served = load_file(main / "model.safetensors")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        save_file(dict(_eagle_tensors(draft, served)), folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((main / "config.json").read_text())
    settings["num_hidden_layers"] = 1
    if draft.kind == "eagle3":
        settings["architectures"] = ["LlamaForCausalLMEagle3"]
        settings["draft_vocab_size"] = REDUCED_VOCABULARY if draft.head == "reduced" else VOCABULARY
    elif engine == "sglang":
        settings["architectures"] = ["LlamaForCausalLMEagle"]
    (folder / "config.json").write_text(json.dumps(settings))


def _eagle_tensors(draft: Draft, main: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    if draft.kind == "eagle3":
        yield from ((f"midlayer.{name}", tensor) for name, tensor in _layer(2 * HIDDEN))
        yield from ((f"midlayer.{name}.weight", 1 + _random(HIDDEN)) for name in ("input_layernorm", "hidden_norm"))
        yield "fc.weight", _random(HIDDEN, 3 * HIDDEN)
        yield "norm.weight", 1 + _random(HIDDEN)
    else:
        yield from ((f"layers.0.{name}", tensor) for name, tensor in _layer(HIDDEN))
        yield "fc.weight", _random(HIDDEN, 2 * HIDDEN)
    if draft.embedding != "absent":
        yield "embed_tokens.weight", _copied_or_own(draft.embedding, main["model.embed_tokens.weight"])
    if draft.head == "reduced":
        yield "lm_head.weight", _random(REDUCED_VOCABULARY, HIDDEN)
        yield "d2t", torch.arange(REDUCED_VOCABULARY)  # token n of the draft is token 2n
        yield "t2d", torch.arange(VOCABULARY) % 2 == 0
    elif draft.head != "absent":
        yield "lm_head.weight", _copied_or_own(draft.head, main["lm_head.weight"])


def _copied_or_own(source: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if source == "equal" else _random(*tensor.shape)


def _layer(width: int, *, biases: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one decoder layer whose attention reads `width` values per token."""
    for name, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
        yield f"self_attn.{name}_proj.weight", _random(heads * HEAD_DIM, width)
        if biases:
            yield f"self_attn.{name}_proj.bias", _random(heads * HEAD_DIM)
    yield "self_attn.o_proj.weight", _random(HIDDEN, HEADS * HEAD_DIM)
    yield "mlp.gate_proj.weight", _random(INTERMEDIATE, HIDDEN)
    yield "mlp.up_proj.weight", _random(INTERMEDIATE, HIDDEN)
    yield "mlp.down_proj.weight", _random(HIDDEN, INTERMEDIATE)
    yield "post_attention_layernorm.weight", 1 + _random(HIDDEN)


def _random(*shape: int) -> torch.Tensor:
    return DEVIATION * torch.randn(shape)


def write(folder: Path, name: str, engine: Engine) -> tuple[Path, Path]:
    """Write the draft of that name and its main model below `folder`; return both folders, equal for ``mtp``."""
    draft = DRAFTS[name]
    main = folder / f"main-{name}"
    write_main(main, draft.kind)
    if draft.kind == "mtp":
        return main, main
    write_draft(folder / name, draft, main, engine)
    return main, folder / name
