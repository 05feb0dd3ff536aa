"""State that a module registers: its parameters and persistent buffers, and the memory that they occupy.

Independent of where stored tensors come from, so that a fork can use it without importing readers of files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rfork.image import ranges
from rfork.image.layout import byte_extent
from rfork.image.module_tensors import BASE_TENSOR_TYPES

LOAD_METHODS = frozenset({"load_state_dict", "_load_from_state_dict", "set_extra_state"})
MODULE_ATTRIBUTES = len(vars(nn.Module()))
"""Number of attributes of a module that has no own ones."""
PLAIN_LOADERS = frozenset(
    {nn.Module._load_from_state_dict, _NormBase._load_from_state_dict, _InstanceNorm._load_from_state_dict}
)
"""Implementations that copy each tensor as stored. Those of norms only add what old files lack."""
ADDED_BY_NORMS = "num_batches_tracked"
EXTRA_STATE = "_extra_state"
"""Name of the result of `get_extra_state`, after the prefix of its module."""


def geometry_of(tensor: torch.Tensor) -> object:
    """Return a value that is equal for two tensors with the same elements in the same memory."""
    if tensor.is_meta or not tensor.numel() or not has_plain_bytes(tensor):
        return id(tensor)
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride, tensor.is_conj(), tensor.is_neg()


def uncovered(names: Iterable[str], state: Mapping[str, torch.Tensor], filled: Sequence[torch.Tensor]) -> list[str]:
    """Return the `names` that the filled tensors do not cover: neither equal to one nor within their memory."""
    same = {geometry_of(tensor) for tensor in filled}
    dense: dict[torch.device, list[ranges.Range]] = {}
    for tensor in filled:
        if not tensor.is_meta and tensor.numel() and has_plain_bytes(tensor) and is_dense(tensor):
            dense.setdefault(tensor.device, []).append(extent_of(tensor))
    merged = {device: ranges.normalise(parts) for device, parts in dense.items()}
    left: list[str] = []
    for name in names:
        missing = state.get(name)
        if missing is not None and geometry_of(missing) in same:
            continue
        if missing is not None and not missing.is_meta and missing.numel() and has_plain_bytes(missing):
            begin, end = extent_of(missing)
            if any(first <= begin and end <= last for first, last in merged.get(missing.device, ())):
                continue
            if _is_written(missing, filled):
                continue
        left.append(name)
    return left


def _is_written(tensor: torch.Tensor, filled: Sequence[torch.Tensor]) -> bool:
    """Return True if each element is filled. Exact; for the few tensors that are not dense."""
    storage, size = tensor.untyped_storage(), tensor.itemsize
    written = torch.zeros(storage.nbytes() // size, dtype=torch.bool)
    for other in filled:
        if (
            has_plain_bytes(other)
            and other.itemsize == size
            and other.device == tensor.device
            and other.untyped_storage().data_ptr() == storage.data_ptr()
        ):
            written.as_strided(other.shape, other.stride(), other.storage_offset()).fill_(True)
    return bool(written.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).all())


def extent_of(tensor: torch.Tensor) -> ranges.Range:
    """Return the address range from a strided tensor's first byte to the end of its last."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    return begin, begin + byte_extent(tensor.shape, tensor.stride(), tensor.itemsize)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill the extent, each byte once."""
    if tensor.is_contiguous():
        return True
    return not overlaps_itself(tensor) and extent_of(tensor)[1] - tensor.data_ptr() == tensor.nbytes


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two elements may share memory, as in an expanded tensor."""
    reach = 0
    for step, size in sorted(
        (step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has its own bytes in memory, laid out by strides."""
    wraps: bool = type(tensor) not in BASE_TENSOR_TYPES and is_traceable_wrapper_subclass(tensor)
    return (
        not wraps and tensor.layout is torch.strided and (tensor.is_cpu or tensor.is_cuda) and not tensor.is_quantized
    )


def overlapping(line: Sequence[tuple[int, int, str]]) -> Iterable[Sequence[tuple[int, int, str]]]:
    """Iterate over the groups of two or more extents that overlap; `line` is sorted."""
    first, reached = 0, -1
    for index, (begin, end, _) in enumerate(line):
        if begin >= reached:
            if index - first > 1:
                yield line[first:index]
            first = index
        reached = max(reached, end)
    if len(line) - first > 1:
        yield line[first:]


