"""What a model is beside its parameters: facts, numbers and hidden tensors."""

from __future__ import annotations

import math
from enum import Enum
from functools import cached_property

import pytest
import torch
from torch import nn

from rfork.engines.traits import Traits
from rfork.errors import LayoutMismatch
from rfork.image.capture import capture
from rfork.image.marks import facts_of

OWN = (__name__.partition(".")[0],)


class Backend(Enum):
    FAST = 1
    SLOW = 2


class Helper:
    def __init__(self, tensor: torch.Tensor, backend: Backend = Backend.FAST) -> None:
        self.packed = tensor
        self.backend = backend
        self.kernel: Helper | None = None


class Layer(nn.Module):
    def __init__(self, scale: float = 1.0, backend: Backend = Backend.FAST) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = scale
        self.impl = Helper(torch.full((2,), scale), backend)
        self.impl.kernel = Helper(self.weight.data[:2], backend)


def test_numbers_travel_in_the_image() -> None:
    """What the source's modules hold is what the target's hold once its image is filled."""
    source, target = nn.Sequential(Layer(2.5), Layer(math.inf)), nn.Sequential(Layer(), Layer())
    Traits(source, (), OWN)
    traits = Traits(target, (), OWN)
    for region, filled in zip(capture(source).regions, capture(target).regions, strict=True):
        filled.copy_(region)
    assert (2, [2.5, math.inf]) == (traits.apply(), [vars(layer)["scale"] for layer in target])
    assert 0 == traits.apply()


def test_hidden_tensors_are_part_of_the_image_once() -> None:
    """That of a helper is; one that only views a weight is carried as that."""
    layer = Layer()
    Traits(layer, (), OWN)
    hidden = [spec.name for spec in capture(layer).layout.tensors if ".hidden." in spec.name]
    assert ["rfork.hidden..impl.packed"] == hidden


def test_helpers_of_others_are_not_looked_into() -> None:
    """Only objects of the packages that were named."""
    layer = Layer()
    Traits(layer, (), ("other",))
    assert [] == [spec.name for spec in capture(layer).layout.tensors if ".hidden." in spec.name]


def test_what_computes_is_a_fact() -> None:
    """Other choices within helpers make another layout, and are named."""
    layouts = []
    for backend in Backend:
        layer = Layer(backend=backend)
        Traits(layer, ("engine toy 1",), OWN)
        layouts.append(facts_of(capture(layer).layout))
    assert [
        {"engine toy 1", "kernels Layer: Helper(backend=FAST)"},
        {"engine toy 1", "kernels Layer: Helper(backend=SLOW)"},
    ] == layouts


@pytest.mark.parametrize(
    "path", ["quant_method.moe_kernel.impl.fused_experts.quant_config._w1", "fp8_linear"]
)
def test_what_vllm_hides_deep_is_found_once(path: str) -> None:
    """Under a method's kernel, its experts and their scales; what is a parameter is carried as that."""
    layer = Layer()
    layer.impl.packed = layer.weight.data
    holder: Layer | Helper = layer
    for key in path.split("."):
        made = Helper(layer.weight.data[1:3])
        setattr(holder, key, made)
        holder = made
    vars(holder)["scale"] = torch.ones(2)
    vars(holder)["back"] = vars(holder)["kernel"] = layer.impl  # a cycle, or a second way to it
    Traits(layer, (), OWN)
    hidden = [spec.name for spec in capture(layer).layout.tensors if ".hidden." in spec.name]
    assert [f"rfork.hidden..{path}.scale"] == hidden


def test_switches_are_one_fact() -> None:
    """What loading sets on one side only makes another layout; a mode of torch's own, and addresses, none."""
    facts = []
    for loaded, training in ((False, True), (False, False), (True, True)):
        model = nn.Sequential(Layer(), Layer()).train(training)
        vars(model[1])["ready"] = loaded
        Traits(model, (), OWN)
        found = facts_of(capture(model).layout)
        facts.append([fact for fact in found if fact.startswith("switches ")])
    assert (True, True, [1, 1, 1]) == (
        facts[0] == facts[1],
        facts[0] != facts[2],
        [len(one) for one in facts],
    )


def test_hidden_tensors_that_are_made_anew_are_those_of_the_image() -> None:
    """After an update the image holds what the helper computes with now; what is new there is left out."""
    layer = Layer()
    traits = Traits(layer, (), OWN)
    layout = capture(layer).layout.layout_id
    layer.impl.packed = torch.full((2,), 7.0)
    vars(layer.impl)["workspace"] = torch.zeros(3)
    traits.note()
    assert (layout, layer.impl.packed.data_ptr()) == (
        capture(layer).layout.layout_id,
        vars(layer)["rfork"]["hidden"][".impl.packed"].data_ptr(),
    )


@pytest.mark.parametrize(
    ("path", "said"), [("impl", "helper's own, and is none now"), ("kernel", "has memory of its own now")]
)
def test_other_hidden_tensors_are_said(path: str, said: str) -> None:
    """One that has gone, and one that viewed a weight and does not any more."""
    layer = Layer()
    traits = Traits(layer, (), OWN)
    if path == "impl":
        vars(layer.impl)["packed"] = None
    elif layer.impl.kernel is not None:
        layer.impl.kernel.packed = torch.ones(2)
    with pytest.raises(LayoutMismatch, match=said):
        traits.note()


def test_another_set_of_numbers_is_another_layout() -> None:
    """Numbers are matched by their names, which are part of it."""
    one, other = Layer(), Layer()
    vars(other)["more"] = 1.0
    for layer in (one, other):
        Traits(layer, (), OWN)
    assert capture(one).layout.layout_id != capture(other).layout.layout_id


def test_a_number_that_is_none_any_more_is_said() -> None:
    """An engine that puts something else in its place has another model now."""
    layer = Layer()
    traits = Traits(layer, (), OWN)
    vars(layer)["scale"] = None
    with pytest.raises(LayoutMismatch, match="scale was a number, and is NoneType now"):
        traits.note()


class Lazy(Layer):
    @cached_property
    def padded(self) -> bool:
        return True


def test_what_follows_from_the_rest_is_no_switch() -> None:
    """A cached property that only the loading of weights has asked for parts no two models; a flag does."""
    asked, fresh, flagged = Lazy(), Lazy(), Lazy()
    vars(flagged)["native"] = vars(fresh)["native"] = vars(asked)["native"] = False
    vars(flagged)["native"] = asked.padded
    for model in (asked, fresh, flagged):
        Traits(model, (), OWN)
    facts = [facts_of(capture(model).layout) for model in (asked, fresh, flagged)]
    assert (True, False) == (facts[0] == facts[1], facts[1] == facts[2])
