"""What an image says of itself beside its weights: in names, which are part of its layout.

Two engines, two versions of one, or two choices of kernels may keep other weights in tensors of the very same
names and shapes. So an engine's room hangs a tensor without bytes on the model for each fact that must be
equal. Layouts that differ in these say so in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rfork.image.layout import Layout

ATTRIBUTE = "rfork"
"""Of an engine's model: the dict of what its plug-in hangs on it."""
PREFIX = "rfork.is."
"""Of the names of the tensors that say what an image is of: ``rfork.is.engine vllm 0.32.0``."""


def tag_tensors(facts: Iterable[str]) -> dict[str, torch.Tensor]:
    """A tensor without bytes for each fact, to hang on a module as ``module.rfork["is"]``.

    A fact is a subject of one word, and what holds of it: ``engine vllm 0.32.0``.
    """
    return {fact: torch.empty(0, dtype=torch.uint8) for fact in facts}


def tags_of(layout: Layout) -> frozenset[str]:
    """The facts that a layout states."""
    return frozenset(spec.name.removeprefix(PREFIX) for spec in layout.tensors if spec.name.startswith(PREFIX))


def tag_differences(own: Layout, other: Layout) -> Iterator[str]:
    """Each subject in which two layouts say of themselves that they differ, in words."""
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
