"""Tensors that a draft takes over from its main model after the engine has loaded both (EAGLE, MTP).

They are part of the main model's image and not of the draft's, so they are sent once. Which ones an engine shares
may depend on the checkpoint of the draft, which a target need not have. So a target knows a few possible choices, and
takes the one whose layout is served.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Protocol
from weakref import ReferenceType, ref

import torch
from torch import nn

Patterns = tuple[str, ...]
"""Name patterns of shared tensors (`fnmatch`); empty: none."""


class TensorSharing(Protocol):
    """The tensors that an engine's draft shares with its main model."""

    def choices(self, module: nn.Module) -> Sequence[Patterns]:
        """Return what a draft without weights may share, the most likely choice first. Never empty."""
        ...

    def of_loaded(self, module: nn.Module) -> Patterns:
        """Return what a draft that the engine has loaded will share."""
        ...

    def apply(self, module: nn.Module, shared: Patterns) -> None:
        """Make the engine share exactly these tensors."""
        ...

    def on_filled(self, module: nn.Module) -> None:
        """Note that a fork or a snapshot has filled the module: shared tensors have no content until then."""
        ...


_main: ReferenceType[nn.Module] | None = None


def remember_main(module: nn.Module) -> None:
    """Note the main model of this process. An engine loads it before its drafts."""
    global _main  # an engine's loaders know nothing of one another
    _main = ref(module)


def main_model() -> nn.Module | None:
    """Return the main model of this process, if rfork has seen it."""
    return _main() if _main is not None else None


def not_shared(draft: nn.Module, main: nn.Module, shared: Patterns) -> Sequence[str]:
    """Return the names of tensors that match `shared`, but are none of the main model's."""
    addresses = {_key(tensor) for _, tensor in _tensors(main)}
    return [name for name, tensor in _tensors(draft) if matches(name, shared) and _key(tensor) not in addresses]


def shared_names(draft: nn.Module, main: nn.Module) -> Patterns:
    """Return the names of the draft's tensors that are the main model's."""
    addresses = {_key(tensor) for _, tensor in _tensors(main)}
    return tuple(name for name, tensor in _tensors(draft) if _key(tensor) in addresses)


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return True if a tensor's name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if tensor.numel():
            yield name, tensor


def _key(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
