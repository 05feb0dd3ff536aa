"""Fallbacks: each one starts with a clean model, and the final error contains every reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from rfork.errors import (
    AllSourcesFailed,
    CheckpointError,
    PlannerUnreachable,
    RforkError,
    SourceUnavailable,
    UserError,
)
from rfork.image.capture import capture
from rfork.receiver.clean_module import DerivedTensors
from rfork.receiver.fallback import (
    ALTERNATIVES_HINT,
    Fallback,
    checkpoint_fallback,
    engine_fallback,
    load_into_clean_module,
    loader_fallback,
    run_fallbacks,
)


class Model(nn.Module):
    """Has tied weights, a persistent buffer, and two tensors that no checkpoint contains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((2,), 7.0))
        self.register_buffer("rotary", torch.arange(5.0), persistent=False)
        self.stray = torch.tensor([1, 2, 3])


def garbage(model: nn.Module) -> None:
    """Overwrite every tensor, as an interrupted transfer may."""
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


def fall_back(
    model: nn.Module, derived: DerivedTensors | None, fallbacks: Sequence[Fallback], reasons: Sequence[RforkError]
) -> Fallback:
    """Run fallbacks that fill this model in place."""
    return run_fallbacks(fallbacks, partial(load_into_clean_module, model, derived), reasons)


LOADED = ([1.0], [1.0, 1.0], [0.0, 1.0, 2.0, 3.0, 4.0], [1, 2, 3])


def test_derived_tensors_are_restored() -> None:
    """Rotary tables and stray tensors are as the model computed them, although the transfer overwrote them."""
    model = Model()
    derived = DerivedTensors(model, capture(model))
    garbage(model)
    assert "loader" == fall_back(model, derived, [loader_fallback(load_ones)], []).name
    assert LOADED == state(model)


def test_only_derived_tensors_are_copied() -> None:
    """The copies cost the bytes of the derived tensors (rotary 20, stray 24), not those of the model."""
    model = Model()
    assert 44 == DerivedTensors(model, capture(model)).nbytes


def test_wrapped_weights_are_not_copied() -> None:
    """Loaders write the tensors inside a wrapper such as a DTensor."""
    model = Model()
    model.register_parameter("wrapped", nn.Parameter(TwoTensor(torch.zeros(64), torch.ones(64))))
    assert 44 == DerivedTensors(model, capture(model)).nbytes


def test_extra_state_is_not_treated_as_a_tensor() -> None:
    """A module's extra state may be any object."""

    class Extra(Model):
        def get_extra_state(self) -> str:
            return "anything"

    model = Extra()
    assert 44 == DerivedTensors(model, capture(model, exclude=["_extra_state"])).nbytes


def test_a_checkpoint_fills_a_tied_model(tmp_path: Path) -> None:
    """A weight that is stored under one of its two names is loaded under both."""
    save_file({"embed.weight": torch.ones(4, 3), "scale": torch.ones(2)}, tmp_path / "model.safetensors")
    model = Model()
    derived = DerivedTensors(model, capture(model))
    garbage(model)
    name = fall_back(model, derived, [checkpoint_fallback(tmp_path)], []).name
    assert f"checkpoint {tmp_path}" == name
    assert LOADED == state(model)


@pytest.mark.parametrize("error", [SourceUnavailable("lost"), ZeroDivisionError("bug"), OSError("disk")])
def test_a_fallback_that_raises_is_followed_by_the_next(error: Exception) -> None:
    """Whatever the first one raises or writes, the next one starts with a clean model."""
    model = Model()
    derived = DerivedTensors(model, capture(model))
    fallbacks = [Fallback("first", broken(error)), Fallback("second", load_ones)]
    assert "second" == fall_back(model, derived, fallbacks, []).name
    assert LOADED == state(model)


def load_only(*names: str) -> Callable[[nn.Module], None]:
    def load(module: nn.Module) -> None:
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                if name in names:
                    tensor.fill_(1.0)

    return load


def test_a_loader_that_leaves_a_parameter_unfilled_fails() -> None:
    """The model would otherwise keep bytes of the failed transfer."""
    model = Model()
    with pytest.raises(AllSourcesFailed, match=r"loader did not fill scale \(tensors not filled: 1\)"):
        fall_back(model, DerivedTensors(model, capture(model)), [loader_fallback(load_only("embed.weight"))], [])


def test_a_tied_weight_is_filled_under_one_name() -> None:
    """The other name needs no separate write."""
    model = Model()
    fallbacks = [loader_fallback(load_only("head.weight", "scale"))]
    assert "loader" == fall_back(model, DerivedTensors(model, capture(model)), fallbacks, []).name


def test_excluded_tensors_need_not_be_filled() -> None:
    """The transfer cannot have written them."""
    model = Model()
    derived = DerivedTensors(model, capture(model, exclude=["scale"]))
    fall_back(model, derived, [loader_fallback(load_only("embed.weight"))], [])
    assert [7.0, 7.0] == model.get_buffer("scale").tolist()


def test_an_incomplete_loader_is_followed_by_the_next_fallback() -> None:
    """A loader that leaves a tensor unfilled counts as failed."""
    model = Model()
    fallbacks = [loader_fallback(load_only("scale")), Fallback("second", load_ones)]
    fall_back(model, DerivedTensors(model, capture(model)), fallbacks, [])
    assert LOADED == state(model)


