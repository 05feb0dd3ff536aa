"""Falling back: each way into a clean model, and an end that says everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from rfork.errors import CheckpointError, NothingLeft, PlannerUnreachable, RforkError, SourceGone
from rfork.fork.fallback import (
    ANOTHER_WAY,
    Derived,
    Fallback,
    checkpoint_fallback,
    engine_fallback,
    fall_back,
    loader_fallback,
)
from rfork.image.capture import capture


class Model(nn.Module):
    """Tied weights, a persistent buffer, a rotary table that no checkpoint holds, and a stray tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((2,), 7.0))
        self.register_buffer("rotary", torch.arange(5.0), persistent=False)
        self.stray = torch.tensor([1, 2, 3])


def garbage(model: nn.Module) -> None:
    """What a transfer that broke off leaves behind."""
    for region in capture(model).regions:
        region.fill_(0xAB)


def broken(error: Exception) -> Callable[[nn.Module], None]:
    def load(module: nn.Module) -> None:
        garbage(module)
        raise error

    return load


def load_ones(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(1.0)


def state(model: Model) -> tuple[list[float], list[float], list[float], list[int]]:
    return (
        sorted(set(model.head.weight.flatten().tolist())),
        model.get_buffer("scale").tolist(),
        model.get_buffer("rotary").tolist(),
        model.stray.tolist(),
    )


LOADED = ([1.0], [1.0, 1.0], [0.0, 1.0, 2.0, 3.0, 4.0], [1, 2, 3])


def test_what_no_loader_writes_is_put_back() -> None:
    """Rotary tables and stray tensors are as the model computed them, though the transfer overwrote them."""
    model = Model()
    derived = Derived(model, capture(model))
    garbage(model)
    assert "loader" == fall_back(model, derived, [loader_fallback(load_ones)], []).name
    assert LOADED == state(model)


def test_only_what_no_loader_writes_is_kept() -> None:
    """The copies cost the derived tensors' bytes (rotary 20, stray 24), not the model's."""
    model = Model()
    assert 44 == Derived(model, capture(model)).nbytes


def test_a_wrapper_s_weights_are_written_by_loaders() -> None:
    """Of a tensor that wraps others (a DTensor), what it wraps is loaded: no copy of it is kept."""
    model = Model()
    model.register_parameter("wrapped", nn.Parameter(TwoTensor(torch.zeros(64), torch.ones(64))))
    assert 44 == Derived(model, capture(model)).nbytes


def test_extra_state_is_not_taken_for_a_tensor() -> None:
    """A module may keep anything in its state."""

    class Extra(Model):
        def get_extra_state(self) -> str:
            return "anything"

    model = Extra()
    assert 44 == Derived(model, capture(model, exclude=["_extra_state"])).nbytes


def test_a_checkpoint_fills_a_tied_model(tmp_path: Path) -> None:
    """The weight that is stored once under one of its two names is loaded under both."""
    save_file({"embed.weight": torch.ones(4, 3), "scale": torch.ones(2)}, tmp_path / "model.safetensors")
    model = Model()
    derived = Derived(model, capture(model))
    garbage(model)
    name = fall_back(model, derived, [checkpoint_fallback(tmp_path)], []).name
    assert (f"checkpoint {tmp_path}", LOADED) == (name, state(model))


@pytest.mark.parametrize("error", [SourceGone("lost"), ZeroDivisionError("bug"), OSError("disk")])
def test_a_way_that_raises_is_followed_by_the_next(error: Exception) -> None:
    """Whatever a loader raises, and whatever it left in the model, the next way starts clean."""
    model = Model()
    derived = Derived(model, capture(model))
    ways = [Fallback("first", broken(error)), Fallback("second", load_ones)]
    assert ("second", LOADED) == (fall_back(model, derived, ways, []).name, state(model))


def test_nothing_left_carries_all_reasons(tmp_path: Path) -> None:
    """Every failure on the way is in the error, in its order, and on its one line."""
    model = Model()
    ways = [checkpoint_fallback(tmp_path), loader_fallback(broken(ZeroDivisionError("bug")))]
    before: list[RforkError] = [SourceGone("the seed died")]
    with pytest.raises(NothingLeft) as caught:
        fall_back(model, Derived(model, capture(model)), ways, before)
    assert ["SourceGone", "CheckpointError", "UserError"] == [error.kind for error in caught.value.reasons]
    assert ("user", True) == (caught.value.fault, "the seed died; CheckpointError: " in str(caught.value))
    assert "loader: ZeroDivisionError: bug" in str(caught.value)


def test_no_way_at_all() -> None:
    """Without a source or a way the error says so."""
    model = Model()
    with pytest.raises(NothingLeft, match="no source and no fallback was given"):
        fall_back(model, Derived(model, capture(model)), [], [])


@pytest.mark.parametrize(
    ("hint", "expected"),
    [("is the planner running there?", "is the planner running there?"), ("", ANOTHER_WAY)],
)
def test_the_last_advice_is_the_end_s(hint: str, expected: str) -> None:
    """What to do is what the last failure that knows it says: a seed helps nobody whose planner is away."""
    reasons = [PlannerUnreachable("no answer", hint=hint), SourceGone("it ended")]
    with pytest.raises(NothingLeft) as caught:
        fall_back(Model(), None, [], reasons)
    assert expected == caught.value.hint


def test_an_interrupt_is_no_failure_to_go_on_from() -> None:
    """Ctrl-C in a loader ends the fork and tries nothing else."""
    tried: list[str] = []

    def interrupted(module: nn.Module) -> None:
        raise KeyboardInterrupt

    model = Model()
    ways = [loader_fallback(interrupted), Fallback("next", lambda module: tried.append("next"))]
    with pytest.raises(KeyboardInterrupt):
        fall_back(model, Derived(model, capture(model)), ways, [])
    assert [] == tried


def test_an_engines_loader_is_run_elsewhere() -> None:
    """It is not asked to fill the model, whose content stays as it was found."""
    model, ran = Model(), []
    way = engine_fallback(Model, lambda: None)
    found = fall_back(model, None, [way], [], lambda each: ran.append(each.name))
    assert (way, ["the engine's loader"]) == (found, ran)


def test_an_engines_loader_without_weights_is_not_offered() -> None:
    """What its check raises is why; it looks at nothing but that."""

    def check() -> None:
        raise CheckpointError("no weights in the folder")

    model = Model()
    image = capture(model)
    opening = engine_fallback(Model, check).open
    if opening is None:
        raise TypeError("it cannot be asked")
    with pytest.raises(CheckpointError, match="no weights"):
        opening(model, image, Derived(model, image))
