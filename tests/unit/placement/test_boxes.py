"""Boxes of checkpoint tensors: what a map needs, division among sources, encoding, and the map of a box image."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork.placement import boxes as boxes_module
from rfork.placement.boxes import BOXES_FORMAT, Box, box_map, coverage, decode_boxes, divide, encode_boxes, wanted_boxes
from rfork.placement.intersection import intersect
from rfork.placement.placement_map import BoxType, PlacementMap, PlacementMapBuilder, TensorType
from rfork.placement.strided import Bounds, contiguous_strides
from tests.unit.placement.small_model import LAYOUTS, map_of_rank

WEIGHT = Box("weight", "bfloat16", 2, (8, 6), (2, 0), (4, 3))
SCALAR = Box("scale", "float32", 4, (), (), ())


def map_of(parts: Sequence[Box], complete: Sequence[str] = ()) -> PlacementMap:
    """Return a map with one own tensor per box; boxes may repeat, and tensors may be listed without boxes."""
    builder = PlacementMapBuilder()
    for position, box in enumerate(parts):
        index = next((i for i, name in enumerate(builder.checkpoint.names) if name == box.tensor), None)
        if index is None:
            index = builder.checkpoint.append(box.tensor, box.tensor_type)
        if box.byte_count:
            strides = tuple(step * box.itemsize for step in contiguous_strides(box.sizes))
            own = builder.own.append(f"own.{position}", TensorType(box.dtype, box.itemsize, box.sizes, strides))
            builder.append(index, box.start, own, 0, BoxType(box.sizes, strides))
    builder.read_completely.extend(complete)
    return builder.build()


def box_of(*bounds: tuple[int, int], shape: tuple[int, ...] = (8, 6), name: str = "weight") -> Box:
    return Box(name, "bfloat16", 2, shape, (), ()).part(bounds)


def counts_of(parts: Sequence[Box]) -> npt.NDArray[np.int64]:
    """Return how often each element of the one tensor of these boxes occurs in them."""
    counts = np.zeros(parts[0].shape, dtype=np.int64)
    for box in parts:
        counts[tuple(slice(*each) for each in box.bounds)] += 1
    return counts


def test_a_box_is_named_by_its_bounds() -> None:
    """The name contains the tensor and the half-open range of each dimension."""
    assert "weight[2:6,0:3]" == WEIGHT.name


def test_a_scalar_has_a_name_without_bounds() -> None:
    """A scalar has no dimensions."""
    assert "scale[]" == SCALAR.name


def test_bytes_are_those_of_the_elements() -> None:
    """The number of bytes is that of the box, not of its tensor."""
    assert 24 == WEIGHT.byte_count
    assert 4 == SCALAR.byte_count


def test_complete_tensors_are_known() -> None:
    """A box of all elements is the complete tensor, as is that of a scalar."""
    assert box_of((0, 8), (0, 6)).is_complete
    assert SCALAR.is_complete
    assert not WEIGHT.is_complete


def test_the_wanted_box_is_the_bounding_box() -> None:
    """A tensor of which several parts are read is one box."""
    found = wanted_boxes(map_of([box_of((1, 3), (2, 4)), box_of((5, 7), (0, 1))]))
    assert [box_of((1, 7), (0, 4))] == found


def test_computed_tensors_are_wanted_completely() -> None:
    """A tensor whose elements flow into computed values is one complete box, with or without rows."""
    other = box_of((0, 0), (0, 0), name="other")
    found = wanted_boxes(map_of([WEIGHT, other], ["weight", "other"]))
    assert [box_of((0, 8), (0, 6)), box_of((0, 8), (0, 6), name="other")] == found


def test_unused_tensors_are_not_wanted() -> None:
    """A tensor of the checkpoint without rows is no box."""
    assert [SCALAR] == wanted_boxes(map_of([box_of((0, 0), (0, 0)), SCALAR]))


def test_empty_tensors_are_not_wanted() -> None:
    """A tensor without elements is no box, even if an operation reads it."""
    assert [] == wanted_boxes(map_of([box_of((0, 0), (0, 6), shape=(0, 6))], ["weight"]))


def test_boxes_are_in_the_order_of_the_checkpoint() -> None:
    """The order does not depend on the order in which the loader wrote them."""
    names = list(map_of_rank(0, 2).checkpoint.names)
    found = [box.tensor for box in wanted_boxes(map_of_rank(0, 2))]
    assert [name for name in names if name in found] == found


@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_every_wanted_element_has_one_source(source_layout: str, target_layout: str) -> None:
    """Among the ranks of any layout, each element that a rank of another one needs is assigned exactly once."""
    sources = [map_of_rank(*each) for each in LAYOUTS[source_layout]]
    for each in LAYOUTS[target_layout]:
        division = divide(wanted_boxes(map_of_rank(*each)), sources)
        assert () == division.missing
        for wanted in wanted_boxes(map_of_rank(*each)):
            found = [box for part in division.parts for box in part if box.tensor == wanted.tensor]
            assert np.array_equal(counts_of([wanted]), counts_of(found)), wanted.name


@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_every_source_has_its_parts(source_layout: str) -> None:
    """Each source can gather all boxes that it is assigned."""
    sources = [map_of_rank(*each) for each in LAYOUTS[source_layout]]
    division = divide(wanted_boxes(map_of_rank(0, 1)), sources)
    for source, parts in zip(sources, division.parts, strict=True):
        relocation = intersect([source], box_map(parts))
        assert () == relocation.uncovered
        assert sum(box.byte_count for box in parts) == relocation.byte_count


def test_interleaved_rows_of_a_source_are_one_box() -> None:
    """A part consists of many rows of its source where these are adjacent in the checkpoint."""
    names = [box.name for box in divide(wanted_boxes(map_of_rank(0, 1)), [map_of_rank(0, 1)]).parts[0]]
    assert [box.name for box in wanted_boxes(map_of_rank(0, 1))] == names


def test_earlier_sources_are_preferred() -> None:
    """A later source is assigned only what earlier ones do not have."""
    sources = [map_of([box_of((2, 5), (0, 6))]), map_of([box_of((0, 8), (0, 6))]), map_of([box_of((0, 8), (0, 6))])]
    division = divide([box_of((0, 6), (0, 6))], sources)
    assert (box_of((2, 5), (0, 6)),) == division.parts[0]
    assert (box_of((0, 2), (0, 6)), box_of((5, 6), (0, 6))) == division.parts[1]
    assert () == division.parts[2]


def test_missing_boxes_name_their_tensor() -> None:
    """A part that no source has is a box with a reason."""
    division = divide([box_of((0, 8), (0, 6))], [map_of([box_of((0, 4), (0, 6))])])
    assert ((box_of((4, 8), (0, 6)), "no source has weight[4:8, 0:6]"),) == division.missing


def test_tensors_of_another_checkpoint_are_missing() -> None:
    """A source whose tensor has another shape has nothing of it, and the reason has both shapes."""
    ((box, reason),) = divide([box_of((0, 8), (0, 6))], [map_of([box_of((0, 6), (0, 8), shape=(6, 8))])]).missing
    assert box_of((0, 8), (0, 6)) == box
    assert "is bfloat16[8, 6] for the target, bfloat16[6, 8] for a source" in reason


def test_without_sources_everything_is_missing() -> None:
    """A division among no sources has no parts."""
    division = divide([WEIGHT, SCALAR], [])
    assert () == division.parts
    assert [WEIGHT, SCALAR] == [box for box, _ in division.missing]


def test_empty_boxes_are_not_divided() -> None:
    """A box without elements needs no source."""
    assert () == divide([box_of((0, 0), (0, 6))], []).missing


def test_scalars_are_divided() -> None:
    """The first source with a scalar is assigned it."""
    assert ((), (SCALAR,)) == divide([SCALAR], [map_of([WEIGHT]), map_of([SCALAR])]).parts


bounds = st.integers(0, 7).flatmap(lambda begin: st.tuples(st.just(begin), st.integers(begin + 1, 8)))


@st.composite
def cubes(draw: st.DrawFn) -> list[Box]:
    """Return boxes of a tensor of three dimensions."""
    found: list[Bounds] = draw(st.lists(st.tuples(bounds, bounds, bounds), max_size=4))
    return [box_of(*each, shape=(8, 8, 8)) for each in found]


@settings(max_examples=100, deadline=None)
@given(st.tuples(bounds, bounds, bounds), st.lists(cubes(), max_size=4))
def test_any_division_has_each_element_once(wanted: Bounds, sources: list[list[Box]]) -> None:
    """The parts and the missing boxes are disjoint, and together they are the wanted box."""
    box = box_of(*wanted, shape=(8, 8, 8))
    division = divide([box], [map_of(each) for each in sources])
    missing = [each for each, _ in division.missing]
    found = [each for part in division.parts for each in part]
    assert np.array_equal(counts_of([box]), counts_of(found + missing))
    for parts, there in zip(division.parts, sources, strict=True):
        assert () == intersect([map_of(there)], box_map(parts)).uncovered
    for each in missing:
        assert not any(intersect([map_of(there)], box_map([each])) for there in sources)


def test_decoding_returns_the_encoded_boxes() -> None:
    """Encoding keeps everything."""
    assert (WEIGHT, SCALAR) == decode_boxes(encode_boxes([WEIGHT, SCALAR]))


def test_no_boxes_can_be_encoded() -> None:
    """The encoded list may be empty."""
    assert () == decode_boxes(encode_boxes([]))


def test_names_with_any_characters_are_encoded() -> None:
    """A line break in a name is escaped."""
    box = WEIGHT._replace(tensor='a\nb\u2028"[0:1]')
    assert (box,) == decode_boxes(encode_boxes([box]))


def test_many_boxes_are_encoded_compactly() -> None:
    """Boxes of a mixture-of-experts model need less than 10 bytes each."""
    many = [
        box_of((0, 4), (0, 6), name=f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight")
        for layer in range(20)
        for expert in range(100)
        for projection in ("gate_proj", "up_proj", "down_proj")
    ]
    assert len(encode_boxes(many)) < 10 * len(many)


INVALID: dict[str, tuple[object, str]] = {
    "no list": ({}, "not enough values"),
    "number of fields": (["weight", "bfloat16", 2, [8], [0]], "not enough values"),
    "name": ([1, "bfloat16", 2, [8], [0], [1]], "no text"),
    "dtype": (["weight", None, 2, [8], [0], [1]], "no text"),
    "item size": (["weight", "bfloat16", 0, [8], [0], [1]], "item size of 0"),
    "large item size": (["weight", "bfloat16", 32, [8], [0], [1]], "item size of 32"),
    "boolean": (["weight", "bfloat16", True, [8], [0], [1]], "no integer"),
    "fraction": (["weight", "bfloat16", 2, [8], [0.5], [1]], "no integer"),
    "shape": (["weight", "bfloat16", 2, "8", [0], [1]], "no list"),
    "rank": (["weight", "bfloat16", 2, [8, 6], [0], [1]], "other dimensions"),
    "empty box": (["weight", "bfloat16", 2, [8], [0], [0]], "without elements"),
    "negative start": (["weight", "bfloat16", 2, [8], [-1], [1]], "outside its tensor"),
    "end": (["weight", "bfloat16", 2, [8], [7], [2]], "outside its tensor"),
    "end of 64 bits": (["weight", "bfloat16", 1, [8], [(1 << 63) - 1], [1]], "outside its tensor"),
    "start of 64 bits": (["weight", "bfloat16", 1, [8], [1 << 63], [1]], "int too (large|big) to convert"),
    "product of 64 bits": (["weight", "bfloat16", 1, [1 << 32, 1 << 32], [0, 0], [1, 1]], "more than"),
    "large tensor": (["weight", "bfloat16", 2, [1 << 60], [0], [1]], "more than"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_boxes_are_refused(case: str) -> None:
    """A decoded box has elements, and they are elements of its tensor."""
    line, message = INVALID[case]
    with pytest.raises(ValueError, match=message):
        decode_boxes(BOXES_FORMAT.packed(json.dumps(line).encode() + b"\n"))


def test_text_after_a_box_is_refused() -> None:
    """A line is one box."""
    with pytest.raises(ValueError, match="text after a box"):
        decode_boxes(BOXES_FORMAT.packed(b'["weight","bfloat16",2,[8],[0],[1]] 1\n'))


def test_repeated_boxes_are_refused() -> None:
    """A box image has each box once."""
    with pytest.raises(ValueError, match=r"two boxes weight\[2:6,0:3\]"):
        decode_boxes(encode_boxes([WEIGHT, SCALAR, WEIGHT]))


def test_boxes_of_two_checkpoints_are_refused() -> None:
    """All boxes of a tensor agree on its type."""
    with pytest.raises(ValueError, match="two types of the tensor weight"):
        decode_boxes(encode_boxes([WEIGHT, WEIGHT._replace(shape=(9, 6))]))


def test_nested_lists_are_refused() -> None:
    """Text that no parser can nest raises no other error."""
    with pytest.raises(ValueError, match="invalid"):
        decode_boxes(BOXES_FORMAT.packed(b"[" * 10_000 + b"\n"))


def test_long_lines_are_refused() -> None:
    """The text of a box is limited."""
    with pytest.raises(ValueError, match="the limit is"):
        decode_boxes(encode_boxes([WEIGHT._replace(tensor="x" * boxes_module.MAX_LINE_BYTES)]))


def test_the_number_of_boxes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is checked before a box is decoded."""
    monkeypatch.setattr(boxes_module, "MAX_ENCODED_BOXES", 2)
    with pytest.raises(ValueError, match="more than 2 boxes"):
        decode_boxes(BOXES_FORMAT.packed(b"junk\n" * 3))