class SelfLoading(NamedTuple):
    """A module that loads its own state, by an override or a hook: see `why`. `prefix` ends in a dot."""

    prefix: str
    module: nn.Module
    why: str


class LoadableTensors:
    """A module's tensors, and its modules that load their own state, from one pass over its modules.

    `state` are the parameters and persistent buffers by name, in the order in which `load_state_dict` fills them: the
    module's own objects, regardless of what its `state_dict` returns. `other_buffers` are the buffers that are not
    persistent. `attribute_types` are the types of all further attributes. `stored` are the stored names.
    """

    def __init__(self, module: nn.Module, stored: Collection[str] = ()) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self.other_buffers: dict[str, torch.Tensor] = {}
        self.attribute_types: set[type] = set()
        self.self_loading: list[SelfLoading] = []
        self._stored = stored
        self._classes: dict[type, tuple[str, bool]] = {}
        """For each class why it loads its own state, and whether it is a norm."""
        module_class = type(module)
        overrides = module_class.load_state_dict is not nn.Module.load_state_dict
        if overrides:
            self.self_loading.append(SelfLoading("", module, f"{module_class.__name__} overrides load_state_dict"))
        self._visit("", module, overrides)

    @property
    def without_memory(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers on the meta device."""
        return {name: tensor for name, tensor in (self.state | self.other_buffers).items() if tensor.is_meta}

    @property
    def has_unregistered_tensors(self) -> bool:
        """True if modules may have tensors in attributes that are not registered."""
        return any(issubclass(each, torch.Tensor) for each in self.attribute_types)

    def _visit(self, prefix: str, module: nn.Module, owned: bool) -> None:
        """Add a module and those below it; `owned`: a module above it loads their state."""
        attributes = vars(module)
        if len(attributes) > MODULE_ATTRIBUTES:
            self.attribute_types.update(map(type, attributes.values()))
        if not owned and (why := self._why_self_loading(prefix, module, attributes)):
            self.self_loading.append(SelfLoading(prefix, module, why))
            owned = True
        for key, parameter in module._parameters.items():
            if parameter is not None:
                self.state[prefix + key] = parameter
        if buffers := module._buffers:
            for key, buffer in buffers.items():
                if buffer is not None:
                    persistent = key not in module._non_persistent_buffers_set
                    (self.state if persistent else self.other_buffers)[prefix + key] = buffer
        if children := module._modules:
            for key, child in children.items():
                if child is not None:
                    self._visit(f"{prefix}{key}.", child, owned)

    def _why_self_loading(self, prefix: str, module: nn.Module, attributes: Mapping[str, object]) -> str | None:
        module_class = type(module)
        known = self._classes.get(module_class)
        if known is None:
            known = self._classes[module_class] = _overrides(module_class), issubclass(module_class, _NormBase)
        why, is_norm = known
        if why:
            return why
        if "load_state_dict" in attributes or "_load_from_state_dict" in attributes or "set_extra_state" in attributes:
            return f"this {module_class.__name__} instance overrides {min(LOAD_METHODS & attributes.keys())}"
        if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
            return f"{module_class.__name__} has a load_state_dict hook"
        if is_norm and module._buffers.get(ADDED_BY_NORMS) is not None:
            return None if prefix + ADDED_BY_NORMS in self._stored else f"{ADDED_BY_NORMS} is not stored"
        return None


def registered_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; see `LoadableTensors.state`."""
    return LoadableTensors(module).state


def self_loading(module: nn.Module, stored: Collection[str]) -> list[SelfLoading]:
    """Return the topmost modules whose loading is more than copying each tensor. `stored` are the stored
    names.
    """
    return LoadableTensors(module, stored).self_loading


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


def _overrides(module_class: type[nn.Module]) -> str:
    if module_class._load_from_state_dict not in PLAIN_LOADERS:
        return f"{module_class.__name__} overrides _load_from_state_dict"
    if module_class.set_extra_state is not nn.Module.set_extra_state:
        return f"{module_class.__name__} overrides set_extra_state"
    return ""
