"""State of an engine's model outside its tensors, attached to the model so that the image includes it.

Post-processing leaves Python floats on modules, on the objects that compute with the weights, and on tensors (such
as the scales of a quantised KV cache). They affect results as tensors do, so they become part of the image. The
classes of these objects, and their enums and flags, are recorded as facts, which must be equal on both sides. Runs on
the source, and on the target before the layout is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import Enum
from hashlib import sha256

import torch
from torch import nn

from rfork.errors import LayoutMismatch
from rfork.image.layout import ATTRIBUTE, tag_tensors
from rfork.image.module_tensors import is_compared

MAX_DEPTH = 6
"""Maximum depth of helper objects below a module."""
COMMON_HELPER_ATTRIBUTES = (
    *("quant_method", "old_quant_method", "scheme", "kernel", "impl", "runner", "experts"),
    *("quant_config", "config"),
)
"""Attributes of layers and helper objects, in any engine, that refer to the code computing with the weights."""


class HiddenState:
    """Attaches facts and float values to a model with a final layout.

    On the target this happens before its weights arrive.
    """

    def __init__(
        self,
        module: nn.Module,
        facts: Collection[str],
        packages: Collection[str],
        helper_attributes: Collection[str] = (),
    ) -> None:
        """`packages` are the engine's packages: only helper classes defined there are recorded.

        `helper_attributes` are the engine's own, besides `COMMON_HELPER_ATTRIBUTES`.
        """
        self._module = module
        self._packages = frozenset(packages)
        attributes = (*COMMON_HELPER_ATTRIBUTES, *helper_attributes)
        self._float_slots = tuple(_float_attributes(module, self._packages, attributes))
        names = sha256("\n".join(name for name, _, _ in self._float_slots).encode()).hexdigest()[:16]
        self._float_values = torch.empty(len(self._float_slots), dtype=torch.float64, device=_device(module))
        tags = tag_tensors((*facts, *_kernels(module, self._packages, attributes)))
        setattr(module, ATTRIBUTE, {"is": tags, "floats": {names: self._float_values}})
        self._write()

    def save(self) -> None:
        """Copy the current float values of the model into the image. Runs on the source.

        Raises LayoutMismatch if an attribute is no longer a float.
        """
        self._write()

    def _write(self) -> None:
        values = [vars(owner).get(key) for _, owner, key in self._float_slots]
        for (name, _, _), value in zip(self._float_slots, values, strict=True):
            if type(value) is not float:
                raise LayoutMismatch(f"{name} was a float and is now {type(value).__name__}")
        self._float_values.copy_(torch.tensor(values, dtype=torch.float64))

    def apply(self) -> int:
        """Copy the verified float values of the image into the modules. Returns the number of values that changed."""
        changed = 0
        for (_, owner, key), value in zip(self._float_slots, self._float_values.tolist(), strict=True):
            if vars(owner)[key] != value:
                vars(owner)[key] = value
                changed += 1
        return changed


def _device(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


def _float_attributes(
    module: nn.Module, packages: Collection[str], attributes: Collection[str]
) -> Iterator[tuple[str, object, str]]:
    """Yield each float attribute with its dotted name and its owner: a submodule, its tensor, or its helper object."""
    seen: set[int] = set()
    for name, submodule in module.named_modules():
        yield from _floats_of(name, submodule, _is_any)
        for registry in (submodule._parameters, submodule._buffers):
            for key, tensor in registry.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield from _floats_of(f"{name}.{key}", tensor, is_compared)
        for path, helper in _helper_objects(submodule, packages, attributes):
            if id(helper) not in seen and not _is_configuration(helper):
                seen.add(id(helper))
                yield from _floats_of(f"{name}.{path.removesuffix('.')}", helper, is_compared)


def _floats_of(name: str, owner: object, is_carried: Callable[[str], bool]) -> Iterator[tuple[str, object, str]]:
    for key in sorted(key for key, value in vars(owner).items() if type(value) is float and is_carried(key)):
        yield f"{name}.{key}", owner, key


def _is_any(_: str) -> bool:
    return True


def _is_configuration(helper: object) -> bool:
    """Return True for configurations of the server, which differ between servers. Quantisation's hold scales."""
    name = type(helper).__name__
    return name.endswith("Config") and "Quant" not in name


def _kernels(module: nn.Module, packages: Collection[str], attributes: Collection[str]) -> Iterator[str]:
    """Yield the classes that compute with the weights, and the enums and flags set on them."""
    found: set[str] = set()
    for submodule in module.modules():
        for _, helper in _helper_objects(submodule, packages, attributes):
            helper_class = type(helper)
            choices = "" if _is_configuration(helper) else ",".join(_choices(helper))
            found.add(f"kernels {type(submodule).__name__}: {helper_class.__name__}{f'({choices})' if choices else ''}")
    yield from sorted(found)


def _choices(helper: object) -> Iterator[str]:
    for key, value in sorted(vars(helper).items()):
        if isinstance(value, Enum):
            yield f"{key}={value.name}"
        elif type(value) is bool and is_compared(key):
            yield f"{key}={value}"


def _helper_objects(
    module: object, packages: Collection[str], attributes: Collection[str]
) -> Iterator[tuple[str, object]]:
    """Yield the helper objects reachable from a module with their attribute paths, each object once."""
    seen: set[int] = set()
    level = [("", module)]
    for _ in range(MAX_DEPTH):
        following = []
        for path, owner in level:
            for key in attributes:
                helper = vars(owner).get(key)
                if _is_helper(helper, packages) and id(helper) not in seen:
                    seen.add(id(helper))
                    following.append((f"{path}{key}.", helper))
        yield from following
        level = following


def _is_helper(value: object, packages: Collection[str]) -> bool:
    """Return True for objects of the engine other than modules, which are found in the module tree."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | type)
        and type(value).__module__.partition(".")[0] in packages
    )
