"""Shards of DTensors as boxes of checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rfork.engines.meta_model import load_shards
from rfork.engines.relocation import recorded_weights, tensors_of
from rfork.engines.tensor_parallel import is_sharded, local_tensor, shard_of
from rfork.errors import ModelError
from rfork.placement.placement_map import TensorTable, TensorType
from rfork.placement.recorder import Recorder

Box = tuple[tuple[int, ...], tuple[int, ...]]
MakeRank = Callable[[tuple[int, ...], Placement, int, int], nn.Module]


@pytest.fixture
def sharded() -> Iterator[MakeRank]:
    """Returns one rank of a module with one parameter: its shape, placement, rank and number of ranks."""

    def make(shape: tuple[int, ...], placement: Placement, rank: int, size: int) -> nn.Module:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        mesh = init_device_mesh("cpu", (size,))
        complete = torch.empty(shape, device="meta")
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(complete, mesh, [placement], src_data_rank=None))
        return module

    yield make
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def boxes_of(module: nn.Module, shape: tuple[int, ...]) -> list[Box]:
    """Return the start and the sizes of each recorded box."""
    checkpoint = TensorTable(["weight"], [TensorType("float32", 4, shape)])
    with Recorder() as recorder:
        load_shards(module, recorded_weights(recorder, checkpoint))
    placement_map = recorder.placement_map(tensors_of(module))
    assert {} == placement_map.computed
    assert {} == placement_map.unwritten_elements
    return [(row.start, row.sizes) for row in placement_map]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("rows", [6, 7, 5, 3])
def test_a_shard_is_a_chunk_of_torch(sharded: MakeRank, rows: int, dim: int, rank: int) -> None:
    """Also if the sizes of the shards differ, as those of `torch.chunk`."""
    shape = (rows, 8) if dim == 0 else (8, rows)
    chunks = torch.arange(rows).chunk(3)
    chunk = chunks[rank]
    start, size = int(chunk[0]), len(chunk)
    expected = ((start, 0), (size, 8)) if dim == 0 else ((0, start), (8, size))
    assert [expected] == boxes_of(sharded(shape, Shard(dim), rank, 3), shape)


def test_a_rank_may_have_no_row(sharded: MakeRank) -> None:
    """Four rows on three ranks: two, two and none."""
    assert [] == boxes_of(sharded((4, 8), Shard(0), 2, 3), (4, 8))


def test_a_replicated_tensor_is_complete(sharded: MakeRank) -> None:
    """Every rank has all of it."""
    assert [((0, 0), (4, 8))] == boxes_of(sharded((4, 8), Replicate(), 1, 2), (4, 8))


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, [((0, 0), (3, 4)), ((5, 0), (3, 4))]), (1, [((3, 0), (2, 4)), ((8, 0), (2, 4))])],
)
def test_a_packed_shard_has_a_box_of_each_part(sharded: MakeRank, rank: int, expected: list[Box]) -> None:
    """Two parts of five rows: each rank has a chunk of both."""
    assert expected == boxes_of(sharded((10, 4), _StridedShard(0, split_factor=2), rank, 2), (10, 4))


def test_a_shard_is_filled_from_the_complete_tensor(sharded: MakeRank) -> None:
    """The bytes are those that transformers would read from a file."""
    module = sharded((5, 4), Shard(0), 1, 2)
    stored = torch.arange(20.0).view(5, 4)
    assert torch.equal(stored[3:], shard_of(module.get_parameter("weight"), stored))


def test_a_missing_weight_is_named(sharded: MakeRank) -> None:
    """It is never left uninitialised."""
    with pytest.raises(ModelError, match="there is no weight for weight"):
        load_shards(sharded((4, 8), Shard(0), 0, 2), [("other", torch.zeros(1))])


def test_a_plain_tensor_is_its_own_shard() -> None:
    """Without a process group, no tensor is sharded."""
    tensor = torch.zeros(2)
    assert not is_sharded(tensor)
    assert local_tensor(tensor) is tensor
    assert shard_of(tensor, tensor) is tensor
