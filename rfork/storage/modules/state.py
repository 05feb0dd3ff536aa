"""The tensors of a module that a checkpoint has names for, walked quickly: models have tens of thousands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, as `module.state_dict` gives them, in its order.

    Parameters are the module's own objects. Where a class or a hook makes its own state dict, that counts;
    other things than tensors in it are left out.
    """
    found: dict[str, torch.Tensor] = {}
    if _walk(module, "", found, {}):
        return found
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def without_memory(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of any kind that are on the meta device, by name."""
    found: dict[str, torch.Tensor] = {}
    below = [("", module)]
    while below:
        prefix, child = below.pop()
        for key, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and tensor.is_meta:
                found[prefix + key] = tensor
        below += [(f"{prefix}{key}.", one) for key, one in child._modules.items() if one is not None]
    return found


def put_in_place(module: nn.Module, fresh: Mapping[int, torch.Tensor]) -> None:
    """Put another tensor where a module holds one, by the `id` of that one, at each place that holds it."""
    for child in module.modules():
        for registry in cast(Sequence[dict[str, torch.Tensor | None]], (child._parameters, child._buffers)):
            for key, held in registry.items():
                if held is not None and (other := fresh.get(id(held))) is not None:
                    if type(child).__setattr__ is nn.Module.__setattr__:
                        registry[key] = other
                    else:  # a class that keeps its parameters in another place too, as nn.LSTM does
                        setattr(child, key, other)


def _walk(module: nn.Module, prefix: str, found: dict[str, torch.Tensor], plain: dict[type, bool]) -> bool:
    """Add the tensors of a module and of those below it; False where a state dict is made otherwise."""
    kind = type(module)
    usual = plain.get(kind)
    if usual is None:
        usual = plain[kind] = all(
            getattr(kind, name) is getattr(nn.Module, name)
            for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
        )
    if not usual or module._state_dict_hooks or module._state_dict_pre_hooks:
        return False
    for key, parameter in module._parameters.items():
        if parameter is not None:
            found[prefix + key] = parameter
    if module._buffers:
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[prefix + key] = buffer
    return all(
        _walk(child, f"{prefix}{key}.", found, plain)
        for key, child in module._modules.items()
        if child is not None
    )
