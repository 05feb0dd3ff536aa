"""Layouts, tensor specs, manifests and compatibility tags: identity, differences, and tensors as views of a buffer."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from rfork.errors import UnsupportedTensor
from rfork.image.capture import capture, image_from_tensors
from rfork.image.layout import (
    Layout,
    Manifest,
    TensorSpec,
    TensorSpecTable,
    allocate_buffer,
    tag_differences,
    tag_tensors,
    tags_of,
    tensor_views,
    weights_id,
)
from tests.unit.image.random_modules import Recipe, build, element_bytes, recipes

A = TensorSpec("a", "float32", (2, 2), (2, 1), 0)
B = TensorSpec("b", "int8", (4,), (1,), 16)
A_HERE = "float32[2, 2] stride [2, 1] at byte 0"
LAYOUT = Layout((A, B), 20)
DIFFERENCES = {
    "name": Layout((A._replace(name="c"), B), 20),
    "dtype": Layout((A._replace(dtype="int32"), B), 20),
    "shape": Layout((A._replace(shape=(4, 1)), B), 20),
    "stride": Layout((A._replace(stride=(1, 2)), B), 20),
    "offset": Layout((A, B._replace(offset=17)), 20),
    "size": Layout((A, B), 21),
    "fewer": Layout((A,), 20),
    "order": Layout((B, A), 20),
    "attribute": Layout((A, B), 20, ["eps=1e-05 at norm"]),
}


def test_layout_id_is_stable_across_releases() -> None:
    """layout_id is part of the wire format: this value must never change."""
    assert "809ea24103d28dc5715011be3c103266" == LAYOUT.layout_id
    assert LAYOUT.layout_id == Layout((A, B), 20).layout_id


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_every_difference_changes_the_layout_id(difference: str) -> None:
    """Any difference changes the layout_id."""
    assert LAYOUT.layout_id != DIFFERENCES[difference].layout_id


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        ("name", f"a: here {A_HERE}, there no such tensor"),
        ("dtype", f"a: here {A_HERE}, there int32[2, 2] stride [2, 1] at byte 0"),
        ("shape", f"a: here {A_HERE}, there float32[4, 1] stride [2, 1] at byte 0"),
        ("stride", f"a: here {A_HERE}, there float32[2, 2] stride [1, 2] at byte 0"),
        ("offset", "b: here int8[4] stride [1] at byte 16, there int8[4] stride [1] at byte 17"),
        ("size", "image size: here 20 bytes, there 21 bytes"),
        ("fewer", "b: here int8[4] stride [1] at byte 16, there no such tensor"),
        ("order", None),
        ("attribute", "attribute eps: here nothing, there 1e-05 at norm"),
    ],
)
def test_the_first_difference_is_one_clear_line(difference: str, expected: str | None) -> None:
    """The line names the tensor and both sides."""
    assert expected == LAYOUT.first_difference(DIFFERENCES[difference])


def test_a_difference_in_type_is_preferred_to_a_shifted_offset() -> None:
    """A wider tensor is named before the offsets that it shifts."""
    wider = Layout((A._replace(offset=8), B._replace(dtype="int16")), 28)
    assert (LAYOUT.first_difference(wider) or "").startswith("b: here int8[4]")


def test_differences_are_listed_from_both_sides() -> None:
    """Tensors missing on one side are listed for either side."""
    assert ["a: here", "c: here", "size"] == [
        line[:7] if not line.startswith("image") else "size"
        for line in LAYOUT.differences(Layout((A._replace(name="c"), B), 24))
    ]
    assert [] == list(LAYOUT.differences(LAYOUT))


def test_a_manifest_has_one_digest_per_chunk() -> None:
    """A manifest with another number of digests is a bug of the caller."""
    with pytest.raises(ValueError, match="2 digests for 1 chunks"):
        Manifest(LAYOUT, (b"1" * 16, b"2" * 16))


def test_weights_id_depends_on_layout_and_on_each_digest() -> None:
    """Other bytes, or the same bytes in another layout, have another weights_id."""
    one, two = b"1" * 16, b"2" * 16
    ids = [
        Manifest(LAYOUT, (one,)).weights_id,
        Manifest(LAYOUT, (two,)).weights_id,
        Manifest(DIFFERENCES["name"], (one,)).weights_id,
        weights_id(LAYOUT.layout_id, (one, two)),
        weights_id(LAYOUT.layout_id, (two, one)),
    ]
    assert len(ids) == len(set(ids))
    assert Manifest(LAYOUT, (one,)).weights_id == weights_id(LAYOUT.layout_id, (one,))


QUOTED = TensorSpec('b "quoted" ü\n', "int8", (4,), (1,), 16)
C = TensorSpec("c", "float32", (2, 2), (2, 1), 20)
EMPTY = TensorSpec("", "int8", (), (), 1 << 70)
ALL = (A, QUOTED, C, EMPTY)
SPECS = TensorSpecTable(ALL)


def test_specs_are_a_sequence() -> None:
    """Iteration, indexing and slicing return the original specs."""
    assert ALL == tuple(SPECS)
    assert 4 == len(SPECS)
    assert A == SPECS[0]
    assert EMPTY == SPECS[-1]
    assert ALL[1:3] == SPECS[1:3]
    with pytest.raises(IndexError):
        SPECS[4]


def test_equal_specs_are_equal() -> None:
    """They are equal if their content and order are, also as dict keys."""
    same = TensorSpecTable(ALL[:2])
    same.extend(ALL[2:])
    assert same == SPECS
    assert hash(SPECS) == hash(same)
    assert [False, False, False] == [
        SPECS == TensorSpecTable(other) for other in (ALL[:3], ALL[::-1], (A, QUOTED, C._replace(offset=1), EMPTY))
    ]


def test_tensors_of_one_type_share_it() -> None:
    """A million experts of one shape store that shape once."""
    again = A._replace(shape=tuple(map(int, "22")), stride=tuple(map(int, "21")))
    specs = TensorSpecTable((A, again))
    assert again.shape is not A.shape
    assert specs[0].shape is specs[1].shape


@pytest.mark.parametrize("comma", [", ", ","])
def test_the_json_equals_that_of_the_standard_library(comma: str) -> None:
    """This holds for any name, because layout_id depends on it."""
    assert [json.dumps(spec, separators=(comma, ":")) for spec in ALL] == list(SPECS.json_lines(comma))


@pytest.mark.parametrize(
    ("other_specs", "expected"),
    [
        ((A, QUOTED), []),
        ((QUOTED, A), []),
        ((A, QUOTED._replace(offset=17)), [(QUOTED, QUOTED._replace(offset=17))]),
        ((A._replace(dtype="int32"), QUOTED), [(A, A._replace(dtype="int32"))]),
        ((QUOTED, C), [(A, None), (None, C)]),
        ((), [(A, None), (QUOTED, None)]),
    ],
    ids=["equal", "order", "offset", "dtype", "name", "none"],
)
def test_differences_are_found_by_name(
    other_specs: tuple[TensorSpec, ...], expected: list[tuple[TensorSpec | None, TensorSpec | None]]
) -> None:
    """Pairs of equal names come in own order, followed by specs that only the other has."""
    assert expected == list(TensorSpecTable((A, QUOTED)).differences(TensorSpecTable(other_specs)))


def layout_of(*facts: str) -> Layout:
    module = nn.Linear(2, 2)
    vars(module)["rfork"] = {"is": tag_tensors(facts)}
    return capture(module).layout


def test_facts_are_part_of_the_layout_and_need_no_bytes() -> None:
    """Two images with different facts have different layouts of the same size."""
    one, other = layout_of("engine vllm 1"), layout_of("engine vllm 2")
    assert one.layout_id != other.layout_id
    assert one.image_bytes == other.image_bytes
    assert frozenset({"engine vllm 1"}) == tags_of(one)


def test_a_module_without_facts_has_none() -> None:
    """This includes modules whose tensors only have similar names."""
    assert frozenset() == tags_of(capture(nn.ParameterDict({"is": torch.zeros(1)})).layout)


def test_differences_are_reported_by_subject() -> None:
    """Common facts are omitted; a subject missing on one side is reported as nothing."""
    here = layout_of("engine vllm 1", "device cpu", "quantisation fp8")
    there = layout_of("engine vllm 2", "device cpu")
    assert [
        "engine: here vllm 1; there vllm 2",
        "quantisation: here fp8; there nothing",
    ] == list(tag_differences(here, there))


def test_facts_of_one_subject_are_reported_together() -> None:
    """Their order does not depend on the order in which they were stated."""
    here, there = layout_of("kernels b", "kernels a"), layout_of("kernels c")
    assert ["kernels: here a, b; there c"] == list(tag_differences(here, there))


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


@settings(max_examples=100, deadline=None)
@given(recipes)
def test_views_of_a_filled_buffer_equal_the_captured_tensors(recipe: Recipe) -> None:
    """They are equal and have the same layout."""
    image = capture(build(recipe, 1))
    buffer, tensors = allocate_buffer(image.layout)
    buffer_image = image_from_tensors(tensors, image.layout.attributes)
    assert image.layout == buffer_image.layout
    size = image.layout.image_bytes
    with image.readable(0, size) as views:
        buffer.copy_(torch.frombuffer(bytearray(b"".join(views)), dtype=torch.uint8) if size else buffer)
    with buffer_image.readable(0, size) as views, image.readable(0, size) as expected:
        assert b"".join(expected) == b"".join(views)


def test_values_and_aliases_are_restored() -> None:
    """Every tensor has its values, and aliases share memory."""
    matrix = torch.arange(6.0).view(2, 3)
    image = image_from_tensors({"matrix": matrix, "transposed": matrix.t(), "one": torch.tensor(7)})
    with image.readable(0, image.layout.image_bytes) as views:
        tensors = tensor_views(image.layout, torch.frombuffer(bytearray(b"".join(views)), dtype=torch.uint8))
    assert element_bytes(matrix.t()) == element_bytes(tensors["transposed"])
    tensors["matrix"][0, 2] = 50.0
    assert 50.0 == tensors["transposed"][2, 0].item()
    assert 7 == tensors["one"].item()


def test_an_unaligned_tensor_is_still_a_view() -> None:
    """On the CPU, a tensor at an offset that its item size does not divide reads and writes the buffer."""
    layout = Layout((TensorSpec("a", "int32", (1,), (1,), 1),), 5)
    buffer = torch.zeros(5, dtype=torch.uint8)
    tensor_views(layout, buffer)["a"].fill_(258)
    assert [0, 2, 1, 0, 0] == buffer.tolist()


@pytest.mark.parametrize(
    "buffer", [torch.zeros(3, dtype=torch.uint8), torch.zeros(4), torch.zeros(8, dtype=torch.uint8)[::2]]
)
def test_unsuitable_buffers_are_rejected(buffer: torch.Tensor) -> None:
    """A buffer of another size, type or stride cannot hold the image."""
    with pytest.raises(ValueError, match="flat uint8 buffer of 4 bytes"):
        tensor_views(Layout((), 4), buffer)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec("a", "float3", (1,), (1,), 0), "no dtype 'float3'"),
        (TensorSpec("a", "nn", (1,), (1,), 0), "no dtype 'nn'"),
        (TensorSpec("a", "uint8", (9,), (1,), 0), "not within 8 bytes"),
        (TensorSpec("a", "uint8", (1,), (1,), -1), "not within 8 bytes"),
        (TensorSpec("a", "uint8", (2,), (-1,), 4), "not within 8 bytes"),
    ],
    ids=["dtype", "attribute", "end", "begin", "stride"],
)
def test_an_external_layout_cannot_reach_outside_the_buffer(spec: TensorSpec, reason: str) -> None:
    """A layout from a file or a peer that does not fit is rejected with the tensor's name."""
    with pytest.raises(UnsupportedTensor, match=f"'a'.*{reason}"):
        allocate_buffer(Layout((spec,), 8))
