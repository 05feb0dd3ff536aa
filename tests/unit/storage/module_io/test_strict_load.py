"""Loading means what torch's strict `load_state_dict` means, or is refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rfork
from rfork.errors import CheckpointError
from rfork.storage.checkpoint import Checkpoint


def stored(folder: Path, **tensors: torch.Tensor) -> Path:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return path


class Fused(nn.Module):
    """Module with a parameter, and a named view of its first rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(6, 2), requires_grad=False)
        self.q = nn.Parameter(self.qkv.data[:2], requires_grad=False)


def test_a_parameter_with_only_a_view_stored_is_missing(tmp_path: Path) -> None:
    """A stored view does not load the parameter whose first rows it covers."""
    with pytest.raises(CheckpointError, match="lacks qkv"):
        rfork.load(Fused(), stored(tmp_path, q=torch.ones(2, 2)))


def test_a_checkpoint_with_only_a_view_is_refused(tmp_path: Path) -> None:
    """The checkpoint fallback of a fork refuses it too."""
    checkpoint = Checkpoint.open(stored(tmp_path, q=torch.ones(2, 2)))
    with pytest.raises(CheckpointError, match="lacks qkv"):
        checkpoint.load_into(Fused())


def test_a_view_of_a_loaded_parameter_is_loaded(tmp_path: Path) -> None:
    """All bytes of the view are loaded under the name of the parameter."""
    module = Fused()
    rfork.load(module, stored(tmp_path, qkv=torch.ones(6, 2)))
    assert [1.0] * 4 == module.q.flatten().tolist()


def test_views_that_tile_a_parameter_load_it(tmp_path: Path) -> None:
    """A parameter is loaded if all its bytes are stored under other names."""
    module = Fused()
    module.kv = nn.Parameter(module.qkv.data[2:], requires_grad=False)
    rfork.load(module, stored(tmp_path, q=torch.ones(2, 2), kv=torch.full((4, 2), 2.0)))
    assert [1.0] * 4 + [2.0] * 8 == module.qkv.flatten().tolist()


def test_overlapping_tensors_are_written_in_the_order_of_torch(tmp_path: Path) -> None:
    """If a parameter and a view of it are stored with different values, the name registered later counts."""
    module = Fused()
    rfork.load(module, stored(tmp_path, q=torch.ones(2, 2), qkv=torch.full((6, 2), 2.0)))
    assert [1.0] * 4 + [2.0] * 8 == module.qkv.flatten().tolist()


