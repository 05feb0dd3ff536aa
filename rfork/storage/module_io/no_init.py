"""Modules that are built without memory for their parameters, for a loader to give them that of a file's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary


@contextmanager
def no_init() -> Iterator[None]:
    """Within this block, modules that the calling thread builds have parameters without memory (meta).

    ::

        with rfork.no_init():
            module = Model(config)
        rfork.load(module, "s3://bucket/model/")

    A parameter gives up its memory as it is registered, so what its module does to initialise it after that
    costs nothing; what it is made of is released, mostly before a page of it was touched. Shapes, types,
    `requires_grad` and attributes stay; a parameter that is registered twice stays one (tied weights).
    Buffers are computed as usual. A parameter that existed before and is registered here loses its values.
    Code that reads a parameter's values while it builds its module fails, as on the meta device.

    Runs in the process that calls it, for the calling thread alone. Never raises by itself.
    """
    here = threading.get_ident()
    # Of the parameters that still live elsewhere: the same one may be registered at another place too.
    known = WeakTensorKeyDictionary()

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != here or parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        found: nn.Parameter | None = known.get(parameter)  # type: ignore[no-untyped-call]
        if found is None:
            empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            found = as_parameter(empty, parameter)
            known[parameter] = found
        return found

    # torch says of its type that it returns nothing, and of its use that it may return a parameter.
    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def as_parameter(tensor: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    """A parameter over the tensor's memory, of the class and with the attributes of another."""
    parameter: nn.Parameter = torch.Tensor._make_subclass(type(like), tensor, like.requires_grad)
    if attributes := vars(like):
        vars(parameter).update(attributes)
    return parameter
