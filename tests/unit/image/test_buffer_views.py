"""Tensors as views of one buffer, created from a layout alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from rfork.errors import UnsupportedTensor
from rfork.image.capture import capture, image_from_tensors
from rfork.image.layout import Layout, TensorSpec, allocate_buffer, tensor_views
from tests.unit.image.random_modules import Recipe, build, element_bytes, recipes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


@settings(max_examples=100, deadline=None)
@given(recipes)
def test_views_of_a_filled_buffer_equal_the_captured_tensors(recipe: Recipe) -> None:
    """They are equal and have the same layout."""
    image = capture(build(recipe, 1))
    buffer, tensors = allocate_buffer(image.layout)
    buffer_image = image_from_tensors(tensors)
    assert image.layout == buffer_image.layout
    size = image.layout.image_bytes
    with image.readable(0, size) as views:
        buffer.copy_(torch.frombuffer(bytearray(b"".join(views)), dtype=torch.uint8) if size else buffer)
    with buffer_image.readable(0, size) as views, image.readable(0, size) as expected:
        assert b"".join(expected) == b"".join(views)


def test_values_and_aliases_are_restored() -> None:
    """Every tensor has its values, and aliases share memory."""
    matrix = torch.arange(6.0).view(2, 3)
    image = image_from_tensors({"matrix": matrix, "transposed": matrix.t(), "one": torch.tensor(7)})
    with image.readable(0, image.layout.image_bytes) as views:
        tensors = tensor_views(image.layout, torch.frombuffer(bytearray(b"".join(views)), dtype=torch.uint8))
    assert element_bytes(matrix.t()) == element_bytes(tensors["transposed"])
    tensors["matrix"][0, 2] = 50.0
    assert 50.0 == tensors["transposed"][2, 0].item()
    assert 7 == tensors["one"].item()


def test_an_unaligned_tensor_is_still_a_view() -> None:
    """On the CPU, a tensor at an offset that its item size does not divide reads and writes the buffer."""
    layout = Layout((TensorSpec("a", "int32", (1,), (1,), 1),), 5)
    buffer = torch.zeros(5, dtype=torch.uint8)
    tensor_views(layout, buffer)["a"].fill_(258)
    assert [0, 2, 1, 0, 0] == buffer.tolist()


@pytest.mark.parametrize(
    "buffer", [torch.zeros(3, dtype=torch.uint8), torch.zeros(4), torch.zeros(8, dtype=torch.uint8)[::2]]
)
def test_unsuitable_buffers_are_rejected(buffer: torch.Tensor) -> None:
    """A buffer of another size, type or stride cannot hold the image."""
    with pytest.raises(ValueError, match="flat uint8 buffer of 4 bytes"):
        tensor_views(Layout((), 4), buffer)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec("a", "float3", (1,), (1,), 0), "no dtype 'float3'"),
        (TensorSpec("a", "nn", (1,), (1,), 0), "no dtype 'nn'"),
        (TensorSpec("a", "uint8", (9,), (1,), 0), "not within 8 bytes"),
        (TensorSpec("a", "uint8", (1,), (1,), -1), "not within 8 bytes"),
        (TensorSpec("a", "uint8", (2,), (-1,), 4), "not within 8 bytes"),
    ],
    ids=["dtype", "attribute", "end", "begin", "stride"],
)
def test_an_external_layout_cannot_reach_outside_the_buffer(spec: TensorSpec, reason: str) -> None:
    """A layout from a file or a peer that does not fit is rejected with the tensor's name."""
    with pytest.raises(UnsupportedTensor, match=f"'a'.*{reason}"):
        allocate_buffer(Layout((spec,), 8))
