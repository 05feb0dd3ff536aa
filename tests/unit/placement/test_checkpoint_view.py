"""Views of checkpoint tensors, compared with torch's own operations on a tensor of element numbers."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rfork.placement.checkpoint_view import CheckpointTensor, CheckpointView, concatenated
from rfork.placement.strided import NotStridedError


def view_of(shape: tuple[int, ...]) -> CheckpointView:
    return CheckpointView.of(CheckpointTensor("weight", "float32", 4, shape))


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def elements(view: CheckpointView) -> torch.Tensor:
    """Return the number of the checkpoint element at each index of a view; -1 without one."""
    result = torch.full(view.shape, -1)
    for piece in view.pieces:
        offsets = []
        for factors in piece.dims:
            along = [0]
            for count, step in factors:
                along = [base + index * step for base in along for index in range(count)]
            offsets.append(along)
        for index in product(*(range(len(along)) for along in offsets)):
            position = tuple(start + each for start, each in zip(piece.starts, index, strict=True))
            assert result[position] == -1
            result[position] = piece.offset + sum(along[each] for along, each in zip(offsets, index, strict=True))
    return result


def test_a_complete_view_has_every_element() -> None:
    """The view of a checkpoint tensor has its elements in row-major order."""
    assert torch.equal(numbers((3, 1, 4)), elements(view_of((3, 1, 4))))


def test_a_scalar_has_one_element() -> None:
    """A view without dimensions can be reshaped to one dimension."""
    assert [0] == elements(view_of(()).reshaped((1,))).tolist()


def test_a_narrowed_merged_dimension_has_several_pieces() -> None:
    """Narrowing a dimension that merges two others divides it at their boundaries."""
    merged = view_of((4, 6)).permuted((1, 0)).reshaped((24,))
    expected = numbers((4, 6)).t().reshape(24)[3:18]
    assert torch.equal(expected, elements(merged.narrowed(0, 3, 18)))


def test_reshape_refuses_dimensions_that_divide_loops_unevenly() -> None:
    """A reshape of a transposed tensor to sizes that cross its rows has a reason."""
    with pytest.raises(NotStridedError, match="unevenly"):
        view_of((4, 6)).permuted((1, 0)).reshaped((8, 3))


def test_concatenated_views_can_be_narrowed_across_their_boundary() -> None:
    """A range of a concatenation contains parts of both views."""
    one, two = view_of((2, 3)), view_of((4, 3))
    joined = concatenated([one, two], 0).narrowed(0, 1, 4)
    expected = torch.cat([numbers((2, 3)), numbers((4, 3))])[1:4]
    assert torch.equal(expected, elements(joined))


@st.composite
def operations(draw: st.DrawFn) -> tuple[torch.Tensor, CheckpointView]:
    """Apply random operations to a tensor of element numbers and to a view."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    tensor, view = numbers(shape), view_of(shape)
    for _ in range(draw(st.integers(1, 5))):
        dim = draw(st.integers(0, tensor.dim() - 1)) if tensor.dim() else None
        match draw(st.sampled_from(["narrow", "step", "permute", "reshape", "select", "add", "join"])):
            case "narrow" if dim is not None:
                begin = draw(st.integers(0, tensor.shape[dim]))
                end = draw(st.integers(begin, tensor.shape[dim]))
                tensor, view = tensor.narrow(dim, begin, end - begin), view.narrowed(dim, begin, end)
            case "step" if dim is not None and tensor.shape[dim]:
                step = draw(st.integers(1, 3))
                try:
                    view = view.stepped(dim, step)
                except NotStridedError:
                    break
                tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
            case "permute":
                order = draw(st.permutations(range(tensor.dim())))
                tensor, view = tensor.permute(order), view.permuted(order)
            case "reshape":
                sizes = list(draw(st.permutations(tensor.shape)))
                if len(sizes) > 1:
                    sizes = [sizes[0] * sizes[1], *sizes[2:]]
                try:
                    view = view.reshaped(sizes)
                except NotStridedError:
                    break
                tensor = tensor.reshape(sizes)
            case "select" if dim is not None and tensor.shape[dim]:
                index = draw(st.integers(0, tensor.shape[dim] - 1))
                tensor, view = tensor.select(dim, index), view.narrowed(dim, index, index + 1).without_dim(dim)
            case "add":
                tensor, view = tensor.unsqueeze(0), view.with_dim(0)
            case "join" if dim is not None and tensor.numel() < 500:
                tensor, view = torch.cat([tensor, tensor], dim), concatenated([view, view], dim)
    return tensor, view


@given(operations())
def test_views_follow_tensor_operations(example: tuple[torch.Tensor, CheckpointView]) -> None:
    """After any operations, a view has the elements that torch's tensor has."""
    tensor, view = example
    assert torch.equal(tensor, elements(view))
