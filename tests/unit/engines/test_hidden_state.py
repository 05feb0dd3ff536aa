"""Hidden state of an engine's model: facts, floats, flags, and tensors of helper objects."""

from __future__ import annotations

import math
from enum import Enum
from functools import cached_property

import pytest
import torch
from torch import nn

from rfork.engines.hidden_state import HiddenState
from rfork.engines.sglang import compat as sglang_compat
from rfork.engines.vllm import compat as vllm_compat
from rfork.errors import LayoutMismatch, UnsupportedTensor
from rfork.image.capture import capture
from rfork.image.layout import tags_of

OWN = (__name__.partition(".")[0],)


class Backend(Enum):
    FAST = 1
    SLOW = 2


class Helper:
    def __init__(self, tensor: torch.Tensor, backend: Backend = Backend.FAST) -> None:
        self.packed = tensor
        self.backend = backend
        self.kernel: Helper | None = None


class Layer(nn.Module):
    def __init__(self, scale: float = 1.0, backend: Backend = Backend.FAST) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = scale
        self.impl = Helper(torch.full((2,), scale), backend)
        self.impl.kernel = Helper(self.weight.data[:2], backend)


def test_floats_are_transferred_in_the_image() -> None:
    """After its image is filled, the target's modules have the floats of the source's modules."""
    source, target = nn.Sequential(Layer(2.5), Layer(math.inf)), nn.Sequential(Layer(), Layer())
    HiddenState(source, (), OWN)
    hidden_state = HiddenState(target, (), OWN)
    for region, filled in zip(capture(source).regions, capture(target).regions, strict=True):
        filled.copy_(region)
    assert 2 == hidden_state.apply()
    assert [2.5, math.inf] == [vars(layer)["scale"] for layer in target]
    assert 0 == hidden_state.apply()


def test_layers_without_bytes_are_not_served() -> None:
    """An engine may keep a layer that it does not compute with, outside the module tree and without memory."""
    module = nn.Sequential(Layer())
    vars(module)["head"] = nn.Linear(2, 2, device="meta")
    HiddenState(module, (), OWN)
    assert not [spec for spec in capture(module).layout.tensors if spec.name.startswith("head")]


def test_registered_tensors_without_bytes_are_rejected() -> None:
    """A parameter of the module tree may not be missing."""
    module = nn.Sequential(Layer(), nn.Linear(2, 2, device="meta"))
    HiddenState(module, (), OWN)
    with pytest.raises(UnsupportedTensor, match="device meta"):
        capture(module)


def test_floats_of_helpers_and_tensors_are_transferred() -> None:
    """Kernels and parameters keep scales, too; a configuration's floats are the server's own."""

    class KernelConfig(Helper):
        pass

    def made(scale: float) -> Layer:
        layer = Layer()
        vars(layer.impl)["alpha"] = vars(layer.weight)["scale"] = scale
        layer.impl.kernel = KernelConfig(layer.weight.data[:2])
        vars(layer.impl.kernel)["memory_utilization"] = scale
        return layer

    source, target = made(0.5), made(1.0)
    HiddenState(source, (), OWN)
    hidden_state = HiddenState(target, (), OWN)
    for region, filled in zip(capture(source).regions, capture(target).regions, strict=True):
        filled.copy_(region)
    assert 2 == hidden_state.apply()
    assert 0.5 == vars(target.impl)["alpha"]
    assert 0.5 == vars(target.weight)["scale"]
    assert 1.0 == vars(target.impl.kernel)["memory_utilization"]


@pytest.mark.parametrize("owner", ["impl", "weight"])
def test_flags_of_helpers_and_tensors_are_compared(owner: str) -> None:
    """They select what is computed from the same bytes."""
    layouts = []
    for flag in (False, True):
        layer = Layer()
        vars(getattr(layer, owner))["is_transposed"] = flag
        HiddenState(layer, (), OWN)
        layouts.append(capture(layer).layout)
    assert "is_transposed" in (layouts[0].first_difference(layouts[1]) or "")


def own_tensors(module: nn.Module) -> dict[str, int]:
    """Return the captured tensors that are not the plug-in's, with their offsets."""
    specs = capture(module).layout.tensors
    return {spec.name: spec.offset for spec in specs if not spec.name.startswith("rfork.")}


def test_tensors_of_helpers_are_captured() -> None:
    """A helper's own tensor is captured, and a view of a weight is an alias of the weight."""
    layer = Layer()
    HiddenState(layer, (), OWN)
    offsets = own_tensors(layer)
    assert {"weight", "impl.packed", "impl.kernel.packed"} == offsets.keys()
    assert offsets["weight"] == offsets["impl.kernel.packed"]


def test_helper_classes_and_their_options_are_facts() -> None:
    """Different options of helpers make different layouts, and the difference is named."""
    layouts = []
    for backend in Backend:
        layer = Layer(backend=backend)
        HiddenState(layer, ("engine toy 1",), OWN)
        layouts.append(tags_of(capture(layer).layout))
    assert [
        {"engine toy 1", "kernels Layer: Helper(backend=FAST)"},
        {"engine toy 1", "kernels Layer: Helper(backend=SLOW)"},
    ] == layouts


