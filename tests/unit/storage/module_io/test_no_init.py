"""Modules built without memory, and their memory after loading."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import rfork
from rfork.errors import CheckpointError


class Scaled(nn.Parameter):
    """Engine-specific parameter class with an attribute."""

    group: int


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 30)
        self.head = nn.Linear(30, 40, bias=False)
        self.head.weight = self.embed.weight
        self.rnn = nn.LSTM(30, 30)
        self.norm = nn.BatchNorm1d(30)
        scaled = Scaled(torch.ones(7), requires_grad=False)
        scaled.group = 32
        self.scaled = scaled
        self.register_buffer("rotary", torch.arange(9.0), persistent=False)


def new_model() -> Model:
    with rfork.no_init():
        return Model()


def test_parameters_have_no_memory() -> None:
    """Parameters have shapes only, tied ones are one parameter, and buffers are computed."""
    module = new_model()
    assert {"meta"} == {parameter.device.type for parameter in module.parameters()}
    assert module.head.weight is module.embed.weight
    assert list(range(9)) == module.get_buffer("rotary").tolist()
    assert {"cpu"} == {buffer.device.type for buffer in module.buffers()}
    assert Scaled is type(module.scaled)
    assert 32 == module.scaled.group
    assert not module.scaled.requires_grad


def test_modules_built_afterwards_have_memory() -> None:
    """The effect ends with the block, even after an error, and is limited to the calling thread."""
    built: list[nn.Module] = []

    def build() -> None:
        built.append(nn.Linear(2, 2))

    def build_concurrently_and_fail() -> None:
        with rfork.no_init():
            thread = threading.Thread(target=build)
            thread.start()
            thread.join()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_concurrently_and_fail()
    built.append(nn.Linear(2, 2))
    assert ["cpu", "cpu"] == [next(module.parameters()).device.type for module in built]


def test_a_parameter_registered_twice_stays_one() -> None:
    """A parameter registered under two names stays one parameter."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(3))
            self.one = nn.Module()
            self.other = nn.Module()
            self.one.weight = weight
            self.other.weight = weight

    with rfork.no_init():
        module = Twice()
    assert module.one.weight is module.other.weight


def test_load_allocates_their_memory(tmp_path: Path) -> None:
    """The module equals the saved one: parameters, classes, attributes and ties."""
    source = Model()
    save_model(source, str(tmp_path / "model.safetensors"))
    module = new_model()
    report = rfork.load(module, tmp_path)
    assert report.bytes > 0
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.requires_grad
    assert Scaled is type(module.scaled)
    assert 32 == module.scaled.group
    state = module.state_dict()
    assert [True] * len(state) == [torch.equal(value, state[name]) for name, value in source.state_dict().items()]
    batch = torch.randn(3, 2, 30)
    assert torch.equal(source.rnn(batch)[0], module.rnn(batch)[0])
    module.rnn(batch)[0].sum().backward()


def test_parameters_are_views_of_the_loaded_file(tmp_path: Path) -> None:
    """Nothing is copied: the parameters are views of the memory that the file was read into."""
    save_file({"0.weight": torch.ones(30, 30), "1.weight": torch.ones(30, 30)}, tmp_path / "model.safetensors")
    with rfork.no_init():
        module = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    rfork.load(module, tmp_path)
    first, second = (parameter.data_ptr() for parameter in module.parameters())
    assert 3600 == abs(second - first)


def test_parameters_are_loaded_in_the_requested_dtype(tmp_path: Path) -> None:
    """Floating-point parameters get the requested dtype, otherwise the module's, whatever dtype is stored."""
    save_model(Model(), str(tmp_path / "model.safetensors"))
    module = new_model()
    rfork.load(module, tmp_path, dtype=torch.bfloat16)
    assert {torch.bfloat16} == {parameter.dtype for parameter in module.parameters()}
    assert module.norm.num_batches_tracked is not None
    assert torch.int64 == module.norm.num_batches_tracked.dtype
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["rnn.weight_hh_l0"].bfloat16(), module.state_dict()["rnn.weight_hh_l0"])


def test_parameters_tied_in_the_file_only_stay_separate(tmp_path: Path) -> None:
    """Two parameters of the module stay two."""
    save_model(Model(), str(tmp_path / "model.safetensors"))
    with rfork.no_init():
        module = Model()
        module.head.weight = nn.Parameter(torch.empty(40, 30))
    rfork.load(module, tmp_path)
    assert torch.equal(module.head.weight, module.embed.weight)
    assert module.head.weight.data_ptr() != module.embed.weight.data_ptr()


@pytest.mark.parametrize("strict", [True, False])
def test_a_parameter_that_would_stay_without_memory_is_named(tmp_path: Path, strict: bool) -> None:
    """It is named before anything is read, also with `strict=False`."""
    save_model(Model(), str(tmp_path / "model.safetensors"))
    content = load_file(tmp_path / "model.safetensors")
    del content["scaled"]
    save_file(content, tmp_path / "model.safetensors")
    module = new_model()
    with pytest.raises(CheckpointError, match="lacks scaled"):
        rfork.load(module, tmp_path, strict=strict)
    assert module.embed.weight.is_meta


def test_another_shape_is_refused(tmp_path: Path) -> None:
    """Parameters do not adopt tensors of another shape."""
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with rfork.no_init():
        module = nn.Linear(4, 2)
    with pytest.raises(CheckpointError, match=r"weight has shape \[2, 3\], but \[2, 4\]"):
        rfork.load(module, tmp_path)
