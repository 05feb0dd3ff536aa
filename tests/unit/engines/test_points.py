"""Points of an engine that are not as a plug-in knows them, and how that is told."""

from __future__ import annotations

import pytest

from rfork.engines.points import Point, moved, told


@pytest.mark.parametrize(
    ("point", "wrong"),
    [
        (Point("json.dumps", ("obj", "indent")), None),
        (Point("json.JSONEncoder.encode", ("self", "o")), None),
        (Point("json.dumps", ("obj", "colour", "size")), "has no parameter colour, size"),
        (Point("json.paint"), "is gone (module 'json' has no attribute 'paint')"),
        (Point("no_such_package.thing"), "is gone (No module named 'no_such_package')"),
        (Point("json.__name__", ("obj",)), "cannot be looked at ('json' is not a callable object)"),
    ],
)
def test_points_that_moved(point: Point, wrong: str | None) -> None:
    """A function that is gone, or has lost a parameter, is named with what is wrong."""
    assert ([] if wrong is None else [(point, wrong)]) == moved([point])


def test_all_that_moved_is_told_in_one_line() -> None:
    """With the version there is and those that were tested."""
    wrong = [(Point("engine.a"), "is gone"), (Point("engine.b"), "has no parameter c")]
    assert (
        "Engine 9.9 is not as rfork knows it (tested: 1.0, 1.1): "
        "engine.a is gone; engine.b has no parameter c"
    ) == told("Engine", "9.9", wrong, ("1.0", "1.1"))
