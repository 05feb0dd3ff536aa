"""Functions of an engine: incompatible ones, and methods that are wrapped."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from rfork.engines.hook_targets import (
    Compatibility,
    HookTarget,
    call_after,
    call_before,
    find_incompatible,
    format_incompatibility,
    patch_method,
    unlisted_methods,
)
from rfork.engines.sglang import compat


class Engine:
    """An engine that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self, size: int, *, dry: bool = False) -> int:
        """Return the requested number of tokens."""
        self.calls.append(f"step {size}{' dry' if dry else ''}")
        return size


@pytest.fixture
def engine_class() -> type[Engine]:
    """Return a class that only this test wraps."""
    return type("Engine", (Engine,), dict(vars(Engine)))


def test_a_wrapper_replaces_the_method(engine_class: type[Engine]) -> None:
    """It receives the method and all arguments, and its return value is returned."""

    def twice(method: Callable[..., int], engine: Engine, size: int, **named: bool) -> int:
        return 2 * method(engine, size, **named)

    patch_method(engine_class, "step", twice)
    engine = engine_class()
    assert 6 == engine.step(3)
    assert 8 == engine.step(size=4, dry=True)
    assert ["step 3", "step 4 dry"] == engine.calls


def test_a_method_is_wrapped_once(engine_class: type[Engine]) -> None:
    """A second wrapper is not applied, and the method keeps its name."""
    for _ in range(2):
        patch_method(engine_class, "step", call_before(lambda engine, size: engine.calls.append("hook")))
    engine = engine_class()
    engine.step(1)
    assert ["hook", "step 1"] == engine.calls
    assert "step" == engine_class.step.__name__


def test_a_callback_before_the_method_receives_the_arguments(engine_class: type[Engine]) -> None:
    """If it raises and may refuse, the method is not called."""

    def refuse(engine: Engine, size: int) -> None:
        raise ValueError(size)

    patch_method(engine_class, "step", call_before(refuse), may_refuse=True)
    engine = engine_class()
    with pytest.raises(ValueError, match="5"):
        engine.step(5)
    assert [] == engine.calls


def fail(*_: object) -> None:
    """Raise what a renamed attribute of an engine causes."""
    raise AttributeError("no attribute 'steps'")


