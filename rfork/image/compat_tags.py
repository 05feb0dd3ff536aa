"""Compatibility facts of an image, stored as tensor names and therefore part of its layout.

Two engines, two versions of one engine, or two choices of kernels may use the same tensor names and shapes
for different weights. So an engine package attaches an empty tensor to the model for each fact that must be
equal. Layouts that differ in facts can report them in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rfork.image.layout import Layout

ATTRIBUTE = "rfork"
"""Attribute of an engine's model: the dict of what its plug-in attaches."""
PREFIX = "rfork.is."
"""Name prefix of the tensors that state facts: ``rfork.is.engine vllm 0.32.0``."""


def tag_tensors(facts: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return an empty tensor for each fact, to be attached to a module as ``module.rfork["is"]``.

    A fact is a one-word subject and its value: ``engine vllm 0.32.0``.
    """
    return {fact: torch.empty(0, dtype=torch.uint8) for fact in facts}


def tags_of(layout: Layout) -> frozenset[str]:
    """Return the facts of a layout."""
    return frozenset(spec.name.removeprefix(PREFIX) for spec in layout.tensors if spec.name.startswith(PREFIX))


def tag_differences(own: Layout, other: Layout) -> Iterator[str]:
    """Yield a description of each subject whose facts differ between two layouts."""
    here, there = tags_of(own), tags_of(other)
    tags_by_side = {side: _group_tags(facts) for side, facts in (("here", here - there), ("there", there - here))}
    for subject in sorted(tags_by_side["here"].keys() | tags_by_side["there"].keys()):
        sides = (f"{side} {', '.join(tags_by_side[side].get(subject, ['nothing']))}" for side in ("here", "there"))
        yield f"{subject}: {'; '.join(sides)}"


def _group_tags(facts: Iterable[str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for fact in sorted(facts):
        subject, _, value = fact.partition(" ")
        grouped.setdefault(subject, []).append(value)
    return grouped
