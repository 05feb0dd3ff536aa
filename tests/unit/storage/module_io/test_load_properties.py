"""Random modules and files: `rfork.load` and torch's strict `load_state_dict` have the same result, or both
refuse.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import rfork
from rfork.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64)
FORMS = ("plain", "transposed", "strided", "offset", "conjugate", "scalar") * 4 + ("expanded",)
LINKS = ("none", "tied", "rows", "transpose", "conjugate")
HOOKS = ("none",) * 8 + ("rename", "drop", "double", "permit_missing", "copies", "extra", "raise")
CHANGES = ("gone", "gone", "gone", "dtype", "dtype", "shape", "one", "under another name")


def make_tensor(form: str, dtype: torch.dtype) -> torch.Tensor:
    if form == "scalar":
        return torch.zeros((), dtype=dtype)
    if form == "transposed":
        return torch.zeros(3, 4, dtype=dtype).t()
    if form == "strided":
        return torch.zeros(4, 6, dtype=dtype)[:, ::2]
    if form == "offset":
        return torch.zeros(14, dtype=dtype)[2:].view(4, 3)
    if form == "conjugate":
        return torch.zeros(4, 3, dtype=torch.complex64).conj()
    if form == "expanded":
        return torch.zeros(3, dtype=dtype).expand(4, 3)
    return torch.zeros(4, 3, dtype=dtype)


def make_alias(link: str, other: torch.Tensor) -> torch.Tensor:
    if link == "rows" and other.dim():
        return other[1:3]
    if link == "transpose":
        return other.t()
    if link == "conjugate":
        return other.conj()
    return other


class Doubled(nn.Module):
    """Module that changes the state that it loads, as modules that pack their weights do."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in self._parameters:
            if prefix + name in state_dict:
                state_dict[prefix + name] = state_dict[prefix + name] * 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Extra(nn.Module):
    """Module with extra state."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if isinstance(first := next(iter(self._buffers.values()), None), torch.Tensor):
            first.zero_()


def add_hook(module: nn.Module, hook: str) -> None:
    def rename(state: dict[str, Any], prefix: str, *_: object) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}t0"] = state.pop(f"{prefix}old")

    def drop(state: dict[str, Any], prefix: str, *_: object) -> None:
        state.pop(f"{prefix}t0", None)

    def broken(*_: object) -> None:
        raise KeyError("packed")

    def permit_missing(_: nn.Module, keys: Any) -> None:
        keys.missing_keys.clear()

    def copies(_: nn.Module, state: dict[str, Any], *rest: object) -> None:
        state.update((name, tensor.clone()) for name, tensor in state.items())

    if hook in ("rename", "drop", "raise"):
        chosen = {"rename": rename, "drop": drop, "raise": broken}[hook]
        module._register_load_state_dict_pre_hook(chosen)
    elif hook == "permit_missing":
        module.register_load_state_dict_post_hook(permit_missing)
    elif hook == "copies":
        module._register_state_dict_hook(copies)


tensors = st.tuples(st.sampled_from(FORMS), st.sampled_from(DTYPES), st.sampled_from(LINKS), st.sampled_from("ppbbnN"))
modules = st.tuples(st.lists(tensors, max_size=4), st.sampled_from(HOOKS), st.booleans())
shapes = st.lists(modules, min_size=1, max_size=4)
changes = st.dictionaries(st.integers(1, 8), st.sampled_from(CHANGES), max_size=2)


def build_module(description: Any) -> nn.Module:
    """Build a chain or fan of modules; a link refers to the previous tensor of any module."""
    root: nn.Module | None = None
    last: torch.Tensor | None = None
    parent = root
    for number, (content, hook, nested) in enumerate(description):
        module = {"double": Doubled, "extra": Extra}.get(hook, nn.Module)()
        for position, (form, dtype, link, role) in enumerate(content):
            is_new = link == "none" or last is None
            tensor = make_tensor(form, dtype) if is_new or last is None else make_alias(link, last)
            if role == "p" and (tensor.is_floating_point() or tensor.is_complex()):
                module.register_parameter(f"t{position}", nn.Parameter(tensor, requires_grad=False))
                tensor = module.get_parameter(f"t{position}").data
            elif role == "N":
                module.register_buffer(f"t{position}", None)
                continue
            else:
                module.register_buffer(f"t{position}", tensor, persistent=role != "n")
            last = tensor
        if number % 3 == 2:
            module.add_module("norm", nn.BatchNorm1d(3))
        # Below the root such a hook also permits missing names of other modules, because torch shares one
        # list: rfork does not.
        add_hook(module, "none" if hook == "permit_missing" and root is not None else hook)
        if root is None or parent is None:
            root = parent = module
        else:
            parent.add_module(f"m{number}", module)
            parent = module if nested else root
    assert root is not None
    return root


def registered(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers without the module's state-dict hooks."""
    return {
        prefix + ("." if prefix else "") + name: tensor
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name, tensor in itertools.chain(child._parameters.items(), child._buffers.items())
        if tensor is not None and name not in child._non_persistent_buffers_set
    }


