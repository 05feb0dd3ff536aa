"""Names of the methods with which an engine's layers compute, and the methods whose layers can be forked.

A method is named after the classes of a layer's quantisation method, scheme and kernel, for example
``AutoGPTQLinearMethod/CPUWNA16LinearKernel``: kernels of one method keep different state. Which methods are forked is
decided by the golden check (`rfork.engines.golden_check`), which ran for an engine's release, or runs in
``rfork doctor`` on the user's machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import nn

STEP: Final = "process_weights_after_loading"
"""Name of the function of a method that post-processes a layer."""
KERNELS: Final = ("kernel", "linear_kernel", "fp8_linear", "fp8_kernel", "experts_cls", "runner")
"""Attributes of methods and schemes that refer to the kernel, or to its class."""


def method_name(layer: nn.Module) -> str:
    """Return the name of the method with which a layer computes; empty if it has none."""
    method = getattr(layer, "quant_method", None)
    if method is None:
        return ""
    scheme = getattr(layer, "scheme", None) or getattr(method, "scheme", None)
    owners = [method] if scheme is None else [method, scheme]
    found = [vars(owner).get(key) for owner in reversed(owners) for key in KERNELS if hasattr(owner, "__dict__")]
    kernel = next((one for one in found if one is not None), None)
    parts = [_class_name(one) for one in (*owners, kernel) if one is not None]
    return "/".join(parts)


def _class_name(value: object) -> str:
    return (value if isinstance(value, type) else type(value)).__name__


def step_owner(method: object) -> type | None:
    """Return the class that defines the post-processing of a method."""
    return next((base for base in type(method).__mro__ if STEP in vars(base)), None)


def dotted_name(found: type) -> str:
    """Return the module and name of a class."""
    return f"{found.__module__}.{found.__qualname__}"


@dataclass(frozen=True, slots=True)
class ForkableMethods:
    """Methods of one engine whose layers can be forked."""

    base: Collection[str]
    """Dotted names of the engine's base classes of methods, whose post-processing does nothing."""
    proven: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Names of methods that have passed the golden check, by type of device: their layers are filled, no more."""
    read: Collection[str] = ()
    """Dotted names of classes whose post-processing keeps no state outside tensors, judged by reading it."""
    command: str = "rfork doctor"
    """Command that runs the golden check."""

    def refusal(self, layer: nn.Module, device_type: str, accepted: Collection[str] = ()) -> str | None:
        """Return why a layer cannot be forked, or None if it can. `accepted`: names that the user has checked."""
        method = getattr(layer, "quant_method", None)
        if method is None:
            return None
        owner, name = step_owner(method), method_name(layer)
        if owner is None or dotted_name(owner) in (*self.base, *self.read):
            return None
        if name in accepted or self.is_proven(name, device_type):
            return None
        return f"{name} has not passed the golden check on {device_type}: `{self.command}` runs it"

    def is_proven(self, name: str, device_type: str) -> bool:
        """Return True if layers with this method need no more than their tensors."""
        return name in self.proven.get(device_type, ())
