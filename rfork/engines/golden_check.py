"""Golden check of a layer: proof that its captured state determines its outputs.

Engines post-process weights when a model is loaded: kernels repack, requantise or pad them, and may keep what they
derive from them where capture cannot see it. The check builds a layer twice with different weights, copies the
captured state of one to the other as a fork does, and compares the outputs. If they are equal, a fork of such a layer
computes what a loaded one computes.

Runs in an engine's process, on source and target, before a complete model is processed; and in `rfork doctor`.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from rfork.engines.hidden_state import COMMON_HELPER_ATTRIBUTES, HiddenState
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.image.layout import ATTRIBUTE, Layout
from rfork.image.memory import Image
from rfork.image.module_tensors import OWN_ATTRIBUTES

SCALE: Final = 0.02
"""Random floats are between half and one and a half of this value: plausible as weights and as scales."""
MIN_PACKED: Final = 256
"""Integer tensors with fewer elements are shapes and counts, not packed weights."""
INDICES: Final = re.compile(r"idx|index|indices|perm|sort|map|shape|order|ptr|offset", re.IGNORECASE)
"""Names of integer tensors whose values are not arbitrary bits."""


@dataclass(frozen=True, slots=True)
class GoldenLayer:
    """One layer of a model with allocated weights that are not post-processed yet, and how an engine uses it.

    All functions receive a copy of `module`.
    """

    name: str
    """Name of its method; see `rfork.engines.layer_methods`."""
    module: nn.Module
    process: Callable[[nn.Module], object]
    """Post-process loaded weights."""
    outputs: Callable[[nn.Module], torch.Tensor]
    """Return outputs that depend on all weights, for fixed inputs."""
    rebuild: Callable[[nn.Module], object] | None = None
    """Rebuild what kernels derive from weights that have been filled."""


@dataclass(frozen=True, slots=True)
class Capturing:
    """Options with which an engine's models are captured; see `rfork.engines.load_or_fork.ModelIdentity`."""

    packages: Collection[str] = ()
    helper_attributes: Collection[str] = ()
    exclude: Sequence[str] = ()


def failure_of(layer: GoldenLayer, capturing: Capturing) -> str | None:
    """Return why a forked layer may differ from a loaded one; None if the check passes.

    Failures of the engine's own code are reasons as well: nothing is proven then.
    """
    try:
        with torch.no_grad():
            return _failure(layer, capturing)
    except RforkError as error:
        return str(error)
    except Exception as error:  # kernels and copies of an engine's objects may raise anything
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    finally:
        gc.collect()


def _failure(layer: GoldenLayer, capturing: Capturing) -> str | None:
    loaded, filled = (_processed(layer, seed) for seed in (1, 2))
    expected, before = layer.outputs(loaded).clone(), layer.outputs(filled).clone()
    if not bool(expected.isfinite().any()):
        return "the check is inconclusive: no output is finite"
    if _equal(expected, before):
        return "the check is inconclusive: the outputs do not depend on the weights"
    source, target = _Captured(loaded, capturing), _Captured(filled, capturing)
    difference = target.image.layout.first_difference(source.image.layout)
    if difference is None:
        target.fill_from(source)
        difference = target.plain_layout().first_difference(source.plain_layout())
    if difference is not None:
        return f"its state depends on the weights: {difference}"
    if layer.rebuild is not None:
        layer.rebuild(filled)
    if not _equal(expected, layer.outputs(filled)):
        return "its outputs depend on state that is not captured"
    if not _equal(expected, layer.outputs(loaded)):
        return "the check is inconclusive: the same layer computes different outputs for the same inputs"
    return None


def _processed(layer: GoldenLayer, seed: int) -> nn.Module:
    module = copy_of(layer.module)
    randomise(module, seed)
    layer.process(module)
    return module


class _Captured:
    """State of a layer as a fork transfers it."""

    def __init__(self, module: nn.Module, capturing: Capturing) -> None:
        self._module = module
        self._exclude = capturing.exclude
        self._hidden_state = HiddenState(module, (), capturing.packages, capturing.helper_attributes)
        self.image: Image = capture(module, exclude=capturing.exclude)

    def fill_from(self, source: _Captured) -> None:
        """Copy the bytes and floats of another layer of the same layout."""
        for target_region, source_region in zip(self.image.regions, source.image.regions, strict=True):
            target_region.copy_(source_region)
        self._hidden_state.apply()

    def plain_layout(self) -> Layout:
        """Return the layout with all scalars, including those that are not compared in a complete model."""
        vars(self._module).pop(ATTRIBUTE, None)
        return capture(self._module, exclude=self._exclude).layout


def copy_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module with memory of its own.

    Engines' parameter classes do not support `copy.deepcopy`; attributes of parameters are shared. So are attributes
    of modules that cannot be copied, such as process groups, unless they refer to the code computing with the weights:
    then the exception of `copy.deepcopy` is raised.
    """
    copies: dict[int, Any] = {}
    for tensor in _tensors_of(module):
        made = torch.Tensor._make_subclass(type(tensor), tensor.detach().clone(), tensor.requires_grad)
        vars(made).update(vars(tensor))
        copies[id(tensor)] = made
    modules = list(module.modules())
    for each in modules:
        copies[id(each)] = type(each).__new__(type(each))
    for each in modules:
        vars(copies[id(each)]).update({key: _copied(key, value, copies) for key, value in vars(each).items()})
    copied: nn.Module = copies[id(module)]
    return copied


def _copied(key: str, value: object, copies: dict[int, Any]) -> object:
    try:
        return copy.deepcopy(value, copies)
    except TypeError:  # it cannot be pickled
        if key in COMMON_HELPER_ATTRIBUTES or key in OWN_ATTRIBUTES:
            raise
        return value


def randomise(module: nn.Module, seed: int) -> None:
    """Fill floats and packed weights with random values, the same for the same seed.

    Small integers, and those whose name means indices or shapes, are kept.
    """
    for index, (name, tensor) in enumerate(_named_tensors(module)):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        if tensor.is_floating_point():
            values = (torch.rand(tensor.shape, generator=generator) + 0.5) * SCALE
            if tensor.itemsize == 1:  # 8-bit floats: values that use the mantissa
                values *= 1 / SCALE
            tensor.detach().copy_(values.to(tensor.dtype))
        elif tensor.numel() >= MIN_PACKED and tensor.dtype != torch.bool and not INDICES.search(name):
            high = 2 ** min(8 * tensor.itemsize - 1, 31)
            tensor.detach().copy_(torch.randint(high, tensor.shape, generator=generator).to(tensor.dtype))


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from (tensor for _, tensor in _named_tensors(module))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if all bits are equal; NaN is equal to itself."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )
