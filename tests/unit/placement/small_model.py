"""The small model of `engine_loaders` in several layouts: its checkpoint, the map of each rank, and loaded ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from rfork.placement.placement_map import PlacementMap
from rfork.placement.recorder import Recorder
from tests.unit.placement import engine_loaders
from tests.unit.placement.engine_loaders import TensorParallelRank
from tests.unit.placement.map_bytes import random_tensor

LAYERS = 2
DTYPE = torch.bfloat16


@cache
def checkpoint() -> Mapping[str, torch.Tensor]:
    return {name: random_tensor(shape, DTYPE) for name, shape in engine_loaders.checkpoint_shapes(LAYERS).items()}


@cache
def map_of_rank(rank: int, size: int, layers: tuple[int, ...] = tuple(range(LAYERS))) -> PlacementMap:
    """Return the map of one rank of the small model, recorded from its loader."""
    tp = TensorParallelRank(rank, size)
    tensors = engine_loaders.build(tp, layers, DTYPE, "meta")
    with Recorder() as recorder:
        weights = ((name, recorder.tensor(name, DTYPE, each.shape)) for name, each in checkpoint().items())
        engine_loaders.load(tensors, weights, tp)
    return recorder.placement_map(tensors)


def loaded_rank(rank: int, size: int, layers: tuple[int, ...] = tuple(range(LAYERS))) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank, loaded from the checkpoint itself."""
    tp = TensorParallelRank(rank, size)
    tensors = engine_loaders.build(tp, layers, DTYPE, "cpu")
    engine_loaders.load(tensors, checkpoint().items(), tp)
    return tensors


ALL_LAYERS = tuple(range(LAYERS))


def ranks_of(size: int, layers: tuple[int, ...] = ALL_LAYERS) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(rank, size, layers) for rank in range(size)]


LAYOUTS: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
    "TP 1": ranks_of(1),
    "TP 2": ranks_of(2),
    "TP 4 with replicated key and value heads": ranks_of(4),
    "PP 2": [*ranks_of(1, (0,)), *ranks_of(1, (1,))],
    "PP 2 with TP 2": [*ranks_of(2, (0,)), *ranks_of(2, (1,))],
}
