"""Layout mismatches: the first tensor that differs is reported for both sides."""

from __future__ import annotations

import torch
from torch import nn

from rfork.image.capture import capture, image_from_tensors
from rfork.image.compat_tags import tag_tensors
from rfork.receiver.planner_requests import explain_layout_mismatch
from tests.unit.receiver.fleet import NEVER_S, Fleet, route


def explain(fleet: Fleet, *, unreachable: bool = False) -> str:
    seed = fleet.source("a", image_from_tensors({"first": torch.zeros(4), "second": torch.zeros(2, 3)}))
    target_image = image_from_tensors({"first": torch.zeros(4), "second": torch.zeros(2, 5, dtype=torch.bfloat16)})
    source_route = route(seed)
    if unreachable:
        fleet.peers.kill(source_route.address)
    return str(explain_layout_mismatch(source_route, target_image.layout, fleet.peers.dial, NEVER_S))


def test_the_first_tensor_that_differs_is_named_on_both_sides(fleet: Fleet) -> None:
    """The message contains name, dtype and shape of both."""
    message = explain(fleet)
    assert [] == [
        part for part in ("second: here bfloat16[2, 5]", "there float32[2, 3]", "another layout") if part not in message
    ]


def test_an_unreachable_source_of_another_layout_is_named(fleet: Fleet) -> None:
    """If the comparison fails, the message names the source and the reason."""
    message = explain(fleet, unreachable=True)
    assert "another layout" in message
    assert "not compared: memory:1: connection refused" in message


def test_a_different_attribute_is_named(fleet: Fleet) -> None:
    """If all tensors are equal, the message contains the attribute's name, its module and both values."""
    target_image, other = (capture(nn.LayerNorm(4, eps=eps)) for eps in (1e-5, 1e-6))
    message = str(
        explain_layout_mismatch(route(fleet.source("a", other)), target_image.layout, fleet.peers.dial, NEVER_S)
    )
    assert message.endswith("first difference: attribute eps: here 1e-05 at the module, there 1e-06 at the module")


def test_image_facts_are_reported_before_tensors(fleet: Fleet) -> None:
    """The facts recorded with two images explain more than the first tensor that differs."""
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