@pytest.mark.parametrize("moment", [call_before, call_after])
def test_a_failing_hook_never_reaches_the_engine(
    engine_class: type[Engine], moment: Callable[..., Callable[..., object]], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's method runs exactly once, its result is returned, and one log line names the method."""
    patch_method(engine_class, "step", moment(fail))
    engine = engine_class()
    assert 5 == engine.step(5)
    assert 6 == engine.step(6, dry=True)
    assert ["step 5", "step 6 dry"] == engine.calls
    assert 1 == caplog.text.count("hook failed")
    assert "Engine.step" in caplog.text
    assert "no attribute 'steps'" in caplog.text


def test_every_failure_of_a_required_hook_is_handled(engine_class: type[Engine]) -> None:
    """`on_failure` is called each time, and the engine proceeds."""
    failures: list[str] = []
    patch_method(engine_class, "step", call_before(fail), on_failure=lambda: failures.append("failed"))
    engine = engine_class()
    assert 5 == engine.step(5)
    assert 6 == engine.step(6)
    assert ["failed", "failed"] == failures


def test_an_exception_of_the_engine_is_raised(engine_class: type[Engine]) -> None:
    """The method is not called again, and the hook stays in use."""
    failures: list[str] = []

    def raise_error(engine: Engine, size: int, *, dry: bool = False) -> int:
        engine.calls.append("failed step")
        raise RuntimeError("out of memory")

    engine_type: type = engine_class
    setattr(engine_type, "step", raise_error)  # noqa: B010  # as plug-ins do
    callback = call_before(lambda engine, size: engine.calls.append("hook"))
    patch_method(engine_class, "step", callback, on_failure=lambda: failures.append("failed"))
    engine = engine_class()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step(1)
    assert ["hook", "failed step"] * 2 == engine.calls
    assert [] == failures


def test_a_callback_after_the_method_receives_the_result(engine_class: type[Engine]) -> None:
    """The result is its first argument and is returned unchanged."""

    def record_result(result: int, engine: Engine, size: int) -> None:
        engine.calls.append(f"{result} of {size}")

    patch_method(engine_class, "step", call_after(record_result))
    engine = engine_class()
    assert 7 == engine.step(7)
    assert ["step 7", "7 of 7"] == engine.calls


def test_a_method_wrapped_by_another_plug_in_is_wrapped_too(engine_class: type[Engine]) -> None:
    """Both wrappers are called."""
    unpatched_step = engine_class.step

    def other(engine: Engine, size: int) -> int:
        engine.calls.append("other")
        return unpatched_step(engine, size)

    engine_type: type = engine_class
    setattr(engine_type, "step", other)  # noqa: B010  # as plug-ins do
    patch_method(engine_class, "step", call_before(lambda engine, size: engine.calls.append("ours")))
    engine = engine_class()
    engine.step(1)
    assert ["ours", "other", "step 1"] == engine.calls


def test_methods_are_wrapped_by_their_paths(engine_class: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is found by its dotted path, as in the plug-in's hook targets."""
    monkeypatch.setattr(f"{__name__}.Engine", engine_class)
    compat.hook(f"{__name__}.Engine.step", call_before(lambda engine, size: engine.calls.append("hook")))
    engine = engine_class()
    engine.step(2)
    assert ["hook", "step 2"] == engine.calls


@pytest.mark.parametrize(
    ("hook_target", "mismatch"),
    [
        (HookTarget("json.dumps", ("obj", "indent")), None),
        (HookTarget("json.JSONEncoder.encode", ("self", "o")), None),
        (HookTarget("json.dumps", ("obj", "colour", "size")), "has no parameter colour, size"),
        (HookTarget("json.paint"), "does not exist (module 'json' has no attribute 'paint')"),
        (HookTarget("no_such_package.thing"), "does not exist (No module named 'no_such_package')"),
        (HookTarget("json.paint", optional=True), None),
        (HookTarget("json.dumps", ("colour",), optional=True), "has no parameter colour"),
        (
            HookTarget("no_such_package.Thing.paint", optional=True),
            "does not exist (No module named 'no_such_package')",
        ),
        (HookTarget("json.__name__", ("obj",)), "cannot be inspected ('json' is not a callable object)"),
    ],
)
def test_an_incompatible_hook_target_is_reported(hook_target: HookTarget, mismatch: str | None) -> None:
    """A missing function and a missing parameter are reported with the reason."""
    assert ([] if mismatch is None else [(hook_target, mismatch)]) == find_incompatible([hook_target])


def test_incompatible_targets_are_grouped_by_tier() -> None:
    """Each tier has its own consequence."""
    core, lifecycle = HookTarget("json.paint"), HookTarget("json.sleep", tier="lifecycle")
    comfort, known = HookTarget("json.steps", tier="comfort"), HookTarget("json.dumps", tier="comfort")
    found = Compatibility.of([core, lifecycle, comfort, known])
    assert [core] == [target for target, _ in found.core]
    assert [lifecycle] == [target for target, _ in found.lifecycle]
    assert [comfort] == [target for target, _ in found.comfort]


def test_methods_that_a_new_version_adds_are_found(engine_class: type[Engine]) -> None:
    """A public method whose name matches and that is not listed."""
    for name in ("update_weights", "swap_weights", "_move_weights", "warm_up"):
        setattr(engine_class, name, Engine.step)
    setattr(engine_class, "weight_count", 3)  # noqa: B010
    assert ["swap_weights"] == unlisted_methods(engine_class, re.compile("weight"), {"update_weights"})


def test_all_incompatible_targets_are_reported_on_one_line() -> None:
    """The message contains the installed version and the tested versions."""
    mismatch = [(HookTarget("engine.a"), "does not exist"), (HookTarget("engine.b"), "has no parameter c")]
    assert (
        "Engine 9.9 is incompatible with this rfork (tested: 1.0, 1.1): "
        "engine.a does not exist; engine.b has no parameter c"
    ) == format_incompatibility("Engine", "9.9", mismatch, ("1.0", "1.1"))
