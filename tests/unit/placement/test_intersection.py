"""Relocation between layouts: copies by the boxes result in the bytes of a direct load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork.placement.intersection import CopyType, StridedCopy, intersect
from rfork.placement.placement_map import PlacementMap
from rfork.placement.recorder import Recorder
from tests.unit.placement import engine_loaders
from tests.unit.placement.map_bytes import (
    INTEGERS,
    PADDING,
    filled_from_checkpoint,
    filled_from_sources,
    random_tensor,
)
from tests.unit.placement.small_model import DTYPE, LAYOUTS, checkpoint, loaded_rank, map_of_rank


def assert_equal_to_loading(memory: Mapping[str, torch.Tensor], rank: int, size: int, layers: tuple[int, ...]) -> None:
    """Check that own tensors have the bytes of a direct load, except for padding."""
    expected = loaded_rank(rank, size, layers)
    unwritten = map_of_rank(rank, size, layers).unwritten_elements
    for name, bytes_of_tensor in memory.items():
        found = bytes_of_tensor.view(DTYPE).view(expected[name].shape)
        rows = len(found) - unwritten.get(name, 0) // engine_loaders.HIDDEN
        integers = INTEGERS[DTYPE.itemsize]
        assert torch.equal(expected[name][:rows].view(integers), found[:rows].view(integers)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_maps_load_the_checkpoint(layout: str) -> None:
    """Copying by a map's rows from the checkpoint results in the bytes that the loader writes."""
    for each in LAYOUTS[layout]:
        assert_equal_to_loading(filled_from_checkpoint(map_of_rank(*each), checkpoint()), *each)


@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_any_layout_fills_any_layout(source_layout: str, target_layout: str) -> None:
    """Each rank of each layout is filled from the ranks of each other layout, each byte once."""
    maps = [map_of_rank(*each) for each in LAYOUTS[source_layout]]
    memory = [filled_from_checkpoint(each, checkpoint()) for each in maps]
    for each in LAYOUTS[target_layout]:
        relocation = intersect(maps, map_of_rank(*each))
        assert () == relocation.uncovered
        assert_equal_to_loading(filled_from_sources(relocation, memory, map_of_rank(*each)), *each)


def test_mixed_layouts_fill_one_target() -> None:
    """A rank of TP 2 and one of TP 1 with half of the layers are used together."""
    maps = [map_of_rank(0, 2), map_of_rank(0, 1, (0,)), map_of_rank(0, 1, (1,))]
    relocation = intersect(maps, map_of_rank(0, 1))
    assert () == relocation.uncovered
    assert {0, 1, 2} == set(relocation.sources)


def test_the_first_source_is_preferred() -> None:
    """If the first source has everything, no other one is used."""
    assert {0} == set(intersect([map_of_rank(0, 1), map_of_rank(0, 2)], map_of_rank(1, 2)).sources)


def test_each_byte_is_read_once() -> None:
    """The copies read as many bytes as the target has without padding."""
    relocation = intersect([map_of_rank(rank, 4) for rank in range(4)], map_of_rank(0, 1))
    own = map_of_rank(0, 1).own
    size = sum(torch.Size(own.type_of(index).shape).numel() for index in range(len(own)))
    padding = sum(map_of_rank(0, 1).unwritten_elements.values())
    assert (size - padding) * DTYPE.itemsize == relocation.byte_count


def test_one_layout_is_copied_by_contiguous_copies() -> None:
    """Between equal layouts, every copy is contiguous on both sides."""
    copies = list(intersect([map_of_rank(0, 1)], map_of_rank(0, 1)))
    assert all(copy.copy_type.source_strides in ((), (DTYPE.itemsize,)) for copy in copies)
    assert all(copy.copy_type.target_strides in ((), (DTYPE.itemsize,)) for copy in copies)


def test_missing_slices_are_named() -> None:
    """A target that needs another rank's slice names its tensor and the slice."""
    relocation = intersect([map_of_rank(0, 2)], map_of_rank(0, 1))
    reasons = dict(relocation.uncovered)
    assert reasons["0.down"] == "no source has 0.down[0:8, 8:16]"
    assert "norm" not in reasons


def test_padding_is_reported() -> None:
    """Tensors with padding need no source for it and are listed."""
    assert ("embed",) == intersect([map_of_rank(0, 2), map_of_rank(1, 2)], map_of_rank(0, 1)).unwritten


def simple_map(
    scale: float = 1, shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = DTYPE, name: str = "weight"
) -> PlacementMap:
    """Return the map of a parameter that is loaded as it is, or scaled."""
    own = torch.empty(shape, dtype=dtype, device="meta")
    with Recorder() as recorder:
        weight = recorder.tensor(name, dtype, shape)
        own.copy_(weight if scale == 1 else weight * scale)
    return recorder.placement_map({"own": own})


def test_a_computed_target_is_refused_by_name() -> None:
    """A target tensor that its loader computes cannot be filled."""
    assert (("own", "computed on load by mul"),) == intersect([simple_map()], simple_map(scale=2)).uncovered


def test_a_computed_source_is_refused_by_name() -> None:
    """A source tensor that its loader computed is not used, and the reason names the operation."""
    (uncovered,) = intersect([simple_map(scale=2)], simple_map()).uncovered
    assert "no source has weight[0:4, 0:6]; sources have tensors that are not as loaded: mul" == uncovered.reason


