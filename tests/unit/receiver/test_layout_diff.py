"""Why a layout fits no source: the first tensor that differs, on both sides."""

from __future__ import annotations

import torch
from torch import nn

from rfork.image.capture import capture, image_from_tensors
from rfork.image.compat_tags import tag_tensors
from rfork.receiver.layout_diff import explain_layout_mismatch
from tests.unit.receiver.fleet import NEVER_S, Fleet, route


def explain(fleet: Fleet, *, unreachable: bool = False) -> str:
    seed = fleet.source("a", image_from_tensors({"first": torch.zeros(4), "second": torch.zeros(2, 3)}))
    target_image = image_from_tensors({"first": torch.zeros(4), "second": torch.zeros(2, 5, dtype=torch.bfloat16)})
    source_route = route(seed)
    if unreachable:
        fleet.peers.kill(source_route.address)
    return str(explain_layout_mismatch(source_route, target_image.layout, fleet.peers.dial, NEVER_S))


def test_the_first_differing_tensor_is_named_on_both_sides(fleet: Fleet) -> None:
    """Name, dtype and shape, here and there."""
    message = explain(fleet)
    assert [] == [
        part for part in ("second: here bfloat16[2, 5]", "there float32[2, 3]", "another layout") if part not in message
    ]


def test_a_source_that_cannot_be_asked_is_still_named(fleet: Fleet) -> None:
    """Where the comparison fails the answer names the other layout's holder, and why it was not compared."""
    message = explain(fleet, unreachable=True)
    assert ("another layout" in message, "not compared: memory:1: connection refused" in message) == (
        True,
        True,
    )


def test_an_attribute_that_differs_is_named(fleet: Fleet) -> None:
    """Its name, its holder and both values; all tensors are equal."""
    target_image, other = (capture(nn.LayerNorm(4, eps=eps)) for eps in (1e-5, 1e-6))
    message = str(
        explain_layout_mismatch(route(fleet.source("a", other)), target_image.layout, fleet.peers.dial, NEVER_S)
    )
    assert message.endswith("first difference: attribute eps: here 1e-05 at the module, there 1e-06 at the module")


def test_facts_are_told_before_tensors(fleet: Fleet) -> None:
    """What two images say of themselves explains more than the first tensor that differs."""
    sides = []
    for version in ("1", "2"):
        module = nn.Linear(2, int(version))
        vars(module)["rfork"] = {"is": tag_tensors((f"engine toy {version}", "device cpu"))}
        sides.append(capture(module))
    target_image, other = sides
    message = str(
        explain_layout_mismatch(route(fleet.source("a", other)), target_image.layout, fleet.peers.dial, NEVER_S)
    )
    assert message.endswith("first difference: engine: here toy 1; there toy 2")
