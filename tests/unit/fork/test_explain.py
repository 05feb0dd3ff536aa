"""Why a layout fits no source: the first tensor that differs, on both sides."""

from __future__ import annotations

import torch

from rfork.fork.explain import explain_mismatch
from rfork.image.capture import image_of
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
