"""Assignment of boxes to layouts: each byte comes from one layout that has it, and none that failed is used again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import (
    AllSourcesFailed,
    DeadlineExceeded,
    LayoutMismatch,
    RforkError,
    SourceUnavailable,
    SourceUnreachable,
    SourceWeightsChanged,
    TransportUnavailable,
)
from rfork.peer.base import BoxImage
from rfork.placement.boxes import Box, coverage, divide, wanted_boxes
from rfork.placement.placement_map import PlacementMap
from rfork.receiver.box_assignment import (
    OPENED_FOR_S,
    AssignedPart,
    BoxAssignment,
    OpenedParts,
    check_opened,
    first_and_later,
)
from tests.unit.placement.small_model import LAYOUTS, map_of_rank

RANKS = [rank for ranks in LAYOUTS.values() for rank in ranks]
"""Ranks of TP 1, 2 and 4 (with replicated and padded tensors), of PP 2, and of PP 2 with TP 2."""
COMPLETE = map_of_rank(0, 1)
HALVES = [map_of_rank(0, 2), map_of_rank(1, 2)]
FINAL = DeadlineExceeded("late")
"""Error after which a part is not fetched again from its layout."""

Counts = dict[str, npt.NDArray[np.int64]]


def size_of(boxes: Sequence[Box]) -> int:
    return sum(box.byte_count for box in boxes)


def counts_of(boxes: Sequence[Box]) -> Counts:
    """Return how often each element of each tensor occurs in boxes."""
    counts: Counts = {}
    for box in boxes:
        elements = counts.setdefault(box.tensor, np.zeros(box.shape, dtype=np.int64))
        elements[tuple(slice(*each) for each in box.bounds)] += 1
    return counts


def is_same(one: Counts, other: Counts) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def start(layouts: Sequence[PlacementMap]) -> tuple[BoxAssignment, list[AssignedPart]]:
    """Return an assignment of the complete model, and its first parts."""
    assignment = BoxAssignment(wanted_boxes(COMPLETE), layouts)
    return assignment, assignment.start()


@pytest.mark.parametrize(
    ("layouts", "used"),
    [
        pytest.param([*HALVES, COMPLETE], [2], id="one complete layout before two halves"),
        pytest.param(HALVES, [0, 1], id="two halves"),
        pytest.param([COMPLETE, COMPLETE], [0], id="the first of two equal ones"),
    ],
)
def test_few_large_parts_come_first(layouts: Sequence[PlacementMap], used: list[int]) -> None:
    """The layout with most of the bytes is preferred."""
    assert used == sorted(part.layout for part in start(layouts)[1])


def test_a_failed_part_is_replaced_at_once_while_others_are_in_flight() -> None:
    """Only its boxes are assigned again."""
    assignment, parts = start([*HALVES, map_of_rank(0, 2), map_of_rank(1, 2)])
    failed = next(part for part in parts if part.layout == 1)
    replacements = assignment.failed(failed, FINAL)
    assert is_same(counts_of(failed.boxes), counts_of([box for part in replacements for box in part.boxes]))
    assert parts[0] in assignment.in_flight or parts[1] in assignment.in_flight


@pytest.mark.parametrize(
    "error", [SourceUnavailable("killed"), SourceUnreachable("cut"), AllSourcesFailed("no source worked", ())]
)
def test_a_part_is_fetched_again_once_from_another_instance_of_its_layout(error: RforkError) -> None:
    """After its second failure another layout replaces it."""
    assignment, (part,) = start([COMPLETE, COMPLETE])
    assert [part] == assignment.failed(part, error)
    assert [part] == assignment.in_flight
    (replacement,) = assignment.failed(part, error)
    assert (0, 1) == (part.layout, replacement.layout)


@pytest.mark.parametrize(
    "error", [LayoutMismatch("another one"), DeadlineExceeded("late"), TransportUnavailable("none for host memory")]
)
def test_a_part_that_no_instance_can_serve_is_not_fetched_again(error: RforkError) -> None:
    """Each instance of the layout would fail in the same way."""
    assignment, (part,) = start([COMPLETE, COMPLETE])
    assert [1] == [each.layout for each in assignment.failed(part, error)]


def test_opened_boxes_have_the_requested_version_and_layout() -> None:
    """Boxes of weights that changed during the fork are refused, as are other boxes."""
    check_opened(BoxImage("m#boxes", "v1", "a" * 32, 8), "v1", "a" * 32)
    with pytest.raises(SourceWeightsChanged, match="began to serve version v2"):
        check_opened(BoxImage("m#boxes", "v2", "a" * 32, 8), "v1", "a" * 32)
    with pytest.raises(LayoutMismatch, match="other boxes"):
        check_opened(BoxImage("m#boxes", "v1", "b" * 32, 8), "v1", "a" * 32)


def test_a_fetched_part_is_no_longer_in_flight() -> None:
    """The assignment is complete once all parts are fetched."""
    assignment, parts = start(HALVES)
    for part in parts:
        assert not assignment.is_complete
        assignment.completed(part)
    assert assignment.is_complete


def test_missing_boxes_are_named() -> None:
    """One half does not have all bytes."""
    with pytest.raises(LayoutMismatch, match="no source has"):
        start(HALVES[:1])


def test_a_failure_without_a_replacement_ends_the_assignment() -> None:
    """The other half cannot replace it: the error of the last source is raised."""
    assignment, parts = start(HALVES)
    with pytest.raises(DeadlineExceeded, match="late"):
        assignment.failed(parts[0], FINAL)


@given(
    target=st.sampled_from(RANKS),
    sources=st.lists(st.sampled_from(RANKS), min_size=1, max_size=8),
    failure_rate=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 1 << 30),
)
def test_random_layouts_and_failures(
    target: tuple[int, int, tuple[int, ...]],
    sources: list[tuple[int, int, tuple[int, ...]]],
    failure_rate: float,
    seed: int,
) -> None:
    """It ends with each wanted byte from one layout that has it, or fails because no remaining layout has one."""
    chance = random.Random(seed)
    maps = [map_of_rank(*source) for source in sources]
    wanted = wanted_boxes(map_of_rank(*target))
    assignment = BoxAssignment(wanted, maps)
    fetched: list[AssignedPart] = []
    failed: set[int] = set()
    repeated: list[AssignedPart] = []
    lost: Sequence[Box] = wanted
    try:
        assignment.start()
        while not assignment.is_complete:
            part = chance.choice(assignment.in_flight)
            if chance.random() >= failure_rate:
                fetched.append(part)
                assignment.completed(part)
                continue
            lost = part.boxes
            if chance.random() < 0.5 and part not in repeated:
                repeated.append(part)
                assert [part] == assignment.failed(part, SourceUnavailable("killed"))
                continue
            failed.add(part.layout)
            replacements = assignment.failed(part, FINAL)
            assert failed.isdisjoint(each.layout for each in replacements)
    except (LayoutMismatch, DeadlineExceeded):
        remaining = [each for index, each in enumerate(maps) if index not in failed]
        assert divide(lost, remaining).missing
    else:
        assert is_same(counts_of(wanted), counts_of([box for part in fetched for box in part.boxes]))
    for part in fetched:
        assert not divide(part.boxes, [maps[part.layout]]).missing
    assert len(failed) <= len(maps)


@given(target=st.sampled_from(RANKS), source=st.sampled_from(RANKS))
def test_coverage_is_that_of_an_exact_division(
    target: tuple[int, int, tuple[int, ...]], source: tuple[int, int, tuple[int, ...]]
) -> None:
    """Columns of a map are counted as its division does."""
    wanted = wanted_boxes(map_of_rank(*target))
    exact = size_of(divide(wanted, [map_of_rank(*source)]).parts[0])
    assert [exact] == coverage(wanted, [map_of_rank(*source)])


@pytest.mark.parametrize(("after_s", "is_served"), [(0.0, True), (OPENED_FOR_S - 1, True), (OPENED_FOR_S, False)])
def test_an_image_that_was_opened_is_read_once_and_soon(after_s: float, is_served: bool) -> None:
    """Its source closes it once it is idle, and a part is opened again after its fork has failed."""
    opened, image = OpenedParts(), BoxImage("m#boxes", "v1", "a" * 32, 1)
    part, other = AssignedPart(0, (wanted_boxes(COMPLETE)[0],)), AssignedPart(1, (wanted_boxes(COMPLETE)[0],))
    opened.add(part, image, 100.0)
    assert opened.pop(other, 100.0) is None
    assert (image if is_served else None) == opened.pop(part, 100.0 + after_s)
    assert opened.pop(part, 100.0) is None


def test_boxes_that_a_loader_computes_with_are_needed_first() -> None:
    """All are, if the loader does more than copy."""
    name = wanted_boxes(COMPLETE)[-1].tensor
    placement_map = replace(COMPLETE, read_completely=(name,), only_copies=True)
    first, later = first_and_later(placement_map)
    assert [name] == [box.tensor for box in first]
    assert sorted(wanted_boxes(placement_map)) == sorted([*first, *later])
    assert (wanted_boxes(COMPLETE), []) == first_and_later(replace(COMPLETE, only_copies=False))
