"""A plan covers every leaf of a chunk with the right bytes, within the scratch buffer, for any memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork.image.capture import image_from_tensors
from rfork.image.host_memory import host_view
from rfork.image.leaf_plan import ALIGNMENT, MAX_SHORT_INPUT, WIDE_ALIGNMENT, LeafPlan, leaf_plan
from tests.unit.image.planned_leaves import planned_leaves

LEAF = 2048
ARENA = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
"""Memory that the runs of the tests are in; torch aligns it to 64 bytes."""
Runs = list[tuple[int, int]]
"""Offsets in the arena and lengths."""


def plan_for(runs: Runs, max_scratch_bytes: int = 2 * LEAF) -> LeafPlan:
    addresses = np.array([ARENA.data_ptr() + offset for offset, _ in runs], dtype=np.int64)
    return leaf_plan(addresses, np.array([length for _, length in runs], dtype=np.int64), LEAF, max_scratch_bytes)


def leaves_of(runs: Runs) -> list[bytes]:
    content = b"".join(bytes(host_view(ARENA.data_ptr() + offset, length)) for offset, length in runs)
    return [content[low : low + LEAF] for low in range(0, len(content), LEAF)]


def tiny_runs(source: random.Random) -> Runs:
    """Return more runs than a leaf has in an ordinary model."""
    return [(source.randint(0, 9), source.randint(0, 9)) for _ in range(source.randint(500, 1000))]


def adjacent_runs(sizes: list[int]) -> Runs:
    """Return runs without gaps."""
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


lengths = st.one_of(st.integers(0, 300), st.integers(1, 4).map(LEAF.__mul__), st.integers(0, 5 * LEAF))
memory = st.one_of(
    st.lists(st.tuples(st.integers(0, 4096), lengths), max_size=40),
    st.lists(lengths, max_size=20).map(adjacent_runs),
    st.lists(st.tuples(st.integers(0, 64).map(WIDE_ALIGNMENT.__mul__), lengths), max_size=10),
    st.integers(0, 999).map(lambda seed: tiny_runs(random.Random(seed))),
)


@settings(max_examples=150, deadline=None)
@given(memory, st.integers(1, 6).map(LEAF.__mul__))
def test_a_plan_has_the_bytes_of_each_leaf(runs: Runs, max_scratch_bytes: int) -> None:
    """Read in place or gathered, the leaves are the chunk's, for runs of any length, number and address."""
    plan = plan_for(runs, max_scratch_bytes)
    assert sum(length for _, length in runs) == plan.length
    assert leaves_of(runs) == planned_leaves(plan)


@settings(max_examples=150, deadline=None)
@given(memory, st.integers(1, 6).map(LEAF.__mul__))
def test_a_plan_keeps_the_limits_of_the_kernel(runs: Runs, max_scratch_bytes: int) -> None:
    """Addresses are aligned, and the scratch buffer has its maximum size or less."""
    plan = plan_for(runs, max_scratch_bytes)
    assert plan.scratch_bytes <= max(max_scratch_bytes, LEAF + 64)
    assert not (plan.addresses % ALIGNMENT).any()
    assert plan.is_wide == (not (plan.addresses % WIDE_ALIGNMENT).any())


@pytest.mark.parametrize("last", [1, MAX_SHORT_INPUT, MAX_SHORT_INPUT + 1, LEAF - 1])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_last_leaf_of_any_length_is_planned(last: int, offset: int) -> None:
    """Up to 240 bytes are left to the host; more are a launch of their own."""
    runs = [(offset, LEAF), (5 * LEAF + 3, last)]
    plan = plan_for(runs)
    assert leaves_of(runs) == planned_leaves(plan)
    assert (last if last <= MAX_SHORT_INPUT else 0) == plan.short_bytes
    assert 1 + (last > MAX_SHORT_INPUT) == len(plan.launches)


@pytest.mark.parametrize("offset", [0, 4, 32])
def test_one_aligned_run_is_read_in_place(offset: int) -> None:
    """It is one launch that gathers nothing."""
    plan = plan_for([(offset, 9 * LEAF)])
    assert 1 == len(plan.launches)
    assert 0 == len(plan.gathered)
    assert 0 == plan.scratch_bytes
    assert [ARENA.data_ptr() + offset + leaf * LEAF for leaf in range(9)] == plan.addresses.tolist()


def test_adjacent_runs_are_read_in_place() -> None:
    """Nothing is gathered if runs follow each other in memory, whatever their lengths; empty ones do not matter."""
    plan = plan_for([*adjacent_runs([100, 7, 5 * LEAF]), (3, 0), (5 * LEAF + 107, LEAF - 107)])
    assert 6 == len(plan.addresses)
    assert 0 == len(plan.gathered)


def test_only_leaves_that_span_runs_are_gathered() -> None:
    """The others of the same runs are read in place, in one launch with them."""
    plan = plan_for([(0, 3 * LEAF + 16), (LEAF, 5 * LEAF - 16)])
    assert [3] == plan.gathered.tolist()
    assert 1 == len(plan.launches)
    assert LEAF == plan.scratch_bytes


def test_no_memory_is_an_empty_plan() -> None:
    """A chunk without bytes has no leaf and no launch."""
    plan = plan_for([])
    assert 0 == plan.length
    assert () == plan.launches
    assert [] == planned_leaves(plan)


def test_the_plan_of_a_chunk_is_that_of_its_memory() -> None:
    """A chunk's first and last run of memory are cut to it, and the plan is computed once."""
    image = image_from_tensors({str(index): torch.rand(200_000 + index) for index in range(5)})
    chunks = image.layout.chunks
    assert 3 < len(chunks)
    for chunk, (begin, end) in enumerate(chunks):
        with image.readable(begin, end) as views:
            assert b"".join(views) == b"".join(planned_leaves(image.leaf_plan(chunk)[1]))
        assert image.leaf_plan(chunk) is image.leaf_plan(chunk)
