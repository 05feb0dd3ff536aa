"""Points of an engine that are not as a plug-in knows them, and how that is told."""

from __future__ import annotations

import pytest

from rfork.engines.hook_targets import HookTarget, find_incompatible, format_incompatibility


@pytest.mark.parametrize(
    ("hook_target", "mismatch"),
    [
        (HookTarget("json.dumps", ("obj", "indent")), None),
        (HookTarget("json.JSONEncoder.encode", ("self", "o")), None),
        (HookTarget("json.dumps", ("obj", "colour", "size")), "has no parameter colour, size"),
        (HookTarget("json.paint"), "is gone (module 'json' has no attribute 'paint')"),
        (HookTarget("no_such_package.thing"), "is gone (No module named 'no_such_package')"),
        (HookTarget("json.__name__", ("obj",)), "cannot be looked at ('json' is not a callable object)"),
    ],
)
def test_points_that_moved(hook_target: HookTarget, mismatch: str | None) -> None:
    """A function that is gone, or has lost a parameter, is named with what is wrong."""
    assert ([] if mismatch is None else [(hook_target, mismatch)]) == find_incompatible([hook_target])


def test_all_that_moved_is_told_in_one_line() -> None:
    """With the version there is and those that were tested."""
    mismatch = [(HookTarget("engine.a"), "is gone"), (HookTarget("engine.b"), "has no parameter c")]
    assert (
        "Engine 9.9 is not as rfork knows it (tested: 1.0, 1.1): engine.a is gone; engine.b has no parameter c"
    ) == format_incompatibility("Engine", "9.9", mismatch, ("1.0", "1.1"))
