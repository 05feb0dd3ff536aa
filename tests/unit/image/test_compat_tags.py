"""Compatibility facts in tensor names, and descriptions of their differences."""

from __future__ import annotations

import torch
from torch import nn

from rfork.image.capture import capture
from rfork.image.layout import Layout, tag_differences, tag_tensors, tags_of


def layout_of(*facts: str) -> Layout:
    module = nn.Linear(2, 2)
    vars(module)["rfork"] = {"is": tag_tensors(facts)}
    return capture(module).layout


def test_facts_are_part_of_the_layout_and_need_no_bytes() -> None:
    """Two images with different facts have different layouts of the same size."""
    one, other = layout_of("engine vllm 1"), layout_of("engine vllm 2")
    assert one.layout_id != other.layout_id
    assert one.image_bytes == other.image_bytes
    assert frozenset({"engine vllm 1"}) == tags_of(one)


def test_a_module_without_facts_has_none() -> None:
    """This includes modules whose tensors only have similar names."""
    assert frozenset() == tags_of(capture(nn.ParameterDict({"is": torch.zeros(1)})).layout)


def test_differences_are_reported_by_subject() -> None:
    """Common facts are omitted; a subject missing on one side is reported as nothing."""
    here = layout_of("engine vllm 1", "device cpu", "quantisation fp8")
    there = layout_of("engine vllm 2", "device cpu")
    assert [
        "engine: here vllm 1; there vllm 2",
        "quantisation: here fp8; there nothing",
    ] == list(tag_differences(here, there))


def test_facts_of_one_subject_are_reported_together() -> None:
    """Their order does not depend on the order in which they were stated."""
    here, there = layout_of("kernels b", "kernels a"), layout_of("kernels c")
    assert ["kernels: here a, b; there c"] == list(tag_differences(here, there))
