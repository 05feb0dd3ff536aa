"""Poison: detects what a loader did not write, in tensors of any type and layout."""

from __future__ import annotations

import sys

import pytest
import torch

from rfork.receiver.clean_module import Poison

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
    """Return a tensor of ones with this form and type."""
    like = FORMS[form]()
    base = torch.empty(like.untyped_storage().nbytes() // like.itemsize, dtype=dtype)
    tensor = base.as_strided(like.shape, like.stride(), like.storage_offset())
    return tensor.copy_(torch.ones(like.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_an_unwritten_tensor_is_reported(form: str, dtype: torch.dtype) -> None:
    """Its type and layout do not matter."""
    tensor = of_form(form, dtype)
    assert ["one"] == Poison({"one": tensor}).unwritten({"one": tensor})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_written_tensor_is_not_reported(form: str, dtype: torch.dtype) -> None:
    """Values that a loader writes are not mistaken for poison."""
    tensor = of_form(form, dtype)
    poison = Poison({"one": tensor})
    tensor.copy_(torch.ones(tensor.shape))
    assert [] == poison.unwritten({"one": tensor})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_that_bypass_torch_are_detected(dtype: torch.dtype) -> None:
    """A write through `.data` or directly into memory changes the bytes."""
    tensor = of_form("contiguous", dtype)
    poison = Poison({"one": tensor})
    tensor.data.copy_(torch.ones(tensor.shape))
    assert [] == poison.unwritten({"one": tensor})


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not torch.bool], ids=str)
@pytest.mark.parametrize("form", ["contiguous", "offset"])
def test_a_partly_written_tensor_is_reported(form: str, dtype: torch.dtype) -> None:
    """A loader that fills only some rows of a fused tensor has not filled it."""
    tensor = of_form(form, dtype)
    poison = Poison({"one": tensor})
    tensor[:4].copy_(torch.ones(tensor[:4].shape))
    assert ["one"] == poison.unwritten({"one": tensor})


def test_a_single_unwritten_element_is_reported() -> None:
    """In a floating-point tensor every element counts."""
    tensor = torch.ones(1000, dtype=torch.bfloat16)
    poison = Poison({"one": tensor})
    tensor[:999] = 1.0
    assert ["one"] == poison.unwritten({"one": tensor})


def test_nan_and_infinity_are_valid_values() -> None:
    """A checkpoint may contain them."""
    tensor = torch.ones(3)
    poison = Poison({"one": tensor})
    tensor.copy_(torch.tensor([float("nan"), float("inf"), -float("nan")]))
    assert [] == poison.unwritten({"one": tensor})


def test_a_replaced_tensor_is_checked() -> None:
    """A loader may put new tensors into the module."""
    poison = Poison({"one": torch.ones(4)})
    assert [] == poison.unwritten({"one": torch.zeros(4)})


def test_a_tensor_larger_than_one_step_is_compared_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison runs in steps to bound memory."""
    monkeypatch.setattr(sys.modules[Poison.__module__], "STEP", 64)
    tensors = {"float": torch.ones(40, 40), "byte": torch.ones(1600, dtype=torch.uint8)}
    poison = Poison(tensors)
    tensors["float"][:, :39] = 1.0
    tensors["byte"][:1500] = 1
    assert ["float", "byte"] == poison.unwritten(tensors)
