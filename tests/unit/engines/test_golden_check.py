"""Golden check of layers whose post-processing keeps state in different places."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rfork.engines.golden_check import Capturing, GoldenLayer, copy_of, failure_of, randomise

SIZE = 16
KEPT: dict[int, torch.Tensor] = {}
"""State outside every layer, as in a kernel's library."""


class EngineParameter(nn.Parameter):
    """A parameter that takes more arguments than a tensor, as vLLM's do."""

    def __new__(cls, data: torch.Tensor, **_: object) -> EngineParameter:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, loader: Callable[[], None]) -> None:
        self.loader = loader


class Layer(nn.Module):
    """A linear layer with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = EngineParameter(torch.empty(SIZE, SIZE), loader=lambda: None)
        self.weight_scale = EngineParameter(torch.empty(SIZE, 1), loader=lambda: None)


def outputs(layer: nn.Module) -> torch.Tensor:
    """Return what a layer computes from its tensors."""
    return (layer.get_parameter("weight") * layer.get_parameter("weight_scale")) @ torch.ones(SIZE)


def transposed(layer: nn.Module) -> None:
    """Replace the weight, as kernels that repack do."""
    layer.weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)  # type: ignore[operator]


def with_float(layer: nn.Module) -> None:
    """Keep a float that is derived from the weights."""
    vars(layer)["factor"] = float(layer.weight.sum())  # type: ignore[operator]


def outputs_with_float(layer: nn.Module) -> torch.Tensor:
    return outputs(layer) * float(vars(layer)["factor"])


def hidden(layer: nn.Module) -> None:
    """Keep a copy of the weights where nothing refers to it."""
    vars(layer)["handle_id"] = 7
    KEPT[id(layer)] = layer.weight.detach().clone()  # type: ignore[operator]


def outputs_of_hidden(layer: nn.Module) -> torch.Tensor:
    return KEPT[id(layer)] @ torch.ones(SIZE)


def layout_by_value(layer: nn.Module) -> None:
    """Keep a number that is derived from the weights."""
    vars(layer)["levels"] = int(layer.weight.sum() * 1000)  # type: ignore[operator]


def failing(layer: nn.Module) -> None:
    raise NotImplementedError("this kernel needs a GPU")


def checked(
    process: Callable[[nn.Module], None],
    compute: Callable[[nn.Module], torch.Tensor] = outputs,
    rebuild: Callable[[nn.Module], None] | None = None,
) -> str | None:
    return failure_of(GoldenLayer("layer", Layer(), process, compute, rebuild), Capturing())


@pytest.mark.parametrize("rebuild", [None, lambda layer: None])
def test_a_layer_of_tensors_passes(rebuild: Callable[[nn.Module], None] | None) -> None:
    """All that it computes with is captured, even if post-processing replaces tensors."""
    assert checked(transposed, rebuild=rebuild) is None


def test_floats_on_a_layer_are_carried() -> None:
    """A fork transfers them with the tensors."""
    assert checked(with_float, outputs_with_float) is None


def test_hidden_state_fails() -> None:
    """Filled tensors do not change what the kernel keeps, unless it is rebuilt from them."""
    assert "its outputs depend on state that is not captured" == checked(hidden, outputs_of_hidden)
    assert checked(hidden, outputs_of_hidden, rebuild=hidden) is None


def test_integers_that_depend_on_the_weights_fail() -> None:
    """They cannot be known before the weights arrive."""
    found = checked(layout_by_value)
    assert found is not None
    assert "levels" in found


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda layer: torch.ones(3), "do not depend on the weights"),
        (lambda layer: outputs(layer) * float("nan"), "no output is finite"),
    ],
)
def test_a_check_that_proves_nothing_fails(compute: Callable[[nn.Module], torch.Tensor], reason: str) -> None:
    """Equal outputs are no proof if they would be equal without the fork."""
    found = checked(transposed, compute)
    assert found is not None
    assert reason in found


def test_random_outputs_fail() -> None:
    """Nothing can be concluded from a layer that differs from itself."""
    calls = itertools.count()
    found = checked(transposed, lambda layer: outputs(layer) * (1 + next(calls)))
    assert found is not None


def test_an_exception_of_the_engine_is_a_reason() -> None:
    """It is reported in one line."""
    assert "NotImplementedError: this kernel needs a GPU" == checked(failing)


def test_copies_have_their_own_memory() -> None:
    """Parameters of the engine's classes are copied with their attributes."""
    layer = Layer()
    copied = copy_of(layer)
    randomise(copied, seed=1)
    weight = copied.get_parameter("weight")
    assert EngineParameter is type(weight)
    assert layer.weight.loader is weight.loader
    assert layer.weight.data_ptr() != weight.data_ptr()


def test_objects_that_cannot_be_copied_are_shared() -> None:
    """Unless they belong to the code that computes with the weights: a check of shared state proves nothing."""
    layer = nn.Sequential(Layer())
    lock = threading.Lock()
    vars(layer[0])["group"] = lock
    assert lock is vars(copy_of(layer)[0])["group"]  # type: ignore[index]
    vars(layer[0])["kernel"] = lock
    with pytest.raises(TypeError):
        copy_of(layer)


def test_random_values_are_valid() -> None:
    """Floats are positive, packed weights differ, and indices and shapes are kept."""
    module = nn.Module()
    module.register_buffer("packed", torch.zeros(32, 32, dtype=torch.int32))
    module.register_buffer("g_idx", torch.arange(1024, dtype=torch.int32))
    module.register_buffer("weight_shape", torch.tensor([32, 32]))
    module.register_buffer("scale", torch.zeros(1024, dtype=torch.float8_e4m3fn))
    randomise(module, seed=1)
    assert module.get_buffer("packed").unique().numel() > 1000
    assert list(range(1024)) == module.get_buffer("g_idx").tolist()
    assert [32, 32] == module.get_buffer("weight_shape").tolist()
    assert module.get_buffer("scale").float().min() >= 0.5
