"""Poison finds what a loader did not write, in tensors of any type and layout, and nothing else."""

from __future__ import annotations

import sys

import pytest
import torch

from rfork.receiver.poison import Poison

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
FORMS = {
    "contiguous": lambda: torch.empty(6, 8),
    "transposed": lambda: torch.empty(6, 8).t(),
    "strided": lambda: torch.empty(6, 16)[:, ::2],
    "offset": lambda: torch.empty(49)[1:].view(6, 8),
    "scalar": lambda: torch.empty(()),
    "three": lambda: torch.empty(3),
}


def of_form(form: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of that form and type, of ones."""
    like = FORMS[form]()
    base = torch.empty(like.untyped_storage().nbytes() // like.itemsize, dtype=dtype)
    tensor = base.as_strided(like.shape, like.stride(), like.storage_offset())
    return tensor.copy_(torch.ones(like.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_was_not_written_is_named(form: str, dtype: torch.dtype) -> None:
    """Whatever its type and layout."""
    tensor = of_form(form, dtype)
    assert ["one"] == Poison({"one": tensor}).unwritten({"one": tensor})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_was_written_is_not(form: str, dtype: torch.dtype) -> None:
    """Values that a loader writes are not taken for poison."""
    tensor = of_form(form, dtype)
    poison = Poison({"one": tensor})
    tensor.copy_(torch.ones(tensor.shape))
    assert [] == poison.unwritten({"one": tensor})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_past_torch_is_seen(dtype: torch.dtype) -> None:
    """A write by `.data`, or straight into memory, counts by its bytes."""
    tensor = of_form("contiguous", dtype)
    poison = Poison({"one": tensor})
    tensor.data.copy_(torch.ones(tensor.shape))
    assert [] == poison.unwritten({"one": tensor})


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not torch.bool], ids=str)
@pytest.mark.parametrize("form", ["contiguous", "offset"])
def test_a_part_that_was_not_written_is_found(form: str, dtype: torch.dtype) -> None:
    """A loader that fills some rows of a fused tensor has not filled it."""
    tensor = of_form(form, dtype)
    poison = Poison({"one": tensor})
    tensor[:4].copy_(torch.ones(tensor[:4].shape))
    assert ["one"] == poison.unwritten({"one": tensor})


def test_one_number_that_was_not_written_is_found() -> None:
    """In a floating-point tensor each element counts."""
    tensor = torch.ones(1000, dtype=torch.bfloat16)
    poison = Poison({"one": tensor})
    tensor[:999] = 1.0
    assert ["one"] == poison.unwritten({"one": tensor})


def test_not_a_number_is_a_value() -> None:
    """The usual NaN, and infinities, may be what a checkpoint holds."""
    tensor = torch.ones(3)
    poison = Poison({"one": tensor})
    tensor.copy_(torch.tensor([float("nan"), float("inf"), -float("nan")]))
    assert [] == poison.unwritten({"one": tensor})


def test_another_tensor_in_the_place_is_looked_at() -> None:
    """A loader may put new tensors into the module."""
    poison = Poison({"one": torch.ones(4)})
    assert [] == poison.unwritten({"one": torch.zeros(4)})


def test_a_tensor_of_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared in parts is compared as a whole."""
    monkeypatch.setattr(sys.modules[Poison.__module__], "STEP", 64)
    tensors = {"float": torch.ones(40, 40), "byte": torch.ones(1600, dtype=torch.uint8)}
    poison = Poison(tensors)
    tensors["float"][:, :39] = 1.0
    tensors["byte"][:1500] = 1
    assert ["float", "byte"] == poison.unwritten(tensors)
