"""Weight loaders with the tensor operations of vLLM's default loaders, for one tensor-parallel rank.

Each function follows the operations of one `weight_loader` of vLLM: of its linear layers, its vocabulary-parallel
embedding and its routed experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

Loader = Callable[[torch.Tensor, torch.Tensor], None]


class TensorParallelRank(NamedTuple):
    """Coordinates of a rank."""

    rank: int
    size: int


def load_column_parallel(param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank) -> None:
    """Load one slice of the output dimension."""
    shard_size = param.shape[0]
    loaded = loaded.narrow(0, tp.rank * shard_size, shard_size)
    assert param.data.shape == loaded.shape
    param.data.copy_(loaded)


def load_row_parallel(param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank) -> None:
    """Load one slice of the input dimension; a scalar becomes one element."""
    param_data = param.data
    if loaded.dim() == 2:
        shard_size = param_data.shape[1]
        loaded = loaded.narrow(1, tp.rank * shard_size, shard_size)
    if len(loaded.shape) == 0:
        loaded = loaded.reshape(1)
    param_data.copy_(loaded)


def load_merged_column(
    param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank, shard: int, output_sizes: list[int]
) -> None:
    """Load gate (shard 0) or up (shard 1) into a fused parameter."""
    shard_offset = sum(output_sizes[:shard]) // tp.size
    shard_size = output_sizes[shard] // tp.size
    param_data = param.data.narrow(0, shard_offset, shard_size)
    loaded = loaded.narrow(0, tp.rank * shard_size, shard_size)
    param_data.copy_(loaded)


def load_merged_column_fused_on_disk(
    param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank, output_sizes: list[int]
) -> None:
    """Load a fused tensor of the checkpoint into a fused parameter."""
    offset = 0
    for shard, size in enumerate(output_sizes):
        load_merged_column(param, loaded.narrow(0, offset, size), tp, shard, output_sizes)
        offset += size


def load_qkv(
    param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank, shard: str, heads: int, kv_heads: int, head: int
) -> None:
    """Load q, k or v into a fused parameter; there may be more ranks than key and value heads."""
    own_heads = heads // tp.size
    own_kv_heads, replicas = max(kv_heads // tp.size, 1), max(tp.size // kv_heads, 1)
    offset, size = {
        "q": (0, own_heads * head),
        "k": (own_heads * head, own_kv_heads * head),
        "v": ((own_heads + own_kv_heads) * head, own_kv_heads * head),
    }[shard]
    shard_rank = tp.rank if shard == "q" else tp.rank // replicas
    param_data = param.data.narrow(0, offset, size)
    param_data.copy_(loaded.narrow(0, shard_rank * size, size))


def load_vocabulary(param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank, vocabulary: int) -> None:
    """Load one slice of the vocabulary and pad the rest of the parameter with zeros."""
    padded = param.shape[0]
    begin = min(tp.rank * padded, vocabulary)
    size = min(begin + padded, vocabulary) - begin
    loaded = loaded.narrow(0, begin, size)
    param[: loaded.shape[0]].data.copy_(loaded)
    param[loaded.shape[0] :].data.fill_(0)


def load_expert(
    param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank, expert: int, shard: str, transposed: bool = False
) -> None:
    """Load w1 (gate), w3 (up) or w2 (down) of one expert into the fused parameters w13 and w2."""
    expert_data = param.data[expert]
    if transposed:
        loaded = loaded.t().contiguous()
    if shard == "w2":
        shard_size = expert_data.shape[1]
        expert_data.copy_(loaded.narrow(1, shard_size * tp.rank, shard_size))
        return
    shard_size = expert_data.shape[0] // 2
    loaded = loaded.narrow(0, shard_size * tp.rank, shard_size)
    expert_data = expert_data.narrow(0, 0 if shard == "w1" else shard_size, shard_size)
    expert_data.copy_(loaded)


def load_fused_experts(param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank) -> None:
    """Load a checkpoint tensor (experts, input, gate and up) into w13 (experts, gate and up, input)."""
    gate_up = loaded.transpose(-1, -2).chunk(2, dim=1)
    for expert in range(param.shape[0]):
        for shard, half in zip(("w1", "w3"), gate_up, strict=True):
            load_expert(param, half[expert], tp, expert, shard)


def load_interleaved_experts(param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank) -> None:
    """Load a checkpoint tensor whose gate and up rows alternate."""
    size = param.shape[1]
    narrowed = loaded[:, tp.rank * size : (tp.rank + 1) * size, :]
    param.data[:, : size // 2, :] = narrowed[:, ::2, :]
    param.data[:, size // 2 :, :] = narrowed[:, 1::2, :]


def load_rotary_permuted(param: torch.Tensor, loaded: torch.Tensor, tp: TensorParallelRank, heads: int) -> None:
    """Load a query weight whose rotary halves are interleaved per head, as for Llama 4."""
    rows, columns = loaded.shape
    loaded = loaded.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
    load_column_parallel(param, loaded, tp)


HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, EXPERTS = 8, 8, 2, 4, 16, 21, 3


def checkpoint_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the checkpoint's tensors of a small mixture-of-experts model."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(layers):
        shapes[f"{layer}.q"] = (HEADS * HEAD, HIDDEN)
        shapes[f"{layer}.k"] = shapes[f"{layer}.v"] = (KV_HEADS * HEAD, HIDDEN)
        shapes[f"{layer}.o"] = (HIDDEN, HEADS * HEAD)
        shapes[f"{layer}.gate"] = shapes[f"{layer}.up"] = (INNER, HIDDEN)
        shapes[f"{layer}.down"] = (HIDDEN, INNER)
        shapes[f"{layer}.scale"] = ()
        for expert in range(EXPERTS):
            shapes[f"{layer}.{expert}.w1"] = shapes[f"{layer}.{expert}.w3"] = (INNER, HIDDEN)
            shapes[f"{layer}.{expert}.w2"] = (HIDDEN, INNER)
        shapes[f"{layer}.fused_experts"] = (EXPERTS, HIDDEN, 2 * INNER)
    return shapes


def build(tp: TensorParallelRank, layers: Iterable[int], dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Return the empty own tensors of one rank; `lm_head` is tied to `embed`."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (-(-VOCABULARY // (4 * tp.size)) * 4, HIDDEN), "norm": (HIDDEN,)}
    kv_heads = max(KV_HEADS // tp.size, 1)
    for layer in layers:
        shapes[f"{layer}.qkv"] = ((HEADS // tp.size + 2 * kv_heads) * HEAD, HIDDEN)
        shapes[f"{layer}.o"] = (HIDDEN, HEADS * HEAD // tp.size)
        shapes[f"{layer}.gate_up"] = (2 * INNER // tp.size, HIDDEN)
        shapes[f"{layer}.down"] = (HIDDEN, INNER // tp.size)
        shapes[f"{layer}.scale"] = (1,)
        shapes[f"{layer}.w13"] = (EXPERTS, 2 * INNER // tp.size, HIDDEN)
        shapes[f"{layer}.w2"] = (EXPERTS, HIDDEN, INNER // tp.size)
        shapes[f"{layer}.fused_w13"] = (EXPERTS, 2 * INNER // tp.size, HIDDEN)
    tensors = {
        name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
        for name, shape in shapes.items()
    }
    return {**tensors, "lm_head": tensors["embed"]}


def load(tensors: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]], tp: TensorParallelRank) -> None:
    """Load the checkpoint's tensors into the own tensors of one rank; other layers' tensors are skipped."""
    for name, loaded in weights:
        prefix, _, short = name.partition(".")
        if name == "embed":
            load_vocabulary(tensors["embed"], loaded, tp, VOCABULARY)
        elif name == "norm":
            tensors["norm"].data.copy_(loaded)
        elif f"{prefix}.qkv" not in tensors:
            continue
        elif short in ("q", "k", "v"):
            load_qkv(tensors[f"{prefix}.qkv"], loaded, tp, short, HEADS, KV_HEADS, HEAD)
        elif short in ("gate", "up"):
            load_merged_column(tensors[f"{prefix}.gate_up"], loaded, tp, int(short == "up"), [INNER, INNER])
        elif short in ("o", "down", "scale"):
            load_row_parallel(tensors[name], loaded, tp)
        elif short == "fused_experts":
            load_fused_experts(tensors[f"{prefix}.fused_w13"], loaded, tp)
        else:
            expert, _, shard = short.partition(".")
            own = "w2" if shard == "w2" else "w13"
            load_expert(tensors[f"{prefix}.{own}"], loaded, tp, int(expert), shard)
