"""What an engine's model is beside its parameters: facts, numbers and hidden tensors, hung on the model.

Post-processing leaves its results in more places than tensors of modules: as Python floats (the scales of
a quantised KV cache), and as tensors of helper objects (attention implementations, kernels). Both serve, so
both are part of the image. Runs on the source, and on the target before its layout is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from hashlib import sha256

import torch
from torch import nn

from rfork.errors import LayoutMismatch
from rfork.image.marks import mark
from rfork.image.walk import named_tensors

ATTRIBUTE = "rfork"
"""Of the model: where all of this hangs."""
DEEPEST = 3
"""Steps from a module through helper objects to a tensor."""
HELPERS = ("quant_method", "scheme", "kernel", "impl", "runner", "experts")
"""Attributes of layers, and of one another, that hold what computes with the weights."""


class Traits:
    """Hangs them on a model once its layout is final; before its weights are, on a target."""

    def __init__(self, module: nn.Module, facts: Collection[str], packages: Collection[str]) -> None:
        """`packages` are the engine's: only objects of classes of theirs are looked into."""
        self._module = module
        self._packages = frozenset(packages)
        hidden = dict(_hidden(module, self._packages))
        self._places = tuple(_floats(module))
        names = sha256("\n".join(name for name, _, _ in self._places).encode()).hexdigest()[:16]
        self._floats = torch.empty(len(self._places), dtype=torch.float64, device=_device(module))
        self._kept = {"is": mark((*facts, *_kernels(module, self._packages))), "hidden": hidden}
        self._kept["floats"] = {names: self._floats}
        setattr(module, ATTRIBUTE, self._kept)
        self.note()

    def note(self) -> None:
        """Write the numbers, as the modules hold them, into the image. Runs on the source.

        Raises LayoutMismatch where one of them is no number any more.
        """
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


def _kernels(module: nn.Module, packages: Collection[str]) -> Iterator[str]:
    """What computes with the weights, and so decides on their meaning: classes, and choices made in them."""
    found: set[str] = set()
    for submodule in module.modules():
        for helper in _helpers(submodule, packages):
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


def _helpers(holder: object, packages: Collection[str], depth: int = DEEPEST) -> Iterator[object]:
    for key in HELPERS:
        helper = getattr(holder, "__dict__", {}).get(key)
        if helper is not None and not isinstance(helper, nn.Module) and _is_of(helper, packages) and depth:
            yield helper
            yield from _helpers(helper, packages, depth - 1)


def _hidden(module: nn.Module, packages: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of helper objects whose memory is not that of a tensor of the module."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in named_tensors(module).values()
        if tensor.nbytes
    )
    seen: set[int] = set()
    for name, submodule in module.named_modules():
        for place, helper in enumerate(_helpers(submodule, packages)):
            for key, value in sorted(vars(helper).items()):
                if isinstance(value, torch.Tensor) and value.nbytes and id(value) not in seen:
                    seen.add(id(value))
                    if not _within(value, spans):
                        yield f"{name}.{type(helper).__name__}.{place}.{key}", value


def _within(tensor: torch.Tensor, spans: list[tuple[int, int]]) -> bool:
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(first <= begin and end <= last for first, last in spans)


def _is_of(helper: object, packages: Collection[str]) -> bool:
    return type(helper).__module__.partition(".")[0] in packages