def test_another_version_is_refused() -> None:
    """The error names both versions."""
    with pytest.raises(ValueError, match=r"list of boxes of format version 9; .* reads 1"):
        decode_boxes(BOXES_FORMAT._replace(version=9).packed(b""))


def test_a_last_line_without_its_end_is_refused() -> None:
    """A list that was cut is no list."""
    with pytest.raises(ValueError, match="truncated"):
        decode_boxes(BOXES_FORMAT.packed(b"[]"))


@given(st.binary(max_size=60), st.integers(0, 200), st.binary(max_size=40))
def test_damaged_bytes_are_refused(junk: bytes, position: int, body: bytes) -> None:
    """Any other bytes raise ValueError or decode to boxes."""
    data = encode_boxes([WEIGHT, SCALAR])
    for each in (junk, data[:position] + junk + data[position + len(junk) :], BOXES_FORMAT.packed(body + b"\n")):
        try:
            decode_boxes(each)
        except ValueError:
            continue


def test_a_box_image_has_contiguous_tensors() -> None:
    """The own tensors of the map are the boxes by name, with the dtype of the checkpoint."""
    own = box_map([WEIGHT, SCALAR]).own
    assert ["weight[2:6,0:3]", "scale[]"] == own.names
    assert TensorType("bfloat16", 2, (4, 3), (6, 2)) == own.type_of(0)


def test_a_box_image_has_each_box_once() -> None:
    """Two boxes of one name would be one tensor."""
    with pytest.raises(ValueError, match="two boxes"):
        box_map([WEIGHT, WEIGHT])


def test_a_box_image_is_a_source() -> None:
    """The map of a box image can be divided like that of any source."""
    division = divide([box_of((0, 8), (0, 6))], [box_map([WEIGHT])])
    assert ((WEIGHT,),) == division.parts


def test_coverage_counts_a_repeated_box_once() -> None:
    """A tensor that lies in two own tensors, such as a tied embedding, is one."""
    assert [WEIGHT.byte_count] == coverage([WEIGHT], [map_of([WEIGHT, WEIGHT])])


def test_coverage_of_a_scalar() -> None:
    """A scalar has one element; a computed row of another tensor does not count."""
    assert [4, 0] == coverage([SCALAR], [map_of([SCALAR]), map_of([WEIGHT])])


def test_coverage_requires_the_same_type() -> None:
    """A tensor of another shape is another tensor."""
    assert [0] == coverage([box_of((0, 8), (0, 3))], [map_of([box_of((0, 8), (0, 3), shape=(8, 3))])])