def content_of(module: nn.Module, chosen: dict[int, str], unexpected: bool) -> dict[str, torch.Tensor]:
    """Return the content of a file: a value for each tensor of the module, changed according to `chosen`."""
    found: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(registered(module).items(), 1):
        dtype = torch.float32 if tensor.dtype is torch.float16 else tensor.dtype
        value = (torch.arange(tensor.numel()) % 7 + number).to(dtype).reshape(tensor.shape).contiguous()
        if value.is_complex():
            value = value * (1 + 2j)
        change = chosen.get(number)
        if change == "gone":
            continue
        if change == "dtype":
            value = value.to(torch.int64 if value.dtype is torch.uint8 else torch.float32)
        elif change == "shape":
            value = value.reshape(-1)[:2].clone()
        elif change == "one":
            value = value.reshape(-1)[:1].clone()
        elif change == "under another name":
            name = name.rpartition("t")[0] + "old"
        found[name] = value
    if unexpected:
        found["unknown.name"] = torch.ones(2)
    return found


def fill(module: nn.Module, value: int) -> None:
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        memory.fill_(value)


def values(module: nn.Module) -> dict[str, list[Any]]:
    """Return the values of all tensors, including those that are not loaded."""
    both = itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
    return {name: tensor.detach().reshape(-1).tolist() for name, tensor in both}


def strict_values(description: Any, state: Mapping[str, torch.Tensor]) -> dict[str, list[Any]] | None:
    """Return the values after torch's strict loading, or None if torch refuses.

    A name may be missing if all its bytes are loaded under other names, because safetensors stores tied
    weights once. Loading over two backgrounds shows which names are affected.
    """
    found: list[dict[str, list[Any]]] = []
    for background in (1, 2):
        module = build_module(description)
        fill(module, background)
        try:
            keys = module.load_state_dict(copy.deepcopy(dict(state)), strict=False)
        except Exception:
            return None
        if keys.unexpected_keys:
            return None
        missing, registered_tensors = keys.missing_keys, registered(module)
        if any(name not in registered_tensors for name in missing):
            return None
        found.append(values(module))
    one, other = found
    return one if all(one[name] == other[name] and one[name] for name in missing) else None


def loaded(description: Any, path: Path) -> dict[str, list[Any]] | None:
    module = build_module(description)
    fill(module, 1)
    try:
        rfork.load(module, path)
    except CheckpointError:
        return None
    return values(module)


@pytest.mark.filterwarnings("ignore:Casting complex values")
@settings(max_examples=200)
@given(shapes, changes, st.integers(0, 9))
def test_load_equals_strict_loading(
    tmp_path_factory: pytest.TempPathFactory, description: Any, chosen: dict[int, str], unexpected: int
) -> None:
    """Both produce the same values in every tensor, or both refuse."""
    path = tmp_path_factory.getbasetemp() / "model.safetensors"
    state = content_of(build_module(description), chosen, unexpected == 0)
    save_file(state, path)
    expected = strict_values(description, state)
    found = loaded(description, path)
    registered_tensors = registered(build_module(description))
    loses_precision = any(
        name in registered_tensors and not torch.can_cast(value.dtype, registered_tensors[name].dtype)
        for name, value in state.items()
    )
    if loses_precision and found is None:
        event("refused because numbers would lose their fractions")
    else:
        event("refused by both" if expected is None else "loaded by both")
        assert expected == found
