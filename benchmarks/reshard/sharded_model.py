"""Plain PyTorch model of one tensor-parallel rank, which loads checkpoints as engines do: slices, and fused tensors.

Column-parallel tensors keep rows of the checkpoint's, row-parallel ones columns; query, key and value are fused, and so
are gate and up. `ShardedEngine` adapts it for `rfork.engines.load_or_fork`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks import shapes
from rfork.engines.relocation import WeightsOf, recorded_weights
from rfork.placement.placement_map import PlacementMap, TensorTable, TensorType
from rfork.placement.recorder import Recorder

FUSED: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Own tensor and position in it, by the part of a checkpoint tensor's name."""
ROW_PARALLEL = ("o_proj", "down_proj")
REPLICATED = ("norm",)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. All are divisible by the number of ranks."""

    layers: int = 8
    hidden: int = 2048
    intermediate: int = 8192
    key_value: int = 512
    vocabulary: int = 32_000

    def checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each checkpoint tensor, by name."""
        return shapes.llama(self.layers, self.hidden, self.intermediate, self.key_value, self.vocabulary)


class ShardedModel(nn.Module):
    """One rank of the model. Its parameters are named after the checkpoint's, with `FUSED` names."""

    def __init__(self, shape: Shape, rank: int, size: int, device: str = "cpu") -> None:
        super().__init__()
        self.rank, self.size = rank, size
        fused: dict[str, list[tuple[int, ...]]] = {}
        for name, sizes in shape.checkpoint().items():
            own, position = own_name(name)
            parts = fused.setdefault(own, [])
            parts.insert(position, self._part_shape(name, sizes))
        self._offsets: dict[str, list[int]] = {}
        self.tensors: dict[str, nn.Parameter] = {}
        for own, parts in fused.items():
            rows = [part[0] for part in parts]
            self._offsets[own] = [sum(rows[:index]) for index in range(len(rows))]
            value = torch.empty((sum(rows), *parts[0][1:]), dtype=torch.bfloat16, device=device)
            self.tensors[own] = nn.Parameter(value, requires_grad=False)
            self.register_parameter(own.replace(".", "_"), self.tensors[own])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load this rank's part of a checkpoint."""
        for name, value in weights:
            own, position = own_name(name)
            sizes = self._part_shape(name, tuple(value.shape))
            for dim, size in enumerate(sizes):
                value = value.narrow(dim, self.rank * size if size != value.shape[dim] else 0, size)
            begin = self._offsets[own][position]
            self.tensors[own].data.narrow(0, begin, sizes[0]).copy_(value)

    def _part_shape(self, name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(part in name for part in REPLICATED):
            return sizes
        dim = 1 if any(part in name for part in ROW_PARALLEL) else 0
        return tuple(size // self.size if index == dim else size for index, size in enumerate(sizes))


def own_name(name: str) -> tuple[str, int]:
    """Return the own tensor of a checkpoint tensor, and its position in it."""
    for part, (fused, position) in FUSED.items():
        if f".{part}." in name:
            return name.replace(part, fused), position
    return name, 0


def checkpoint_table(shape: Shape) -> TensorTable:
    """Return the names and types of the checkpoint's tensors."""
    sizes = shape.checkpoint()
    return TensorTable(sizes, (TensorType("bfloat16", 2, each) for each in sizes.values()))


def random_weights(shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's tensors, the same in every process."""
    for index, (name, sizes) in enumerate(shape.checkpoint().items()):
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, 1 << 15, (sizes[-1],), dtype=torch.int16, generator=generator)
        rows = torch.arange(sizes[0] if len(sizes) == 2 else 1, dtype=torch.int16)
        yield name, (rows[:, None] ^ row).view(torch.bfloat16).reshape(sizes)


class ShardedEngine:
    """Builds and loads one rank; implements `rfork.engines.relocation.RelocatingEngine`."""

    def __init__(self, shape: Shape, rank: int, size: int) -> None:
        self._shape, self._rank, self._size = shape, rank, size

    def checkpoint_tensors(self) -> TensorTable:
        """Return the names and types of the checkpoint's tensors."""
        return checkpoint_table(self._shape)

    def record(self, checkpoint: TensorTable) -> PlacementMap:
        """Return the placement map of this rank."""
        twin = ShardedModel(self._shape, self._rank, self._size, device="meta")
        with Recorder() as recorder:
            twin.load_weights(recorded_weights(recorder, checkpoint))
        return recorder.placement_map(dict(twin.named_parameters()))

    def live_tensors(self, module: nn.Module, placement_map: PlacementMap) -> tuple[dict[str, torch.Tensor], str]:
        """Return all tensors: nothing changes them after loading."""
        return {name: value.data for name, value in module.named_parameters()}, ""

    def empty(self) -> ShardedModel:
        """Return a model without weights."""
        return ShardedModel(self._shape, self._rank, self._size)

    def load_from(self, weights_of: WeightsOf) -> ShardedModel:
        """Return a model with weights."""
        model = self.empty()
        model.load_weights(weights_of(model))
        return model
