"""TensorSpecTable behaves like a tuple of specs and scales to a million specs."""

from __future__ import annotations

import json

import pytest

from rfork.image.layout import TensorSpec, TensorSpecTable

A = TensorSpec("a", "float32", (2, 2), (2, 1), 0)
B = TensorSpec('b "quoted" ü\n', "int8", (4,), (1,), 16)
C = TensorSpec("c", "float32", (2, 2), (2, 1), 20)
EMPTY = TensorSpec("", "int8", (), (), 1 << 70)
ALL = (A, B, C, EMPTY)
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
        SPECS == TensorSpecTable(other) for other in (ALL[:3], ALL[::-1], (A, B, C._replace(offset=1), EMPTY))
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
        ((A, B), []),
        ((B, A), []),
        ((A, B._replace(offset=17)), [(B, B._replace(offset=17))]),
        ((A._replace(dtype="int32"), B), [(A, A._replace(dtype="int32"))]),
        ((B, C), [(A, None), (None, C)]),
        ((), [(A, None), (B, None)]),
    ],
    ids=["equal", "order", "offset", "dtype", "name", "none"],
)
def test_differences_are_found_by_name(
    other_specs: tuple[TensorSpec, ...], expected: list[tuple[TensorSpec | None, TensorSpec | None]]
) -> None:
    """Pairs of equal names come in own order, followed by specs that only the other has."""
    assert expected == list(TensorSpecTable((A, B)).differences(TensorSpecTable(other_specs)))