@pytest.mark.parametrize("other", [simple_map(shape=(6, 4)), simple_map(dtype=torch.float16)], ids=["shape", "dtype"])
def test_another_checkpoint_is_refused(other: PlacementMap) -> None:
    """A source whose checkpoint tensor has another shape or dtype is not used."""
    (uncovered,) = intersect([other], simple_map()).uncovered
    assert "is bfloat16[4, 6] for the target" in uncovered.reason


def test_transposed_tensors_are_copied_by_strides() -> None:
    """A target that keeps the transposed tensor swaps the strides."""
    own = torch.empty(6, 4, dtype=DTYPE, device="meta")
    with Recorder() as recorder:
        own.copy_(recorder.tensor("weight", DTYPE, (4, 6)).t())
    target = recorder.placement_map({"own": own})
    expected = StridedCopy(0, "own", 0, "own", 0, CopyType(2, (6, 4), (2, 12), (8, 2)))
    assert [expected] == list(intersect([simple_map()], target))


def test_many_boxes_of_one_tensor_are_indexed() -> None:
    """A fused tensor of many experts is filled from a source with other expert boundaries."""
    experts = 50

    def map_with(size: int) -> PlacementMap:
        own = torch.empty(experts * 4, 6, dtype=DTYPE, device="meta")
        with Recorder() as recorder:
            weight = recorder.tensor("weight", DTYPE, (experts * 4, 6))
            for begin in range(0, experts * 4, size):
                own[begin : begin + size].copy_(weight[experts * 4 - begin - size : experts * 4 - begin])
        return recorder.placement_map({"own": own})

    maps = map_with(4), map_with(10)
    values = {"weight": random_tensor((experts * 4, 6), DTYPE)}
    relocation = intersect([maps[0]], maps[1])
    assert () == relocation.uncovered
    found = filled_from_sources(relocation, [filled_from_checkpoint(maps[0], values)], maps[1])
    assert torch.equal(filled_from_checkpoint(maps[1], values)["own"], found["own"])


class FusedLayout(NamedTuple):
    """Layout in which each rank has one fused, permuted and padded tensor of slices of q, k and v."""

    size: int
    dim: int
    """Dimension of the checkpoint tensors that is divided among the ranks."""
    fused_dim: int
    order: tuple[int, ...]
    names: tuple[str, ...]
    padding: int

    def empty(self, shape: Sequence[int], device: str) -> torch.Tensor:
        """Return the own tensor of a rank; `shape` is that of each checkpoint tensor."""
        sizes = list(shape)
        sizes[self.dim] //= self.size
        own = [sizes[dim] for dim in self.order]
        own[self.fused_dim] = own[self.fused_dim] * len(self.names) + self.padding
        return torch.zeros(own, dtype=DTYPE, device=device)

    def load(self, own: torch.Tensor, weights: Mapping[str, torch.Tensor], rank: int) -> None:
        """Load the slices of one rank."""
        begin = 0
        for name in self.names:
            weight = weights[name]
            size = weight.shape[self.dim] // self.size
            part = weight.narrow(self.dim, rank * size, size).permute(self.order)
            own.narrow(self.fused_dim, begin, part.shape[self.fused_dim]).copy_(part)
            begin += part.shape[self.fused_dim]

    def map_of_rank(self, shape: Sequence[int], rank: int) -> PlacementMap:
        """Return the map of one rank, encoded and decoded."""
        own = self.empty(shape, "meta")
        with Recorder() as recorder:
            self.load(own, {name: recorder.tensor(name, DTYPE, shape) for name in sorted(self.names)}, rank)
        return PlacementMap.from_bytes(recorder.placement_map({"fused": own}).to_bytes())


@st.composite
def relayouts(draw: st.DrawFn) -> tuple[tuple[int, ...], FusedLayout, FusedLayout]:
    """Return the shape of each checkpoint tensor, and two layouts."""
    shape = tuple(draw(st.lists(st.sampled_from([4, 8]), min_size=1, max_size=3)))
    dims = range(len(shape))
    layouts = st.builds(
        FusedLayout,
        size=st.sampled_from([1, 2, 4]),
        dim=st.sampled_from(dims),
        fused_dim=st.sampled_from(dims),
        order=st.permutations(dims).map(tuple),
        names=st.permutations(("q", "k", "v")).map(tuple),
        padding=st.integers(0, 2),
    )
    return shape, draw(layouts), draw(layouts)


@settings(max_examples=150, deadline=None)
@given(relayouts())
def test_random_layouts_fill_each_other(example: tuple[tuple[int, ...], FusedLayout, FusedLayout]) -> None:
    """For any split, fusion, transposition and padding, copies between layouts result in the bytes of a direct load."""
    shape, source_layout, target_layout = example
    weights = {name: random_tensor(shape, DTYPE) for name in source_layout.names}
    maps = [source_layout.map_of_rank(shape, rank) for rank in range(source_layout.size)]
    memory = [filled_from_checkpoint(each, weights) for each in maps]
    for rank in range(target_layout.size):
        target = target_layout.map_of_rank(shape, rank)
        relocation = intersect(maps, target)
        assert () == relocation.uncovered
        expected = target_layout.empty(shape, "cpu")
        expected.view(torch.uint8).fill_(PADDING)
        target_layout.load(expected, weights, rank)
        found = filled_from_sources(relocation, memory, target)["fused"]
        assert torch.equal(expected.view(-1).view(torch.uint8), found)
