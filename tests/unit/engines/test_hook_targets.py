"""Hook targets that an engine version does not have, and the message about them."""

from __future__ import annotations

import pytest

from rfork.engines.hook_targets import HookTarget, find_incompatible, format_incompatibility


@pytest.mark.parametrize(
    ("hook_target", "mismatch"),
    [
        (HookTarget("json.dumps", ("obj", "indent")), None),
        (HookTarget("json.JSONEncoder.encode", ("self", "o")), None),
        (HookTarget("json.dumps", ("obj", "colour", "size")), "has no parameter colour, size"),
        (HookTarget("json.paint"), "does not exist (module 'json' has no attribute 'paint')"),
        (HookTarget("no_such_package.thing"), "does not exist (No module named 'no_such_package')"),
        (HookTarget("json.__name__", ("obj",)), "cannot be inspected ('json' is not a callable object)"),
    ],
)
def test_an_incompatible_hook_target_is_reported(hook_target: HookTarget, mismatch: str | None) -> None:
    """A missing function and a missing parameter are reported with the reason."""
    assert ([] if mismatch is None else [(hook_target, mismatch)]) == find_incompatible([hook_target])


def test_all_incompatible_targets_are_reported_on_one_line() -> None:
    """The message contains the installed version and the tested versions."""
    mismatch = [(HookTarget("engine.a"), "does not exist"), (HookTarget("engine.b"), "has no parameter c")]
    assert (
        "Engine 9.9 is incompatible with this rfork (tested: 1.0, 1.1): "
        "engine.a does not exist; engine.b has no parameter c"
    ) == format_incompatibility("Engine", "9.9", mismatch, ("1.0", "1.1"))
