"""Order of copies, verification and serving while boxes are gathered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rfork.image.chunks import Chunks
from rfork.image.ranges import Range
from rfork.source.gather_order import gather_steps

CHUNK = 4
SOURCE = Chunks(40, CHUNK)


def test_a_chunk_is_served_after_the_chunk_that_it_was_copied_from_is_verified() -> None:
    """The second copy reads the same source chunk as the first: it is verified once, after both."""
    steps = gather_steps([(0, 4), (2, 6)], [(0, 4), (4, 8)], SOURCE, Chunks(8, CHUNK))
    assert [[0], [1]] == [step.copies for step in steps]
    assert [[], [0, 1]] == [step.verified for step in steps]
    assert [[], [0, 1]] == [step.served for step in steps]


def test_copies_follow_the_order_of_the_box_image() -> None:
    """So that its chunks are complete early, whatever the order of the boxes in the request."""
    steps = gather_steps([(0, 4), (8, 12)], [(4, 8), (0, 4)], SOURCE, Chunks(8, CHUNK))
    assert [[1], [0]] == [step.copies for step in steps]
    assert [[0], [1]] == [step.served for step in steps]


def test_small_copies_are_one_step() -> None:
    """A step has about one chunk of boxes."""
    spans = [(index, index + 1) for index in range(8)]
    assert [[0, 1, 2, 3], [4, 5, 6, 7]] == [
        step.copies for step in gather_steps(spans, spans, SOURCE, Chunks(8, CHUNK))
    ]


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[Range], list[Range]]:
    """Return ranges that copies read, and ranges without gaps that they write, in any order."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    starts = [draw(st.integers(0, SOURCE.image_bytes - size)) for size in sizes]
    read = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    written = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    pairs = draw(st.permutations(list(zip(read, written, strict=True))))
    return [first for first, _ in pairs], [second for _, second in pairs]


@given(copies())
def test_every_chunk_is_served_once_and_only_verified(spans: tuple[list[Range], list[Range]]) -> None:
    """When a chunk is served, all copies into it are done, and all chunks that they read were verified afterwards."""
    read, written = spans
    boxes = Chunks(max(end for _, end in written), CHUNK)
    copied: set[int] = set()
    verified: set[int] = set()
    served: list[int] = []
    for step in gather_steps(read, written, SOURCE, boxes):
        copied.update(step.copies)
        assert not verified.intersection(chunk for index in step.copies for chunk in SOURCE.covering(*read[index]))
        verified.update(step.verified)
        for chunk in step.served:
            into = [index for index, part in enumerate(written) if chunk in boxes.covering(*part)]
            assert copied.issuperset(into)
            assert verified.issuperset(each for index in into for each in SOURCE.covering(*read[index]))
        served += step.served
    assert sorted(served) == list(range(len(boxes)))
    assert copied == set(range(len(read)))
