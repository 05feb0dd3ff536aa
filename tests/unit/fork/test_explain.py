"""Why a layout fits no source: the first tensor that differs, on both sides."""

from __future__ import annotations

import torch
from torch import nn

from rfork.fork.explain import explain_mismatch
from rfork.image.capture import capture, image_of
from rfork.image.marks import mark
from tests.unit.fork.fleet import NEVER_S, Fleet, route


def explained(fleet: Fleet, *, dead: bool = False) -> str:
    seed = fleet.source("a", image_of({"first": torch.zeros(4), "second": torch.zeros(2, 3)}))
    own = image_of({"first": torch.zeros(4), "second": torch.zeros(2, 5, dtype=torch.bfloat16)})
    way = route(seed)
    if dead:
        fleet.peers.kill(way.address)
    return str(explain_mismatch(way, own.layout, fleet.peers.dial, NEVER_S))


def test_the_first_differing_tensor_is_named_on_both_sides(fleet: Fleet) -> None:
    """Name, dtype and shape, here and there."""
    said = explained(fleet)
    assert [] == [
        part
        for part in ("second: here bfloat16[2, 5]", "there float32[2, 3]", "another layout")
        if part not in said
    ]


def test_a_source_that_cannot_be_asked_is_still_named(fleet: Fleet) -> None:
    """Where the comparison fails the answer names the other layout's holder, and why it was not compared."""
    said = explained(fleet, dead=True)
    assert ("another layout" in said, "not compared: memory:1: connection refused" in said) == (True, True)


def test_an_attribute_that_differs_is_named(fleet: Fleet) -> None:
    """Its name, its holder and both values; all tensors are equal."""
    own, other = (capture(nn.LayerNorm(4, eps=eps)) for eps in (1e-5, 1e-6))
    said = str(explain_mismatch(route(fleet.source("a", other)), own.layout, fleet.peers.dial, NEVER_S))
    assert said.endswith(
        "first difference: attribute eps: here 1e-05 at the module, there 1e-06 at the module"
    )


def test_facts_are_told_before_tensors(fleet: Fleet) -> None:
    """What two images say of themselves explains more than the first tensor that differs."""
    sides = []
    for version in ("1", "2"):
        module = nn.Linear(2, int(version))
        vars(module)["rfork"] = {"is": mark((f"engine toy {version}", "device cpu"))}
        sides.append(capture(module))
    own, other = sides
    said = str(explain_mismatch(route(fleet.source("a", other)), own.layout, fleet.peers.dial, NEVER_S))
    assert said.endswith("first difference: engine: here toy 1; there toy 2")
