"""Finding the tensors of a module: every one it serves with, under every name it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import nn
from torch.utils._python_dispatch import TraceableWrapperSubclass, is_traceable_wrapper_subclass

from rfork.errors import UnsupportedTensor

OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What nn.Module itself keeps on every module: registries and hooks."""
PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter})
PLAIN_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""Types of most of what modules keep beside tensors."""


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every plain tensor reachable from `module` by dotted name.

    Parameters and buffers (persistent or not), tensors hung on modules, inside their nested lists,
    tuples and dicts, or hung on other tensors; a tensor subclass that wraps others is given by its
    inner tensors, as ``weight.inner``. A module registered at two paths gives both names. Modules
    that are only referred to (from lists or back to a parent) are walked once, and not at all when
    they are registered in the tree as well. Gradients are left out.

    Raises UnsupportedTensor when two tensors have one name.
    """
    walk = _Walk(module)
    walk.modules("", module)
    return walk.found


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's bytes: itself, or those that a subclass wraps (a DTensor's shard)."""
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if not wraps:
        yield tensor
        return
    for _, inner in _inner(tensor):
        yield from plain_tensors(inner)


class _Walk:
    """One traversal. Objects on the current path are not entered again, so cycles end.

    Tensors are kept as they are found, and plain ones take no further step: a model has tens of thousands.
    """

    def __init__(self, root: nn.Module) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self._registered = _registered(root)
        self._referred: set[int] = set()
        self._path: set[int] = set()

    def modules(self, name: str, module: nn.Module) -> None:
        """The tensors of a registered module and of those registered below it."""
        if id(module) in self._path:
            return
        self._path.add(id(module))
        prefix = f"{name}." if name else ""
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is not None:
                    self._tensor(prefix + key, tensor)
        attributes = vars(module)
        if own := attributes.keys() - OWN_ATTRIBUTES:
            for key, value in attributes.items():
                if key in own and type(value) not in PLAIN_VALUES:
                    self._value(prefix + key, value)
        for key, child in module._modules.items():
            if child is not None:
                self.modules(prefix + key, child)
        self._path.discard(id(module))

    def _value(self, name: str, value: object) -> None:
        """The tensors in what somebody hung on a module or a tensor: anything at all."""
        if isinstance(value, torch.Tensor):
            self._tensor(name, value)
        elif isinstance(value, nn.Module):
            if id(value) not in self._registered and id(value) not in self._referred:
                self._referred.add(id(value))
                self.modules(name, value)
        elif isinstance(value, list | tuple):
            self._items(name, value, ((str(index), item) for index, item in enumerate(value)))
        elif isinstance(value, Mapping):
            self._items(name, value, _named_items(value))

    def _items(self, name: str, container: object, items: Iterable[tuple[str, object]]) -> None:
        if id(container) in self._path:
            return
        self._path.add(id(container))
        for key, item in items:
            if type(item) not in PLAIN_VALUES:
                self._value(_join(name, key), item)
        self._path.discard(id(container))

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        hung = vars(tensor)
        if not hung and type(tensor) in PLAIN_TENSORS:
            self._keep(name, tensor)
            return
        if id(tensor) in self._path:
            return
        self._path.add(id(tensor))
        wraps: bool = is_traceable_wrapper_subclass(tensor)
        if wraps:
            for key, value in _inner(tensor):
                self._tensor(_join(name, key), value)
        else:
            self._keep(name, tensor)
        for key, value in hung.items():
            self._value(_join(name, key), value)
        self._path.discard(id(tensor))

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        if self.found.setdefault(name, tensor) is not tensor:
            raise UnsupportedTensor(name, "another tensor has the same name")


def _inner(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What a wrapper wraps, by the names it has there: the wrapper has no bytes of its own."""
    names, _ = cast(TraceableWrapperSubclass, tensor).__tensor_flatten__()
    for name in names:
        value = getattr(tensor, name)
        if isinstance(value, torch.Tensor):  # a DTensor names its device mesh as well
            yield name, value


def _registered(root: nn.Module) -> set[int]:
    """Each module registered in the tree, as `nn.Module.modules` finds them, for a fraction of its time."""
    found, left = {id(root)}, [root]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and id(child) not in found:
                found.add(id(child))
                left.append(child)
    return found


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
