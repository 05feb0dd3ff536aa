"""Parts of relocation that all engines share: headers, twins, and tensors that loading wrote."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rfork.engines import relocation
from rfork.engines.layer_methods import STEP
from rfork.engines.relocation import Weights
from rfork.engines.sglang import methods as sglang_methods
from rfork.engines.vllm import compat as vllm_compat
from rfork.engines.vllm import methods as vllm_methods
from rfork.errors import ModelError, UnsupportedTensor
from rfork.placement.placement_map import PlacementMap, TensorTable, TensorType
from rfork.placement.recorder import Recorder

FLOAT = TensorType("float32", 4, (4, 2))
VLLM = "vllm.model_executor.layers"
SGLANG = "sglang.srt.layers.quantization"


def table(**types: TensorType) -> TensorTable:
    """Return a table of checkpoint tensors."""
    return TensorTable(types.keys(), types.values())


class Model(nn.Module):
    """Model with one loaded layer, a tied head, and a buffer that is not in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.layer.weight
        self.register_buffer("table", torch.zeros(3))

    def load_weights(self, weights: Weights) -> None:
        """Load a checkpoint."""
        for _, tensor in weights:
            self.layer.weight.data.copy_(tensor)


def load_twin(device: torch.device, recorder: Recorder, weights: Weights) -> nn.Module:
    """Build a model and load recorded tensors."""
    with device:
        twin = Model()
    with recorder:
        twin.load_weights(weights)
    return twin


@pytest.fixture
def placement_map() -> PlacementMap:
    """Placement map of the model."""
    return relocation.record(table(weight=FLOAT), load_twin)


def test_headers_list_names_with_the_prefix_of_their_file(tmp_path: Path) -> None:
    """The table has all files' tensors."""
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.bfloat16)}, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros(1, dtype=torch.float8_e4m3fn)}, tmp_path / "2.safetensors")
    found = relocation.header_table([("", tmp_path / "1.safetensors"), ("more.", tmp_path / "2.safetensors")])
    assert found is not None
    assert {name: found.type_of(index) for name, index in found.positions.items()} == {
        "a": TensorType("float32", 4, (2, 3)),
        "b": TensorType("bfloat16", 2, ()),
        "more.a": TensorType("float8_e4m3fn", 1, (1,)),
    }


def test_a_tensor_in_two_files_is_listed_once(tmp_path: Path) -> None:
    """A repeated tensor of the same type has one entry."""
    for file in ("1", "2"):
        save_file({"a": torch.zeros(2)}, tmp_path / file)
    found = relocation.header_table([("", tmp_path / "1"), ("", tmp_path / "2")])
    assert found is not None
    assert found.names == ["a"]


def test_files_with_different_tensors_of_one_name_have_no_table(tmp_path: Path) -> None:
    """It is unknown from which of them an engine loads."""
    save_file({"a": torch.zeros(2)}, tmp_path / "1")
    save_file({"a": torch.zeros(3)}, tmp_path / "2")
    assert relocation.header_table([("", tmp_path / "1"), ("", tmp_path / "2")]) is None


def test_a_truncated_file_has_no_table(tmp_path: Path) -> None:
    """A damaged file is no checkpoint."""
    (tmp_path / "1").write_bytes(b"\x10")
    assert relocation.header_table([("", tmp_path / "1")]) is None


