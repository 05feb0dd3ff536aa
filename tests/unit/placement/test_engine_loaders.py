"""Loaders of engines beyond those of the small model: each map loads the bytes that the loader loads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rfork.placement.placement_map import PlacementMap
from rfork.placement.recorder import Recorder
from tests.unit.placement import engine_loaders
from tests.unit.placement.engine_loaders import TensorParallelRank
from tests.unit.placement.map_bytes import INTEGERS, PADDING, filled_from_checkpoint, random_tensor

TP = TensorParallelRank(1, 2)


def load_transposed_experts(own: torch.Tensor, weight: torch.Tensor) -> None:
    for expert in range(2):
        for shard in ("w1", "w3"):
            engine_loaders.load_expert(own, weight, TP, expert, shard, transposed=True)


Case = tuple[Callable[[torch.Tensor, torch.Tensor], object], tuple[int, ...], tuple[int, ...]]
CASES: dict[str, Case] = {
    "column parallel": (lambda own, weight: engine_loaders.load_column_parallel(own, weight, TP), (16, 6), (8, 6)),
    "column parallel bias": (lambda own, weight: engine_loaders.load_column_parallel(own, weight, TP), (16,), (8,)),
    "row parallel": (lambda own, weight: engine_loaders.load_row_parallel(own, weight, TP), (6, 16), (6, 8)),
    "gate and up in one tensor": (
        lambda own, weight: engine_loaders.load_merged_column_fused_on_disk(own, weight, TP, [16, 16]),
        (32, 6),
        (16, 6),
    ),
    "gate and up alternate": (
        lambda own, weight: engine_loaders.load_interleaved_experts(own, weight, TP),
        (3, 16, 6),
        (3, 8, 6),
    ),
    "rotary halves alternate": (
        lambda own, weight: engine_loaders.load_rotary_permuted(own, weight, TP, 4),
        (32, 6),
        (16, 6),
    ),
    "transposed expert": (
        load_transposed_experts,
        (6, 16),
        (2, 16, 6),
    ),
}


def map_of(case: Case) -> PlacementMap:
    loader, shape, own_shape = case
    own = torch.nn.Parameter(torch.empty(own_shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
    with Recorder() as recorder:
        loader(own, recorder.tensor("weight", torch.bfloat16, shape))
    return recorder.placement_map({"own": own})


@pytest.mark.parametrize("name", CASES)
def test_maps_load_the_bytes_of_the_loader(name: str) -> None:
    """The rows of the map fill the parameter as the loader does."""
    loader, shape, own_shape = CASES[name]
    weight = random_tensor(shape, torch.bfloat16)
    expected = torch.full((2 * torch.Size(own_shape).numel(),), PADDING, dtype=torch.uint8)
    loader(torch.nn.Parameter(expected.view(torch.bfloat16).view(own_shape), requires_grad=False), weight)
    assert torch.equal(expected, filled_from_checkpoint(map_of(CASES[name]), {"weight": weight})["own"])


def test_rotary_permutation_has_two_boxes_per_head() -> None:
    """Interleaved halves are boxes with a step in the own tensor, not one box per row."""
    assert 2 * 2 * 4 // 2 == len(map_of(CASES["rotary halves alternate"]))


def test_integer_dtypes_cover_the_item_sizes() -> None:
    """The comparison of bytes supports each item size of the tests."""
    assert all(dtype.itemsize == size for size, dtype in INTEGERS.items())
