"""Modules to transfer: a dense one of a Llama's shapes, and one of very many small tensors.

Their bytes are the same in every process, so each side makes its own and the bytes can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

SMALL_TENSORS = 20_000
ROW = 1024
"""Elements per row of the small tensors: 2 KiB in bfloat16."""
RANDOM_ELEMENTS = 20_000_003
"""Elements that are drawn; longer content repeats them, with a period that is no multiple of any tensor or chunk."""


def dense(quick: bool) -> nn.Module:
    """Return a Llama's layers in bfloat16, one allocation per tensor: 2.06 GiB (16 layers), quick 0.27 GiB
    (5).
    """
    if quick:
        return module_of(llama(layers=5, hidden=1024, intermediate=4096, key_value=256), seed=1)
    return module_of(llama(layers=16, hidden=2048, intermediate=8192, key_value=512), seed=1)


def small_tensors(quick: bool) -> nn.Module:
    """Return 20,000 bfloat16 tensors, one allocation each: 48 to 56 KiB, 0.99 GiB in total; quick 6 to 10
    KiB.
    """
    rows = (3, 4, 5) if quick else (24, 26, 28)
    shapes = {f"experts.{index}.weight": (rows[index % len(rows)], ROW) for index in range(SMALL_TENSORS)}
    return module_of(shapes, seed=2)


def tiny() -> nn.Module:
    """Return a layer whose transfer takes no time."""
    return module_of({"weight": (64, 64)}, seed=3)


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Return the module's tensors in the order of creation, the same in every process."""
    return (parameter.data for parameter in module.parameters())


def llama(
    layers: int, hidden: int, intermediate: int, key_value: int, vocabulary: int = 32_000
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's tensors, by name, in order."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (hidden, hidden),
            f"{name}.self_attn.k_proj.weight": (key_value, hidden),
            f"{name}.self_attn.v_proj.weight": (key_value, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, hidden),
            f"{name}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{name}.mlp.up_proj.weight": (intermediate, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, intermediate),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def module_of(shapes: Mapping[str, tuple[int, ...]], seed: int) -> nn.Module:
    """Return a module with random tensors of these shapes, in bfloat16."""
    words = torch.empty(-(-RANDOM_ELEMENTS // 4), dtype=torch.int64)
    random = words.random_(generator=torch.Generator().manual_seed(seed)).view(torch.bfloat16)[:RANDOM_ELEMENTS]
    root, begin = nn.Module(), 0
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        rest = tensor.view(-1)
        while len(rest):
            part = random[begin : begin + len(rest)]
            rest[: len(part)] = part
            rest, begin = rest[len(part) :], (begin + len(part)) % RANDOM_ELEMENTS
        *path, leaf = name.split(".")
        owner = root
        for part_name in path:
            if part_name not in owner._modules:
                owner.add_module(part_name, nn.Module())
            owner = owner.get_submodule(part_name)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root
