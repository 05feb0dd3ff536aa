"""Builds modules without memory for their parameters; a loader supplies the memory later."""

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
    """Build modules on the calling thread with parameters without memory (meta) within this block.

    ::

        with rfork.no_init():
            module = Model(config)
        rfork.load(module, "s3://bucket/model/")

    A parameter drops its memory when it is registered, so initialising it afterwards costs nothing, and the
    memory is mostly released before a page of it was touched. Shapes, dtypes, `requires_grad` and attributes
    are kept; a parameter that is registered twice remains one (tied weights). Buffers are computed as usual.
    An existing parameter that is registered here loses its values. Code that reads a parameter's values while
    it builds its module fails, as on the meta device.

    Runs in the calling process, for the calling thread only. Raises nothing itself.
    """
    here = threading.get_ident()
    # Weak references to the original parameters: one may be registered in another module too.
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

    # torch types the hook as returning nothing, but documents that it may return a parameter.
    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def as_parameter(tensor: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter over the tensor's memory, with the class and attributes of another one."""
    parameter: nn.Parameter = torch.Tensor._make_subclass(type(like), tensor, like.requires_grad)
    if attributes := vars(like):
        vars(parameter).update(attributes)
    return parameter