def test_a_counter_missing_from_an_old_checkpoint_fails_the_fallback(tmp_path: Path) -> None:
    """torch would leave the value that the failed transfer wrote."""
    model = nn.BatchNorm1d(2)
    content = {name: torch.ones(2) for name in ("weight", "bias", "running_mean", "running_var")}
    save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(AllSourcesFailed, match="did not fill num_batches_tracked"):
        fall_back(model, DerivedTensors(model, capture(model)), [checkpoint_fallback(tmp_path)], [])


def test_a_buffer_that_overlaps_an_expanded_tensor_is_restored() -> None:
    """No loader writes the buffer, although an expanded tensor starts before it."""
    model, memory = Model(), torch.arange(8.0)
    model.register_buffer("wide", memory[:1].expand(8))
    model.register_buffer("table", memory[1:], persistent=False)
    derived = DerivedTensors(model, capture(model))
    garbage(model)
    fall_back(model, derived, [Fallback("loader", load_only("embed.weight", "scale"))], [])
    assert torch.arange(1.0, 8.0).tolist() == model.get_buffer("table").tolist()


def test_a_buffer_in_the_gaps_of_a_strided_parameter_is_restored() -> None:
    """The buffer lies between the elements of the parameter."""
    model, memory = Model(), torch.arange(8.0)
    model.even = nn.Parameter(memory[::2])
    model.register_buffer("odd", memory[1::2], persistent=False)
    derived = DerivedTensors(model, capture(model))
    garbage(model)
    fall_back(model, derived, [Fallback("loader", load_ones)], [])
    assert [1.0, 3.0, 5.0, 7.0] == model.get_buffer("odd").tolist()


def test_an_exception_of_state_dict_is_a_user_error() -> None:
    """An exception of the module's own code becomes a one-line error of the caller."""

    class Broken(Model):
        def state_dict(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:  # type: ignore[override]
            raise ZeroDivisionError("packed")

    model = Broken()
    with pytest.raises(UserError, match=r"state_dict\(\) raised ZeroDivisionError: packed"):
        DerivedTensors(model, capture(model))


def test_the_final_error_contains_all_reasons(tmp_path: Path) -> None:
    """It lists every failure in order, on one line."""
    model = Model()
    fallbacks = [checkpoint_fallback(tmp_path), loader_fallback(broken(ZeroDivisionError("bug")))]
    before: list[RforkError] = [SourceUnavailable("the seed died")]
    with pytest.raises(AllSourcesFailed) as caught:
        fall_back(model, DerivedTensors(model, capture(model)), fallbacks, before)
    assert ["SourceUnavailable", "CheckpointError", "UserError"] == [error.kind for error in caught.value.reasons]
    assert "user" == caught.value.fault
    assert "the seed died; CheckpointError: " in str(caught.value)
    assert "loader: ZeroDivisionError: bug" in str(caught.value)


def test_a_fork_without_source_and_fallback_fails() -> None:
    """The error states that neither is configured."""
    model = Model()
    with pytest.raises(AllSourcesFailed, match="no source and no fallback is configured"):
        fall_back(model, DerivedTensors(model, capture(model)), [], [])


@pytest.mark.parametrize(
    ("hint", "expected"),
    [("is the planner running there?", "is the planner running there?"), ("", ALTERNATIVES_HINT)],
)
def test_the_final_hint_is_the_last_specific_one(hint: str, expected: str) -> None:
    """A hint to start a seed does not help while the planner is unreachable."""
    reasons = [PlannerUnreachable("no response", hint=hint), SourceUnavailable("the source ended")]
    with pytest.raises(AllSourcesFailed) as caught:
        fall_back(Model(), None, [], reasons)
    assert expected == caught.value.hint


def test_an_interrupt_ends_the_fallbacks() -> None:
    """Ctrl-C in a loader ends the fork, and no further fallback is tried."""
    tried: list[str] = []

    def interrupted(module: nn.Module) -> None:
        raise KeyboardInterrupt

    model = Model()
    fallbacks = [loader_fallback(interrupted), Fallback("next", lambda module: tried.append("next"))]
    with pytest.raises(KeyboardInterrupt):
        fall_back(model, DerivedTensors(model, capture(model)), fallbacks, [])
    assert [] == tried


def test_an_engine_loader_does_not_fill_this_model() -> None:
    """The engine builds its own, so the content of this model stays unchanged."""
    ran: list[str] = []
    replacing_fallback = engine_fallback(Model, lambda: None)
    found = run_fallbacks([replacing_fallback], lambda each: ran.append(each.name), [])
    assert replacing_fallback == found
    assert ["the engine's loader"] == ran


def test_an_engine_loader_without_weights_is_not_offered() -> None:
    """The error of its check is the reason; the check is the only thing that runs."""

    def check() -> None:
        raise CheckpointError("no weights in the folder")

    model = Model()
    image = capture(model)
    opening = engine_fallback(Model, check).open
    if opening is None:
        raise TypeError("the fallback has no check")
    with pytest.raises(CheckpointError, match="no weights"):
        opening(model, image, DerivedTensors(model, image))
