"""Recapture: the tensors of a layout where they are after an update, or the reason why they are not those of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rfork.errors import LayoutMismatch
from rfork.image.capture import capture, plain_values, recapture
from rfork.image.memory import Image


class Adapted(nn.Linear):
    """A layer with a flag, a scale and a counter."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.merged = False
        self.scaling = 0.5
        self.updates = 0


def recaptured(module: nn.Module, before: Image, exclude: tuple[str, ...] = ()) -> Image:
    """Return the image of the module after a change of the scale and the flag, if they are excluded."""
    values = plain_values(module, exclude)
    vars(module).update(merged=True, scaling=1.0)
    return recapture(module, before.layout, exclude=exclude, values=values)


def test_replaced_tensors_are_found() -> None:
    """After ``load_state_dict(assign=True)`` the parameters are other tensors."""
    module = Adapted()
    before = capture(module)
    module.load_state_dict({name: torch.ones_like(each) for name, each in module.state_dict().items()}, assign=True)
    after = recapture(module, before.layout)
    assert not after.shares_memory_with(before)
    assert after.shares_memory_with(capture(module))


def test_a_tensor_of_another_dtype_is_rejected_by_name() -> None:
    """A module that was cast has another layout."""
    module = Adapted()
    before = capture(module)
    module.bfloat16()
    with pytest.raises(LayoutMismatch, match=r"bias: here float32.*there bfloat16"):
        recapture(module, before.layout)


def test_a_changed_flag_is_rejected_by_name() -> None:
    """A fork would not receive it: merging an adapter sets one."""
    module = Adapted()
    with pytest.raises(LayoutMismatch, match="attribute merged of the module was False when the seed was made"):
        recaptured(module, capture(module))


def test_a_list_that_was_empty_is_rejected_by_name() -> None:
    """Adapters list those that were merged into the weights."""
    module = Adapted()
    vars(module)["merged_adapters"] = []
    before, values = capture(module), plain_values(module)
    vars(module)["merged_adapters"].append("default")
    with pytest.raises(
        LayoutMismatch, match=r"attribute merged_adapters of the module was \(\) when the seed was made"
    ):
        recapture(module, before.layout, values=values)


def test_a_changed_value_that_is_excluded_is_accepted() -> None:
    """The target sets it itself."""
    module, exclude = Adapted(), ("merged", "scaling")
    assert recaptured(module, capture(module, exclude=exclude), exclude).layout.image_bytes == 80


def test_counters_and_new_state_are_accepted() -> None:
    """Updates are counted, and calls create tables and objects with values of their own."""
    module = Adapted()
    before, values = capture(module), plain_values(module)
    module.updates = 7
    vars(module)["table"] = nn.LayerNorm(4)
    assert recapture(module, before.layout, values=values).shares_memory_with(before)
