"""What a model is beside its parameters: facts, numbers and hidden tensors."""

from __future__ import annotations

import math
from enum import Enum

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
    assert ["rfork.hidden..Helper.0.packed"] == hidden


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
