"""Methods of classes that are wrapped: what is called, in which order, and how often."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rfork.engines.monkeypatch import call_after, call_before, patch_method
from rfork.engines.sglang import hook_targets


class Engine:
    """An engine that writes down what is done to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self, size: int, *, dry: bool = False) -> int:
        """As many tokens as were asked for."""
        self.calls.append(f"step {size}{' dry' if dry else ''}")
        return size


@pytest.fixture
def engine_class() -> type[Engine]:
    """A class that only this test wraps."""
    return type("Engine", (Engine,), dict(vars(Engine)))


def test_a_wrapper_is_called_in_the_method_s_place(engine_class: type[Engine]) -> None:
    """It gets the method and all arguments, and what it returns is returned."""

    def twice(method: Callable[..., int], engine: Engine, size: int, **named: bool) -> int:
        return 2 * method(engine, size, **named)

    patch_method(engine_class, "step", twice)
    engine = engine_class()
    assert [6, 8] == [engine.step(3), engine.step(size=4, dry=True)]
    assert ["step 3", "step 4 dry"] == engine.calls


def test_a_method_is_wrapped_once(engine_class: type[Engine]) -> None:
    """A second wrapper of ours is not put around the first, and the method keeps its name."""
    for _ in range(2):
        patch_method(engine_class, "step", call_before(lambda engine, size: engine.calls.append("told")))
    engine = engine_class()
    engine.step(1)
    assert (["told", "step 1"], "step") == (engine.calls, engine_class.step.__name__)


def test_what_is_told_before_changes_nothing(engine_class: type[Engine]) -> None:
    """It is told of the arguments; what it raises ends the call before the method is reached."""

    def refuse(engine: Engine, size: int) -> None:
        raise ValueError(size)

    patch_method(engine_class, "step", call_before(refuse))
    engine = engine_class()
    with pytest.raises(ValueError, match="5"):
        engine.step(5)
    assert [] == engine.calls


def test_what_is_told_after_knows_the_result(engine_class: type[Engine]) -> None:
    """The result comes first, and is returned as it is."""

    def record_result(result: int, engine: Engine, size: int) -> None:
        engine.calls.append(f"{result} of {size}")

    patch_method(engine_class, "step", call_after(record_result))
    engine = engine_class()
    assert 7 == engine.step(7)
    assert ["step 7", "7 of 7"] == engine.calls


def test_a_method_that_another_plug_in_wrapped_is_wrapped_too(engine_class: type[Engine]) -> None:
    """Around the other's: both are called."""
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


def test_sglang_s_methods_are_wrapped_by_their_paths(
    engine_class: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class is found by its path, as the points of the plug-in have it."""
    monkeypatch.setattr(f"{__name__}.Engine", engine_class)
    hook_targets.hook(f"{__name__}.Engine.step", call_before(lambda engine, size: engine.calls.append("told")))
    engine = engine_class()
    engine.step(2)
    assert ["told", "step 2"] == engine.calls