class Hooked(nn.Linear):
    """Module with a state-dict hook that returns copies, like wrappers that gather shards."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)

        def copied(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
            for name, tensor in state.items():
                state[name] = tensor.detach().clone()

        self._register_state_dict_hook(copied)


def test_a_state_dict_hook_that_copies_does_not_hide_the_parameters(tmp_path: Path) -> None:
    """The parameter of the module is filled, not the copy in its state dict."""
    module = Hooked()
    rfork.load(module, stored(tmp_path, weight=torch.ones(2, 2)))
    assert [1.0] * 4 == module.weight.flatten().tolist()


class Doubling(nn.Linear):
    """Module that converts the state that it loads."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_an_override_of_loading_is_used(tmp_path: Path) -> None:
    """A module's own conversion is applied; its neighbour is loaded unchanged."""
    module = nn.Sequential(Doubling(), nn.Linear(2, 2, bias=False))
    rfork.load(module, stored(tmp_path, **{"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}))
    assert ([2.0] * 4, [1.0] * 4) == tuple(parameter.flatten().tolist() for parameter in module.parameters())


def test_a_hook_that_renames_state_is_called(tmp_path: Path) -> None:
    """A pre-hook that renames entries of old files is called with the names of its module."""
    linear = nn.Linear(2, 2, bias=False)

    def renamed(state: dict[str, Any], prefix: str, *rest: object) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    linear._register_load_state_dict_pre_hook(renamed)
    rfork.load(nn.Sequential(linear), stored(tmp_path, **{"0.kernel": torch.ones(2, 2)}))
    assert [1.0] * 4 == linear.weight.flatten().tolist()


def test_an_exception_of_a_module_is_a_refusal(tmp_path: Path) -> None:
    """An exception of a module's own code is an error that names the module."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False))

    def broken(*_: object) -> None:
        raise KeyError("scale")

    module[0]._register_load_state_dict_pre_hook(broken)
    with pytest.raises(CheckpointError, match="0 rejected its state: KeyError: 'scale'"):
        rfork.load(module, stored(tmp_path, **{"0.weight": torch.ones(2, 2)}))


class Counting(nn.Module):
    """Module whose extra state is a tensor that it sets itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.count = torch.zeros(1)

    def get_extra_state(self) -> torch.Tensor:
        return self.count.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = state + 1


def test_extra_state_that_is_a_tensor_is_set(tmp_path: Path) -> None:
    """It is passed to the module, not written into the tensor of `get_extra_state`."""
    module = Counting()
    rfork.load(module, stored(tmp_path, weight=torch.ones(2), _extra_state=torch.full((1,), 5.0)))
    assert [6.0] == module.count.tolist()


def test_a_quantised_module_is_refused(tmp_path: Path) -> None:
    """No tensor file contains the packed weights of a quantised module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to deprecate them
        module = torch.ao.nn.quantized.Linear(4, 4)
    with pytest.raises(CheckpointError, match="rejected its state"):
        rfork.load(module, stored(tmp_path, scale=torch.tensor(1.0)))


def test_a_conjugate_view_is_loaded_by_its_values(tmp_path: Path) -> None:
    """A tensor whose values differ from its bytes has the stored values afterwards."""
    module = nn.Module()
    module.register_buffer("table", torch.zeros(2, dtype=torch.complex64).conj())
    rfork.load(module, stored(tmp_path, table=torch.tensor([1 + 2j, 3 - 4j])))
    assert [1 + 2j, 3 - 4j] == module.get_buffer("table").tolist()


def test_a_conjugate_view_in_a_checkpoint_is_not_read_by_bytes(tmp_path: Path) -> None:
    """The checkpoint fallback of a fork converts it too."""
    module = nn.Module()
    module.register_buffer("table", torch.zeros(2, dtype=torch.complex64).conj())
    Checkpoint.open(stored(tmp_path, table=torch.tensor([1 + 2j, 3 - 4j]))).load_into(module)
    assert [1 + 2j, 3 - 4j] == module.get_buffer("table").tolist()


def test_an_expanded_tensor_is_refused(tmp_path: Path) -> None:
    """Elements that share memory cannot have different values."""
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(1).expand(4))
    with pytest.raises(CheckpointError, match="mask cannot be loaded"):
        rfork.load(module, stored(tmp_path, mask=torch.ones(4)))


class Stray(nn.Linear):
    """Module with a tensor as a plain attribute."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.scale = torch.ones(3)


def test_a_plain_attribute_without_memory_is_an_error(tmp_path: Path) -> None:
    """A model with a tensor on the meta device cannot compute, so it is refused."""
    with torch.device("meta"):
        module = Stray()
    with pytest.raises(CheckpointError, match="lacks scale, which has no memory"):
        rfork.load(module, stored(tmp_path, weight=torch.ones(2, 2)))


def test_a_plain_attribute_without_memory_is_an_error_among_loaded_parameters(tmp_path: Path) -> None:
    """It is detected although all parameters have memory."""
    module = Stray()
    module.scale = torch.ones(3, device="meta")
    with pytest.raises(CheckpointError, match="lacks scale, which has no memory"):
        rfork.load(module, stored(tmp_path, weight=torch.ones(2, 2)))


def test_a_list_that_keeps_a_replaced_parameter_is_an_error(tmp_path: Path) -> None:
    """A second reference to a parameter without memory would stay on the meta device."""
    with rfork.no_init():
        module = nn.Linear(2, 2, bias=False)
    module.kept = [module.weight]  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"kept\.0 has no memory"):
        rfork.load(module, stored(tmp_path, weight=torch.ones(2, 2)))


def test_a_self_loading_module_without_memory_is_refused(tmp_path: Path) -> None:
    """torch's own loading ignores tensors on the meta device."""
    with rfork.no_init():
        module = Doubling()
    with pytest.raises(CheckpointError, match=r"cannot load .*weight: it has no memory, and Doubling overrides"):
        rfork.load(module, stored(tmp_path, weight=torch.ones(2, 2)))


def test_a_norm_from_an_old_file_keeps_its_batch_count(tmp_path: Path) -> None:
    """torch permits old files without the count of batches."""
    module = nn.BatchNorm1d(2)
    state = {name: torch.full((2,), 3.0) for name in ("weight", "bias", "running_mean", "running_var")}
    rfork.load(module, stored(tmp_path, **state))
    assert [3.0, 3.0] == module.get_buffer("running_var").tolist()


def test_a_scalar_that_is_stored_with_one_dimension_is_loaded(tmp_path: Path) -> None:
    """torch loads scalars that old files store with one dimension."""
    module = nn.Module()
    module.register_buffer("scale", torch.tensor(0.0))
    rfork.load(module, stored(tmp_path, scale=torch.ones(1)))
    assert 1.0 == module.get_buffer("scale").item()