def test_a_dtype_without_a_counterpart_has_no_table(tmp_path: Path) -> None:
    """Elements smaller than a byte are not relocated."""
    header = json.dumps({"a": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "1").write_bytes(struct.pack("<Q", len(header)) + header + bytes(2))
    assert relocation.header_table([("", tmp_path / "1")]) is None


def test_no_files_have_no_table() -> None:
    """A model without files has no checkpoint tensors."""
    assert relocation.header_table([]) is None


class Loader:
    """Loader with the functions of vLLM's: one source, and a second one that only some models have."""

    def __init__(self, folder: Path, pattern: str = "*.safetensors") -> None:
        self.folder = folder
        self.pattern = pattern
        self.devices: list[str] = []
        self.failing_device = ""

    def read_all(self, device: torch.device) -> None:
        """Read all weights of a twin."""
        self.devices.append(device.type)
        if device.type == self.failing_device:
            raise RuntimeError("not on this device")
        for prefix, name in (("", "main"), ("draft.", "second")):
            list(self._get_weights_iterator(SimpleNamespace(
                model_or_path=str(self.folder / name), revision=None, prefix=prefix, fall_back_to_pt=True
            )))  # fmt: skip

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("files were read")

    def _prepare_weights(
        self, model_name_or_path: str, revision: str | None, fall_back_to_pt: bool
    ) -> tuple[str, list[str], bool]:
        files = [str(path) for path in Path(model_name_or_path).glob(self.pattern)]
        if not files:
            raise RuntimeError("no weights")
        return model_name_or_path, files, self.pattern == "*.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of two sources."""
    for name in ("main", "second"):
        (tmp_path / name).mkdir()
        save_file({"a": torch.zeros(2)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "model.bin").touch()
    return tmp_path


def test_a_loaders_sources_are_read_by_their_headers(folder: Path) -> None:
    """All sources of a loader are listed, and none is read."""
    loader = Loader(folder)
    found = relocation.checkpoint_tensors(loader, loader.read_all)
    assert found is not None
    assert found.names == ["a", "draft.a"]


def test_sources_are_found_with_a_twin_on_the_next_device(folder: Path) -> None:
    """A class that fails on the meta device lists each source once."""
    loader = Loader(folder)
    loader.failing_device = "meta"
    found = relocation.checkpoint_tensors(loader, loader.read_all)
    assert found is not None
    assert found.names == ["a", "draft.a"]


def test_files_of_another_format_have_no_table(folder: Path) -> None:
    """Only safetensors files have headers."""
    loader = Loader(folder, "*.bin")
    assert relocation.checkpoint_tensors(loader, loader.read_all) is None


def test_a_model_without_files_has_no_table(tmp_path: Path) -> None:
    """The loader's error counts as no files."""
    (tmp_path / "main").mkdir()
    loader = Loader(tmp_path)
    assert relocation.checkpoint_tensors(loader, loader.read_all) is None


def test_a_hub_model_that_is_not_local_has_no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is downloaded."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    loader: Any = SimpleNamespace(_prepare_weights=None)
    source = SimpleNamespace(model_or_path="someone/model", revision=None, prefix="")

    def read_all(device: torch.device) -> None:
        list(loader._get_weights_iterator(source))

    assert relocation.checkpoint_tensors(loader, read_all) is None


def test_a_twin_is_recorded(placement_map: PlacementMap) -> None:
    """The map has all tensors of the twin; a tied one is an alias."""
    assert placement_map.own.names == ["layer.weight", "table"]
    assert placement_map.aliases == {"head.weight": "layer.weight"}


@pytest.mark.parametrize("failing", ["meta", "none"])
def test_a_twin_is_built_where_its_classes_work(placement_map: PlacementMap, failing: str) -> None:
    """The map does not depend on the device."""

    def load(device: torch.device, recorder: Recorder, weights: Weights) -> nn.Module:
        if device.type == failing:
            raise NotImplementedError("meta tensors have no values")
        return load_twin(device, recorder, weights)

    assert relocation.record(table(weight=FLOAT), load) == placement_map


def test_a_failure_on_all_devices_names_them() -> None:
    """The error has the failure on each of them."""

    def load(device: torch.device, recorder: Recorder, weights: Weights) -> nn.Module:
        raise KeyError(f"unknown {device}")

    with pytest.raises(UnsupportedTensor, match=r"meta: KeyError: 'unknown meta'; cpu: KeyError: 'unknown cpu'"):
        relocation.record(table(weight=FLOAT), load)


def test_an_error_of_rfork_is_final() -> None:
    """A refusal is not repeated on another device."""
    devices = []

    def load(device: torch.device, recorder: Recorder, weights: Weights) -> nn.Module:
        devices.append(device.type)
        raise ModelError("refused")

    with pytest.raises(ModelError):
        relocation.record(table(weight=FLOAT), load)
    assert devices == ["meta"]


def test_a_twin_leaves_no_trace() -> None:
    """Rotary tables, dtype, random state and the level of the engine's logger are restored after an error."""
    tables: dict[Any, Any] = {"own": 1}
    state, level = torch.get_rng_state(), logging.getLogger("some-engine").level

    def build_twin() -> None:
        with relocation.no_trace(tables, torch.bfloat16, "some-engine"):
            tables["other"] = 2
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        build_twin()
    assert tables == {"own": 1}
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    assert logging.getLogger("some-engine").level == level


def test_a_twin_has_the_dtype_of_the_model_and_its_own_tables() -> None:
    """The tables of a real model are not used by the twin."""
    tables: dict[Any, Any] = {"own": 1}
    with relocation.no_trace(tables, torch.bfloat16, "some-engine"):
        assert torch.get_default_dtype() is torch.bfloat16
        assert tables == {}


def test_vllms_configuration_of_a_twin_is_separate() -> None:
    """The parts that models change while they are built are copied, and names of layers may be used again."""

    class Mode(IntEnum):
        NONE = 0
        COMPILE = 3

    compilation = SimpleNamespace(
        static_forward_context={"layer": 1}, static_all_moe_layers=["experts"], custom_ops=["all"], mode=Mode.COMPILE
    )
    config: Any = SimpleNamespace(compilation_config=compilation, quant_config=SimpleNamespace(names=[]))
    twin: Any = vllm_compat.config_of_twin(config)
    twin.compilation_config.static_forward_context["layer"] = 2
    twin.compilation_config.custom_ops.append("none")
    twin.quant_config.names.append("layer")
    assert twin.compilation_config.static_all_moe_layers == []
    assert twin.compilation_config.mode is Mode.NONE
    assert compilation == SimpleNamespace(
        static_forward_context={"layer": 1}, static_all_moe_layers=["experts"], custom_ops=["all"], mode=Mode.COMPILE
    )
    assert config.quant_config.names == []


def unchanged(module: nn.Module, placement_map: PlacementMap, refused: nn.Module | None = None) -> tuple[Any, str]:
    """Return the unchanged tensors if one layer is refused."""
    return relocation.unchanged_tensors(module, placement_map, lambda layer: "packs it" if layer is refused else None)


def test_loaded_tensors_are_unchanged(placement_map: PlacementMap) -> None:
    """Tensors that loading did not write are not mentioned."""
    model = Model()
    tensors, others = unchanged(model, placement_map)
    assert tensors["layer.weight"] is model.layer.weight
    assert list(tensors) == ["layer.weight"]
    assert others == ""


@pytest.mark.parametrize("layer", ["", "layer"])
def test_tensors_of_a_refused_layer_are_left_out(placement_map: PlacementMap, layer: str) -> None:
    """A refused layer stands for its children."""
    model = Model()
    assert unchanged(model, placement_map, model.get_submodule(layer)) == ({}, "layer.weight: packs it")


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (torch.zeros(0), "shape changed after loading from (4, 2) to (0,)"),
        (torch.zeros(4, 2, dtype=torch.bfloat16), "dtype changed after loading from float32 to bfloat16"),
        (torch.zeros(2, 4).t(), "strides changed after loading from (8, 4) to (4, 16)"),
    ],
)
def test_tensors_of_another_type_are_left_out(
    placement_map: PlacementMap, replacement: torch.Tensor, reason: str
) -> None:
    """Post-processing that replaces a tensor by one of another type is seen."""
    model = Model()
    model.layer.weight = nn.Parameter(replacement)
    assert unchanged(model, placement_map) == ({}, f"layer.weight: {reason}")


