"""What an engine's model is beside its parameters: facts, numbers and hidden tensors, hung on the model.

Post-processing leaves its results in more places than tensors of modules: as Python floats (the scales of
a quantised KV cache), and as tensors of helper objects (attention implementations, kernels). Both serve, so
both are part of the image. Its switches are not carried: that they are equal is a fact. Runs on the source,
and on the target before its layout is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from functools import cached_property
from hashlib import sha256

import torch
from torch import nn

from rfork.errors import LayoutMismatch
from rfork.image.marks import mark
from rfork.image.walk import OWN_ATTRIBUTES, named_tensors

ATTRIBUTE = "rfork"
"""Of the model: where all of this hangs."""
DEEPEST = 6
"""Steps from a module through helper objects to a tensor."""
HELPERS = (
    *("quant_method", "old_quant_method", "scheme", "kernel", "impl", "runner", "experts"),
    # vLLM: linear layers, and a mixture's method, kernel, implementation, experts, scales.
    *("fp8_linear", "fp8_kernel", "linear_kernel", "moe_kernel", "moe_quant_config", "quant_config"),
    *("fused_experts", "_fused_experts", "fallback_experts", "_prepared_experts", "fused_moe_impl"),
    *("_a1", "_a2", "_w1", "_w2", "config"),
    # SGLang: a mixture's runners, and those of Ascend.
    *("runner_core", "_aiter_runner", "moe_runner_config", "w13_kernel", "w2_kernel"),
)
"""Attributes of layers, and of one another, that hold what computes with the weights.

What only sends tokens (`prepare_finalize`, `dispatcher`) is none: it keeps buffers, and no weights.
"""


class Traits:
    """Hangs them on a model once its layout is final; before its weights are, on a target."""

    def __init__(self, module: nn.Module, facts: Collection[str], packages: Collection[str]) -> None:
        """`packages` are the engine's: only objects of classes of theirs are looked into."""
        self._module = module
        self._packages = frozenset(packages)
        hidden, self._aliases = _hidden(module, self._packages)
        self._places = tuple(_floats(module))
        names = sha256("\n".join(name for name, _, _ in self._places).encode()).hexdigest()[:16]
        self._floats = torch.empty(len(self._places), dtype=torch.float64, device=_device(module))
        self._kept = {"is": mark((*facts, *_kernels(module, self._packages), *_switches(module)))}
        self._hidden = self._kept["hidden"] = hidden
        self._kept["floats"] = {names: self._floats}
        setattr(module, ATTRIBUTE, self._kept)
        self._write()

    def note(self) -> None:
        """Write the numbers into the image, and take the hidden tensors, as the model has them now.

        Helpers may have made theirs anew: the next `capture` finds those. What they keep beside them since is
        left out. Runs on the source. Raises LayoutMismatch where a number is none any more, where a tensor
        has gone, and where one that viewed a weight has memory of its own.
        """
        hidden, _ = _hidden(self._module, self._packages)
        for name in self._hidden:
            if name not in hidden:
                raise LayoutMismatch(f"{name} was a tensor of a helper's own, and is none now")
        for name in sorted(self._aliases & hidden.keys()):
            raise LayoutMismatch(f"{name} was a view of another tensor, and has memory of its own now")
        self._hidden.update({name: hidden[name] for name in self._hidden})
        self._write()

    def _write(self) -> None:
        values = [vars(holder).get(key) for _, holder, key in self._places]
        for (name, _, _), value in zip(self._places, values, strict=True):
            if type(value) is not float:
                raise LayoutMismatch(f"{name} was a number, and is {type(value).__name__} now")
        self._floats.copy_(torch.tensor(values, dtype=torch.float64))

    def apply(self) -> int:
        """Write the image's numbers into the modules, once they are verified; how many differed."""
        changed = 0
        for (_, holder, key), value in zip(self._places, self._floats.tolist(), strict=True):
            if vars(holder)[key] != value:
                vars(holder)[key] = value
                changed += 1
        return changed


def _device(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


def _floats(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Each float that hangs on a module, by its dotted name."""
    for name, submodule in module.named_modules():
        for key in sorted(key for key, value in vars(submodule).items() if type(value) is float):
            yield f"{name}.{key}", submodule, key


def _switches(module: nn.Module) -> Iterator[str]:
    """One fact of all truth values on modules: what only the loading of weights sets, no target has."""
    told = sorted(
        f"{name}.{key}={value}"
        for name, submodule in module.named_modules()
        for key, value in vars(submodule).items()
        if type(value) is bool and key not in OWN_ATTRIBUTES and not _computed(submodule, key)
    )
    if told:
        yield f"switches {sha256(chr(10).join(told).encode()).hexdigest()[:12]}"


def _computed(module: nn.Module, key: str) -> bool:
    """Whether it follows from the rest, and is there only once somebody has asked for it."""
    return isinstance(getattr(type(module), key, None), cached_property)


def _kernels(module: nn.Module, packages: Collection[str]) -> Iterator[str]:
    """What computes with the weights, and so decides on their meaning: classes, and choices made in them."""
    found: set[str] = set()
    for submodule in module.modules():
        for _, helper in _helpers(submodule, packages):
            kind = type(helper)
            choices = ",".join(
                f"{key}={value.name}"
                for key, value in sorted(vars(helper).items())
                if isinstance(value, Enum)
            )
            found.add(
                f"kernels {type(submodule).__name__}: {kind.__name__}{f'({choices})' if choices else ''}"
            )
    yield from sorted(found)


def _helpers(holder: object, packages: Collection[str]) -> Iterator[tuple[str, object]]:
    """What computes for a module, by the path of attributes to it; each once."""
    seen: set[int] = set()
    level = [("", holder)]
    for _ in range(DEEPEST):
        following = []
        for path, each in level:
            for key in HELPERS:
                helper = vars(each).get(key)
                if _is_helper(helper, packages) and id(helper) not in seen:
                    seen.add(id(helper))
                    following.append((f"{path}{key}.", helper))
        yield from following
        level = following


def _hidden(module: nn.Module, packages: Collection[str]) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """The helpers' tensors whose memory is no tensor's of a module, and the names of their others."""
    spans = _merged(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for name, tensor in named_tensors(module).items()
        if tensor.nbytes and not name.startswith(f"{ATTRIBUTE}.")
    )
    hidden: dict[str, torch.Tensor] = {}
    aliases: set[str] = set()
    seen: set[int] = set()
    for name, submodule in module.named_modules():
        for path, helper in _helpers(submodule, packages):
            for key, value in sorted(vars(helper).items()):
                if not isinstance(value, torch.Tensor) or not value.nbytes:
                    continue
                place = f"{name}.{path}{key}"
                if id(value) in seen or _within(value, spans):
                    aliases.add(place)
                else:
                    seen.add(id(value))
                    hidden[place] = value
    return hidden, frozenset(aliases)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, and those that touch or overlap made one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _within(tensor: torch.Tensor, spans: list[tuple[int, int]]) -> bool:
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    at = bisect_right(spans, begin, key=lambda span: span[0]) - 1
    return at >= 0 and end <= spans[at][1]


def _is_helper(value: object, packages: Collection[str]) -> bool:
    """Whether it is an engine's own object, and no module: those are found in the tree."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | type)
        and type(value).__module__.partition(".")[0] in packages
    )
