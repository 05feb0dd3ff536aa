"""Layouts and manifests: identity, and messages about mismatches."""

from __future__ import annotations

import pytest

from rfork.image.layout import Layout, Manifest, TensorSpec, weights_id

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