def test_tensors_that_were_removed_are_left_out(placement_map: PlacementMap) -> None:
    """A kernel may keep a weight outside the module."""
    model = Model()
    del model.layer.weight
    assert unchanged(model, placement_map) == ({}, "layer.weight: removed after loading")


def test_a_message_has_few_reasons() -> None:
    """Tensors with one reason are counted, and so are more than four reasons."""
    types = {f"{layer}.{name}": FLOAT for layer in range(6) for name in ("a", "b")}

    def load(device: torch.device, recorder: Recorder, weights: Weights) -> nn.Module:
        twin = nn.ModuleDict({str(layer): nn.Module() for layer in range(6)})
        with recorder:
            for name, tensor in weights:
                layer, _, key = name.partition(".")
                parameter = nn.Parameter(torch.empty(4, 2, device=device))
                parameter.data.copy_(tensor)
                twin[layer].register_parameter(key, parameter)
        return twin

    recorded = relocation.record(TensorTable(types.keys(), types.values()), load)
    model = nn.ModuleDict({str(layer): nn.Module() for layer in range(6)})
    reasons = {id(layer): f"reason {name}" for name, layer in model.items()}
    _, others = relocation.unchanged_tensors(model, recorded, lambda layer: reasons.get(id(layer)))
    assert others == "; ".join([f"{each}.a and 1 more: reason {each}" for each in range(4)] + ["2 more reasons"])


def method(dotted: str, **attributes: object) -> Any:
    """Return an instance of an engine's class."""
    module, _, name = dotted.rpartition(".")
    owner = type(name, (), {"__module__": module, STEP: lambda self, layer: None, **attributes})
    return owner()


def layer(found: Any, shape: tuple[int, ...] = (4, 2), **attributes: object) -> nn.Module:
    """Return a layer with a method."""
    made = nn.Module()
    made.weight = nn.Parameter(torch.zeros(shape))
    made.quant_method = found
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "dotted",
    [
        f"{VLLM}.linear.UnquantizedLinearMethod",
        f"{VLLM}.vocab_parallel_embedding.UnquantizedEmbeddingMethod",
        f"{VLLM}.fused_moe.router.gate_linear._GateLinearMethod",
    ],
)
def test_vllms_unquantised_layers_keep_their_weights(dotted: str, device_type: str) -> None:
    """Layers that compute with the loaded tensors are served."""
    assert vllm_methods.changing_method(layer(method(dotted)), device_type) is None


