"""Finding the tensors of a module: every one it serves with, under every name it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import nn
from torch.utils._python_dispatch import TraceableWrapperSubclass, is_traceable_wrapper_subclass

from rfork.errors import UnsupportedTensor

Named = tuple[str, torch.Tensor]

OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What nn.Module itself keeps on every module: registries and hooks."""


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every plain tensor reachable from `module` by dotted name.

    Parameters and buffers (persistent or not), tensors hung on modules, inside their nested lists,
    tuples and dicts, or hung on other tensors; a tensor subclass that wraps others is given by its
    inner tensors, as ``weight.inner``. A module registered at two paths gives both names. Modules
    that are only referred to (from lists or back to a parent) are walked once, and not at all when
    they are registered in the tree as well. Gradients are left out.

    Raises UnsupportedTensor when two tensors have one name.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _Walk(module).modules("", module):
        if found.setdefault(name, tensor) is not tensor:
            raise UnsupportedTensor(name, "another tensor has the same name")
    return found


class _Walk:
    """One traversal. Objects on the current path are not entered again, so cycles end."""

    def __init__(self, root: nn.Module) -> None:
        # nn.Module.modules() gives each registered module once, and knows cycles.
        self._registered = {id(module) for module in root.modules()}
        self._referred: set[int] = set()
        self._path: set[int] = set()

    def modules(self, name: str, module: nn.Module) -> Iterator[Named]:
        """The tensors of a registered module and of those registered below it."""
        if id(module) in self._path:
            return
        self._path.add(id(module))
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is not None:
                    yield from self._tensor(_join(name, key), tensor)
        for key, value in vars(module).items():
            if key not in OWN_ATTRIBUTES:
                yield from self._value(_join(name, key), value)
        for key, child in module._modules.items():
            if child is not None:
                yield from self.modules(_join(name, key), child)
        self._path.discard(id(module))

    def _value(self, name: str, value: object) -> Iterator[Named]:
        """The tensors in what somebody hung on a module or a tensor: anything at all."""
        if isinstance(value, torch.Tensor):
            yield from self._tensor(name, value)
        elif isinstance(value, nn.Module):
            if id(value) not in self._registered and id(value) not in self._referred:
                self._referred.add(id(value))
                yield from self.modules(name, value)
        elif isinstance(value, list | tuple):
            yield from self._items(name, value, {str(index): item for index, item in enumerate(value)})
        elif isinstance(value, Mapping):
            yield from self._items(name, value, dict(_named_items(value)))

    def _items(self, name: str, container: object, items: Mapping[str, object]) -> Iterator[Named]:
        if id(container) in self._path:
            return
        self._path.add(id(container))
        for key, item in items.items():
            yield from self._value(_join(name, key), item)
        self._path.discard(id(container))

    def _tensor(self, name: str, tensor: torch.Tensor) -> Iterator[Named]:
        if id(tensor) in self._path:
            return
        self._path.add(id(tensor))
        wraps: bool = is_traceable_wrapper_subclass(tensor)
        if wraps:
            # The wrapper has no bytes of its own.
            inner, _ = cast(TraceableWrapperSubclass, tensor).__tensor_flatten__()
            for key in inner:
                yield from self._tensor(_join(name, key), getattr(tensor, key))
        else:
            yield name, tensor
        for key, value in vars(tensor).items():
            yield from self._value(_join(name, key), value)
        self._path.discard(id(tensor))


def _named_items(mapping: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    """Items by a name that is the same in every process; keys without one are named by their place."""
    taken: set[str] = set()
    for position, (key, value) in enumerate(mapping.items()):
        name = str(key) if isinstance(key, str | int | torch.dtype | torch.device) else f"[{position}]"
        if name in taken:
            name = f"{name}[{position}]"
        taken.add(name)
        yield name, value


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
