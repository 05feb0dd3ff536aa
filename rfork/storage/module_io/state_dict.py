"""Finds the tensors that `load_state_dict` fills, by name, and the modules that load their own state.

Does not use torch's own traversal, because models have tens of thousands of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

LOAD_METHODS = frozenset({"load_state_dict", "_load_from_state_dict", "set_extra_state"})
PLAIN_LOADERS = frozenset(
    {nn.Module._load_from_state_dict, _NormBase._load_from_state_dict, _InstanceNorm._load_from_state_dict}
)
"""Implementations that copy each tensor as stored. Those of norms only add what old files lack."""
ADDED_BY_NORMS = "num_batches_tracked"


class SelfLoading(NamedTuple):
    """A module that loads its own state, by an override or a hook: see `why`. `prefix` ends in a dot."""

    prefix: str
    module: nn.Module
    why: str


def registered_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, in the order in which `load_state_dict` fills them.

    They are the module's own objects, regardless of what its `state_dict` returns.
    """
    found: dict[str, torch.Tensor] = {}
    _walk(module, "", found)
    return found


def self_loading(module: nn.Module, stored: Collection[str]) -> list[SelfLoading]:
    """Return the topmost modules whose loading is more than copying each tensor. `stored` are the stored
    names.
    """
    found: list[SelfLoading] = []
    plain: dict[type, str] = {}
    module_class = type(module)
    if module_class.load_state_dict is not nn.Module.load_state_dict:
        return [SelfLoading("", module, f"{module_class.__name__} overrides load_state_dict")]
    left = [("", module)]
    while left:
        prefix, child = left.pop()
        if why := _why_self_loading(child, prefix, stored, plain):
            found.append(SelfLoading(prefix, child, why))
        else:
            below = [(f"{prefix}{key}.", one) for key, one in child._modules.items() if one is not None]
            left += reversed(below)  # in torch's order: if two share memory, the later one wins
    return found


def meta_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers on the meta device, by name."""
    found: dict[str, torch.Tensor] = {}
    below = [("", module)]
    while below:
        prefix, child = below.pop()
        for key, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and tensor.is_meta:
                found[prefix + key] = tensor
        below += [(f"{prefix}{key}.", one) for key, one in child._modules.items() if one is not None]
    return found


def replace_tensors(module: nn.Module, fresh: Mapping[int, torch.Tensor]) -> None:
    """Replace a module's tensors, given by `id`, in every location that refers to them."""
    for child in module.modules():
        for registry in cast(Sequence[dict[str, torch.Tensor | None]], (child._parameters, child._buffers)):
            for key, registered in registry.items():
                if registered is not None and (other := fresh.get(id(registered))) is not None:
                    if type(child).__setattr__ is nn.Module.__setattr__:
                        registry[key] = other
                    else:  # a class that also stores its parameters elsewhere, such as nn.LSTM
                        setattr(child, key, other)


def _walk(module: nn.Module, prefix: str, found: dict[str, torch.Tensor]) -> None:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            found[prefix + key] = parameter
    if module._buffers:
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[prefix + key] = buffer
    for key, child in module._modules.items():
        if child is not None:
            _walk(child, f"{prefix}{key}.", found)


def _why_self_loading(module: nn.Module, prefix: str, stored: Collection[str], plain: dict[type, str]) -> str | None:
    module_class = type(module)
    why = plain.get(module_class)
    if why is None:
        why = plain[module_class] = _overrides(module_class)
    if why:
        return why
    if LOAD_METHODS & vars(module).keys():
        return f"this {module_class.__name__} instance overrides {min(LOAD_METHODS & vars(module).keys())}"
    if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
        return f"{module_class.__name__} has a load_state_dict hook"
    if isinstance(module, _NormBase) and module._buffers.get(ADDED_BY_NORMS) is not None:
        return None if prefix + ADDED_BY_NORMS in stored else f"{ADDED_BY_NORMS} is not stored"
    return None


def _overrides(module_class: type[nn.Module]) -> str:
    if module_class._load_from_state_dict not in PLAIN_LOADERS:
        return f"{module_class.__name__} overrides _load_from_state_dict"
    if module_class.set_extra_state is not nn.Module.set_extra_state:
        return f"{module_class.__name__} overrides set_extra_state"
    return ""