def test_vllms_layers_without_a_method_keep_their_weights() -> None:
    """Norms and convolutions have none."""
    assert vllm_methods.changing_method(nn.LayerNorm(2), "cpu") is None


def test_vllms_other_methods_are_refused_by_name() -> None:
    """Subclasses may do more than their base."""
    subclass = type("Other", (type(method(f"{VLLM}.linear.UnquantizedLinearMethod")),), {})()
    assert vllm_methods.changing_method(layer(subclass), "cpu") == "Other may change the weights after loading on cpu"


def test_vllms_layers_on_other_devices_are_refused() -> None:
    """On an XPU the same method may reorder weights."""
    refused = vllm_methods.changing_method(layer(method(f"{VLLM}.linear.UnquantizedLinearMethod")), "xpu")
    assert refused == "UnquantizedLinearMethod may change the weights after loading on xpu"


def test_vllms_convolutions_on_a_cpu_are_refused() -> None:
    """vLLM packs those of Mamba in place."""
    convolution = layer(method(f"{VLLM}.linear.UnquantizedLinearMethod"), (4, 1, 4))
    assert vllm_methods.changing_method(convolution, "cpu") == (
        "UnquantizedLinearMethod may pack convolutions on a CPU"
    )
    assert vllm_methods.changing_method(convolution, "cuda") is None


@pytest.mark.parametrize(
    ("device_type", "backend", "reason"),
    [
        ("cuda", "TRITON", None),
        ("cuda", "BATCHED_TRITON", None),
        ("cuda", "FLASHINFER_CUTLASS", "reorders the weights for the backend FLASHINFER_CUTLASS"),
        ("cpu", "CPU", "may change the weights after loading on cpu"),
    ],
)
def test_vllms_experts_keep_their_weights_for_some_backends(device_type: str, backend: str, reason: str | None) -> None:
    """Other backends reorder them."""
    found = method(vllm_methods.EXPERTS, unquantized_backend=SimpleNamespace(name=backend))
    refused = vllm_methods.changing_method(layer(found), device_type)
    assert refused == (f"UnquantizedFusedMoEMethod {reason}" if reason else None)


def test_vllms_attention_changes_no_loaded_tensor() -> None:
    """It has a step without a method, but derives new tensors only."""
    for name in vllm_methods.ATTENTION:
        owner = type("Attention", (nn.Module,), {STEP: lambda self, dtype: None})
        owner.__module__, _, owner.__qualname__ = name.rpartition(".")
        assert vllm_methods.changing_method(owner(), "cpu") is None


def test_vllms_models_that_process_their_weights_are_refused() -> None:
    """A model may have a step of its own."""
    owner = type("Model", (nn.Module,), {STEP: lambda self: None})
    assert vllm_methods.changing_method(owner(), "cuda") == "Model post-processes its weights"


@pytest.mark.parametrize("dotted", sorted(sglang_methods.RELOCATED))
def test_sglangs_unquantised_layers_keep_their_weights(dotted: str) -> None:
    """Layers that compute with the loaded tensors are served."""
    assert sglang_methods.changing_method(layer(method(dotted)), "cpu") is None


def test_sglangs_layers_packed_for_amx_are_refused() -> None:
    """SGLang packs weights on a CPU that has AMX."""
    packed = layer(method(f"{SGLANG}.unquant.UnquantizedLinearMethod"), use_intel_amx_backend=True)
    assert sglang_methods.changing_method(packed, "cpu") == "UnquantizedLinearMethod packs the weights for AMX"


@pytest.mark.parametrize("reorders", ["use_flashinfer_trtllm_moe", "w13_swiglu_interleaved"])
def test_sglangs_reordered_experts_are_refused(reorders: str) -> None:
    """Some kernels need another order of the rows."""
    experts = layer(method(sglang_methods.EXPERTS, **{reorders: True}))
    assert sglang_methods.changing_method(experts, "cuda") == (
        f"UnquantizedFusedMoEMethod reorders the weights ({reorders})"
    )


def test_sglangs_other_methods_are_refused_by_name() -> None:
    """Quantised layers are not served."""
    refused = sglang_methods.changing_method(layer(method(f"{SGLANG}.fp8.Fp8LinearMethod")), "cuda")
    assert refused == "Fp8LinearMethod may change the weights after loading on cuda"
