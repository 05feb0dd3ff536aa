"""Invalid arguments of loading and saving: one clear line before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rfork
from rfork.errors import CheckpointError, RforkError, SettingsError, UnsupportedTensor

NOT_A_MODULE = cast(nn.Module, {})
NO_URI = cast(str, None)
NO_TENSOR = cast(torch.Tensor, 3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Write a safetensors file of a linear module's tensors."""
    save_file(dict(nn.Linear(2, 3).state_dict()), tmp_path / "model.safetensors")
    return tmp_path


WRONG: list[tuple[Callable[[Path], object], type[RforkError], str]] = [
    (lambda uri: rfork.load(nn.Linear(2, 3), uri, device="nodev"), SettingsError, "'nodev' cannot be used"),
    (lambda uri: rfork.load_tensors(uri, device="nodev"), SettingsError, "'nodev' cannot be used"),
    (lambda uri: rfork.load_tensors(uri, device="cuda:99"), SettingsError, "'cuda:99' cannot be used"),
    (lambda uri: rfork.load_tensors(uri, device="meta"), SettingsError, "have no memory to load into"),
    (lambda uri: dict(rfork.iter_tensors(uri, device="nodev")), SettingsError, "'nodev' cannot be used"),
    (lambda uri: rfork.load(NOT_A_MODULE, uri), SettingsError, "expects a torch module, not a dict"),
    (lambda uri: rfork.load(nn.Linear(2, 3), NO_URI), SettingsError, "None is neither a URI nor a path"),
    (lambda uri: rfork.load_tensors(NO_URI), SettingsError, "None is neither a URI nor a path"),
    (lambda uri: rfork.load_tensors(uri, "bias"), SettingsError, r"use \['bias'\] instead of 'bias'"),
    (lambda uri: dict(rfork.iter_tensors(uri, "bias")), SettingsError, r"use \['bias'\] instead of 'bias'"),
    (lambda uri: rfork.load(nn.Linear(2, 3), uri, password="x"), CheckpointError, "is not encrypted"),
    (lambda uri: rfork.load_tensors(uri, key=bytes(32)), CheckpointError, "is not encrypted"),
    (lambda uri: rfork.open_tensors(uri, password="x"), CheckpointError, "is not encrypted"),
    (lambda uri: rfork.save({"a": NO_TENSOR}, uri / "x.safetensors"), UnsupportedTensor, "'a'.* type int"),
    (lambda uri: rfork.save({"a": NO_TENSOR}, uri / "x.tensors"), UnsupportedTensor, "'a'.* type int"),
]


@pytest.mark.parametrize(("call", "error_type", "message"), WRONG)
def test_invalid_arguments_are_refused(
    saved: Path, call: Callable[[Path], object], error_type: type[RforkError], message: str
) -> None:
    """Each is refused in one line that states the problem, and nothing is written."""
    with pytest.raises(error_type, match=message) as caught:
        call(saved)
    assert 1 == len(str(caught.value).splitlines())
    assert ["model.safetensors"] == [path.name for path in saved.iterdir()]


def test_names_may_be_any_iterable(saved: Path) -> None:
    """A generator of names works like a list."""

    def names() -> Iterator[str]:
        yield "bias"

    assert ["bias"] == [name for name, _ in rfork.iter_tensors(saved, names())]
    assert ["bias"] == list(rfork.load_tensors(saved, names()))


@pytest.mark.parametrize("without_memory", [True, False])
def test_of_two_names_of_one_tensor_the_last_counts(tmp_path: Path, without_memory: bool) -> None:
    """If a file contains two names of one tensor, the later one counts, with and without memory."""

    def tied() -> nn.Module:
        module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        module["b"].weight = module["a"].weight
        return module

    save_file({"a.weight": torch.ones(2, 2), "b.weight": torch.full((2, 2), 2.0)}, tmp_path / "x.safetensors")
    if without_memory:
        with rfork.no_init():
            module = tied()
    else:
        module = tied()
    rfork.load(module, tmp_path / "x.safetensors")
    assert [2.0] * 4 == next(iter(module.parameters())).flatten().tolist()
