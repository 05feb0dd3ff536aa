"""Facts and numbers of an engine's model, hung on the model so that its image has them.

Post-processing leaves Python floats on modules (the scales of a quantised KV cache), which serve as tensors
do: they are part of the image. Which classes compute with the weights is a fact, and has to be equal. Runs on
the source, and on the target before its layout is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from hashlib import sha256

import torch
from torch import nn

from rfork.errors import LayoutMismatch
from rfork.image.compat_tags import ATTRIBUTE, tag_tensors

MAX_DEPTH = 6
"""Steps from a module through helper objects to what computes."""
ENGINE_HELPER_ATTRIBUTES = (
    *("quant_method", "old_quant_method", "scheme", "kernel", "impl", "runner", "experts"),
    # vLLM: linear layers, and a mixture's method, kernel, implementation, experts, scales.
    *("fp8_linear", "fp8_kernel", "linear_kernel", "moe_kernel", "moe_quant_config", "quant_config"),
    *("fused_experts", "_fused_experts", "fallback_experts", "_prepared_experts", "fused_moe_impl"),
    *("_a1", "_a2", "_w1", "_w2", "config"),
    # SGLang: a mixture's runners, and those of Ascend.
    *("runner_core", "_aiter_runner", "moe_runner_config", "w13_kernel", "w2_kernel"),
)
"""Attributes of layers, and of one another, that hold what computes with the weights."""


class HiddenState:
    """Hangs them on a model once its layout is final; before its weights are, on a target."""

    def __init__(self, module: nn.Module, facts: Collection[str], packages: Collection[str]) -> None:
        """`packages` are the engine's: only what classes of theirs compute is a fact."""
        self._module = module
        self._packages = frozenset(packages)
        self._float_slots = tuple(_float_attributes(module))
        names = sha256("\n".join(name for name, _, _ in self._float_slots).encode()).hexdigest()[:16]
        self._float_attributes = torch.empty(len(self._float_slots), dtype=torch.float64, device=_device(module))
        marks = tag_tensors((*facts, *_kernels(module, self._packages)))
        setattr(module, ATTRIBUTE, {"is": marks, "floats": {names: self._float_attributes}})
        self._write()

    def save(self) -> None:
        """Write the numbers into the image, as the model has them now. Runs on the source.

        Raises LayoutMismatch where a number is none any more.
        """
        self._write()

    def _write(self) -> None:
        values = [vars(holder).get(key) for _, holder, key in self._float_slots]
        for (name, _, _), value in zip(self._float_slots, values, strict=True):
            if type(value) is not float:
                raise LayoutMismatch(f"{name} was a number, and is {type(value).__name__} now")
        self._float_attributes.copy_(torch.tensor(values, dtype=torch.float64))

    def apply(self) -> int:
        """Write the image's numbers into the modules, once they are verified; how many differed."""
        changed = 0
        for (_, holder, key), value in zip(self._float_slots, self._float_attributes.tolist(), strict=True):
            if vars(holder)[key] != value:
                vars(holder)[key] = value
                changed += 1
        return changed


def _device(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


def _float_attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Each float that hangs on a module, by its dotted name."""
    for name, submodule in module.named_modules():
        for key in sorted(key for key, value in vars(submodule).items() if type(value) is float):
            yield f"{name}.{key}", submodule, key


def _kernels(module: nn.Module, packages: Collection[str]) -> Iterator[str]:
    """What computes with the weights, and so decides on their meaning: classes, and choices made in them."""
    found: set[str] = set()
    for submodule in module.modules():
        for _, helper in _helper_objects(submodule, packages):
            helper_class = type(helper)
            choices = ",".join(
                f"{key}={value.name}" for key, value in sorted(vars(helper).items()) if isinstance(value, Enum)
            )
            found.add(f"kernels {type(submodule).__name__}: {helper_class.__name__}{f'({choices})' if choices else ''}")
    yield from sorted(found)


def _helper_objects(holder: object, packages: Collection[str]) -> Iterator[tuple[str, object]]:
    """What computes for a module, by the path of attributes to it; each once."""
    seen: set[int] = set()
    level = [("", holder)]
    for _ in range(MAX_DEPTH):
        following = []
        for path, each in level:
            for key in ENGINE_HELPER_ATTRIBUTES:
                helper = vars(each).get(key)
                if _is_helper(helper, packages) and id(helper) not in seen:
                    seen.add(id(helper))
                    following.append((f"{path}{key}.", helper))
        yield from following
        level = following


def _is_helper(value: object, packages: Collection[str]) -> bool:
    """Whether it is an engine's own object, and no module: those are found in the tree."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | type)
        and type(value).__module__.partition(".")[0] in packages
    )
