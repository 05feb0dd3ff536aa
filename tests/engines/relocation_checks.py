"""Checks of an engine that loads from tensors instead of files. Runs in the engine's Python, on one rank of one model.

`check` returns a JSON object that `tests.engines.test_relocation` reads:

- "checkpoint": the engine lists the tensors of the folder's files.
- "changed": when recording changed the state of the process.
- "repeatable": the map is the same with a loaded model in the process.
- "map": the map, encoded, in hexadecimal.
- "live", "others": tensors whose bytes are the loaded ones, and why others are not.
- "wrong_rows": rows of live tensors that differ from the checkpoint.
- "tensors", "differences": number of tensors, and those that differ if only the boxes of the map have values.
- "only_copies", "filled_later": whether the map may be filled after the loader, and the tensors that then differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn

from rfork.engines.load_or_fork import collect
from rfork.engines.relocation import RelocatingEngine, tensors_of
from rfork.placement.box_tensors import BoxMemory, CheckpointMemory, OwnMemory, SkippedCopies
from rfork.placement.boxes import Box, wanted_boxes
from rfork.placement.placement_map import PlacementMap
from tests.engines.reference_digests import digest
from tests.engines.zoo import ARCHITECTURES, Architecture

MODELS: Final[Mapping[str, Architecture]] = {
    **ARCHITECTURES,
    "llama-padded": Architecture("llama", vocab_size=500),
    "mixtral-ep": Architecture(
        "mixtral", num_local_experts=4, num_experts_per_tok=2, vllm={"enable_expert_parallel": True}
    ),
    "llama-online": Architecture("llama", dtype="bfloat16", vllm={"quantization": "fp8_per_tensor"}),
}
"""Models by name: those of the zoo, one whose vocabulary engines pad, experts that are divided among ranks, and weights
that vLLM quantises while it loads them."""

Trace = Callable[[], object]
"""Returns the state of the process that recording must not change."""


def check(engine: Any, folder: Path, trace: Trace) -> dict[str, object]:
    """Record the model of a folder, load it, and load it again from the boxes that the map needs."""
    adapter: RelocatingEngine = engine
    weights = dict(checkpoint_of(folder))
    checkpoint = adapter.checkpoint_tensors()
    if checkpoint is None:
        raise RuntimeError(f"no checkpoint in {folder}")
    before = trace()
    recorded = adapter.record(checkpoint)
    changed = ["before loading"] if trace() != before else []
    loaded = engine.load()
    before = trace()
    again = adapter.record(checkpoint)
    changed += ["after loading"] if trace() != before else []
    live, others = adapter.live_tensors(loaded, recorded)
    wrong = wrong_rows(recorded, live, weights)
    expected = digests(loaded)
    names = sorted(live)
    del loaded, live
    collect()
    filled = digests(adapter.load_from(lambda _: boxes_only(recorded, weights)))
    collect()
    filled_later = expected
    if recorded.only_copies:
        memory = CheckpointMemory(recorded.checkpoint)
        with SkippedCopies(memory.zeros):
            model = adapter.load_from(lambda module: boxes_after(recorded, weights, memory, module))
        filled_later = digests(model)
    return {
        "checkpoint": sorted(checkpoint.names) == sorted(weights),
        "changed": changed,
        "repeatable": recorded == again,
        "map": recorded.to_bytes().hex(),
        "live": names,
        "others": others,
        "wrong_rows": wrong,
        "tensors": len(expected),
        "differences": sorted(name for name in expected | filled if expected.get(name) != filled.get(name)),
        "only_copies": recorded.only_copies,
        "filled_later": sorted(
            name for name in expected | filled_later if expected.get(name) != filled_later.get(name)
        ),
    }


def checkpoint_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a folder's safetensors files."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                yield name, opened.get_tensor(name)


def boxes_only(placement_map: PlacementMap, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint in the map's order, with NaN, or -1, in place of all elements that the map does not need."""
    boxes = {box.tensor: box for box in wanted_boxes(placement_map)}
    for name in placement_map.checkpoint.names:
        source = weights[name]
        tensor = torch.empty_like(source)
        tensor.reshape(-1).view(torch.uint8).fill_(0xFF)
        if (box := boxes.get(name)) is not None:
            index = tuple(slice(begin, end) for begin, end in box.bounds)
            tensor[index] = source[index]
        yield name, tensor


def boxes_after(
    placement_map: PlacementMap, weights: Mapping[str, torch.Tensor], memory: CheckpointMemory, module: nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint with zeros in place of all tensors that are only copied, then fill the model with these."""
    computed_from = frozenset(placement_map.read_completely)
    boxes: dict[bool, list[Box]] = {True: [], False: []}
    for box in wanted_boxes(placement_map):
        boxes[box.tensor in computed_from].append(box)
    fill(memory, boxes[True], weights)
    yield from memory.tensors()
    fill(OwnMemory(placement_map, tensors_of(module)), boxes[False], weights)


def fill(memory: BoxMemory, boxes: Sequence[Box], weights: Mapping[str, torch.Tensor]) -> None:
    """Fill the memory of boxes with a checkpoint's elements."""
    for box, tensor in zip(boxes, memory.allocate_boxes(boxes).values(), strict=True):
        tensor.copy_(weights[box.tensor][tuple(slice(begin, end) for begin, end in box.bounds)])
    memory.filled(boxes)


def wrong_rows(
    placement_map: PlacementMap, live: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the rows of live tensors that differ from the checkpoint."""
    wrong = []
    for row in placement_map:
        own = live.get(row.own)
        if own is None or not row.checkpoint:
            continue
        strides = [step // own.itemsize for step in row.strides]
        offset = own.storage_offset() + row.offset // own.itemsize
        index = tuple(slice(begin, begin + size) for begin, size in zip(row.start, row.sizes, strict=True))
        actual, expected = own.detach().as_strided(row.sizes, strides, offset), weights[row.checkpoint][index]
        if digest(actual.contiguous()) != digest(expected.contiguous()):
            wrong.append(f"{row.own} of {row.checkpoint}")
    return wrong


def digests(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each parameter and buffer, and of tensors that attention derived from them."""
    tensors = tensors_of(model)
    for name, layer in model.named_modules():
        if (backend := getattr(layer, "impl", None)) is not None:
            tensors |= {f"{name}.impl.{key}": each for key, each in vars(backend).items() if torch.is_tensor(each)}
    return {name: digest(tensor) for name, tensor in tensors.items() if tensor.numel()}
