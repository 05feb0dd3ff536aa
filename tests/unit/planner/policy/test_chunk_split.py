"""Parts of alternating runs of chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planner.policy.chunk_split import ALTERNATING_RUNS, split_alternately
from rfork.image.ranges import Range, count, intersect, normalise


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [0.7, 0.3], [0.45, 0.1, 0.45], [3.0, 1.0, 1.0, 1.0]])
@pytest.mark.parametrize("chunks", [((0, 1),), ((0, 7),), ((0, 64),), ((3, 40), (50, 51), (60, 500))])
def test_each_part_has_its_share_of_every_prefix(chunks: tuple[Range, ...], weights: Sequence[float]) -> None:
    """The parts cover the chunks, each chunk once."""
    parts = split_alternately(chunks, weights)
    assert len(weights) == len(parts)
    assert chunks == normalise(piece for part in parts for piece in part)
    assert count(chunks) == sum(map(count, parts))
    run = count(chunks) / ALTERNATING_RUNS + 1
    for reached in range(1, 501):
        before = count(intersect(chunks, ((0, reached),)))
        for weight, part in zip(weights, parts, strict=True):
            share = weight / sum(weights) * before
            assert abs(count(intersect(part, ((0, reached),))) - share) <= 2 * run