@pytest.mark.parametrize("path", ["quant_method.moe_kernel.impl.fused_experts.quant_config._w1", "fp8_linear"])
def test_tensors_of_nested_helpers_are_captured(path: str) -> None:
    """Tensors of a method's kernel, its experts and their scales are captured, with and without cycles."""
    layer = Layer()
    owner: Layer | Helper = layer
    for key in path.split("."):
        helper = Helper(layer.weight.data[1:3])
        setattr(owner, key, helper)
        owner = helper
    vars(owner)["scale"] = torch.ones(2)
    vars(owner)["back"] = layer.impl
    HiddenState(layer, (), OWN)
    assert f"{path}.scale" in own_tensors(layer)


@pytest.mark.parametrize("key", [*vllm_compat.HELPER_ATTRIBUTES, *sglang_compat.HELPER_ATTRIBUTES])
def test_attributes_of_an_engine_are_followed(key: str) -> None:
    """The class of a helper object is a fact if the engine's attributes name it."""
    facts = []
    for attributes in ((), (key,)):
        layer = nn.Linear(2, 2)
        vars(layer)[key] = Helper(torch.ones(2))
        HiddenState(layer, (), OWN, attributes)
        facts.append(set(tags_of(capture(layer).layout)))
    assert {"kernels Linear: Helper(backend=FAST)"} == facts[1] - facts[0]


def test_a_flag_that_differs_is_reported() -> None:
    """A flag that loading sets on one side only changes the layout; torch's training mode does not."""
    layouts = []
    for loaded, training in ((False, True), (False, False), (True, True)):
        model = nn.Sequential(Layer(), Layer()).train(training)
        vars(model[1])["ready"] = loaded
        HiddenState(model, (), OWN)
        layouts.append(capture(model).layout)
    assert layouts[0] == layouts[1]
    assert "attribute ready: here False at 1, there True at 1" == layouts[0].first_difference(layouts[2])


def test_server_limits_and_names_are_not_compared() -> None:
    """Integers and text on an engine's modules depend on options of its server."""
    layouts = []
    for limit in (1, 2):
        layer = Layer()
        vars(layer)["max_num_tokens"], vars(layer)["backend"] = limit, f"b{limit}"
        HiddenState(layer, (), OWN)
        layouts.append(capture(layer).layout)
    assert layouts[0] == layouts[1]


def test_replaced_helper_tensors_are_captured_again() -> None:
    """After an update the image contains the helper's current tensors, but no new ones."""
    layer = Layer()
    hidden_state = HiddenState(layer, (), OWN)
    layout = capture(layer).layout
    layer.impl.packed = torch.full((2,), 7.0)
    vars(layer.impl)["workspace"] = torch.zeros(3)
    hidden_state.save()
    again = capture(layer, like=layout)
    assert layout == again.layout
    assert layer.impl.packed.data_ptr() in [segment.address for segment in again.segments(0, layout.image_bytes)]


@pytest.mark.parametrize("path", ["impl.packed", "impl.kernel.packed"])
def test_changed_helper_tensors_change_the_layout(path: str) -> None:
    """A missing tensor and a tensor that no longer aliases a weight change the layout."""
    layer = Layer()
    HiddenState(layer, (), OWN)
    layout = capture(layer).layout
    if path == "impl.packed":
        vars(layer.impl)["packed"] = None
    elif layer.impl.kernel is not None:
        layer.impl.kernel.packed = torch.ones(2)
    assert layout != capture(layer, like=layout).layout


def test_a_different_set_of_floats_is_a_different_layout() -> None:
    """Floats are matched by their names, which are part of the layout."""
    one, other = Layer(), Layer()
    vars(other)["more"] = 1.0
    for layer in (one, other):
        HiddenState(layer, (), OWN)
    assert capture(one).layout.layout_id != capture(other).layout.layout_id


def test_a_float_replaced_by_another_type_is_an_error() -> None:
    """An engine that replaces a float with something else has a different model."""
    layer = Layer()
    hidden_state = HiddenState(layer, (), OWN)
    vars(layer)["scale"] = None
    with pytest.raises(LayoutMismatch, match="scale was a float and is now NoneType"):
        hidden_state.save()


class Lazy(Layer):
    @cached_property
    def padded(self) -> bool:
        return True


def test_cached_properties_are_not_flags() -> None:
    """A cached property that only weight loading has computed does not change the layout; a flag does."""
    accessed, fresh, flagged = Lazy(), Lazy(), Lazy()
    vars(flagged)["native"] = vars(fresh)["native"] = vars(accessed)["native"] = False
    vars(flagged)["native"] = accessed.padded
    for model in (accessed, fresh, flagged):
        HiddenState(model, (), OWN)
    layouts = [capture(model).layout for model in (accessed, fresh, flagged)]
    assert layouts[0] == layouts[1]
    assert layouts[1] != layouts[2]
