"""View of checkpoint tensors: for each of its elements, the checkpoint element that it is. Pure.

A view follows the tensor operations of weight loaders by value, not by memory: a contiguous copy of a transposed tensor
is the same view as the transposed tensor. It is a list of pieces, of which concatenation adds some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from rfork.placement.strided import NotStridedError

Factors = tuple[tuple[int, int], ...]
"""Count and step, in checkpoint elements, of the nested loops along one dimension; outermost first, no count 1.

A dimension has more than one after a reshape that merges dimensions which are not adjacent in the checkpoint tensor.
"""


@dataclass(eq=False, slots=True)
class CheckpointTensor:
    """Identity of one tensor of a checkpoint."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    modified_by: str = ""
    """Operation that wrote to it in place. From then on its elements are not those of the checkpoint."""


class Piece(NamedTuple):
    """A box of a view, whose elements are an affine function of their indices."""

    tensor: CheckpointTensor
    offset: int
    starts: tuple[int, ...]
    """Index of its first element in the view."""
    dims: tuple[Factors, ...]

    def sizes(self) -> tuple[int, ...]:
        """Return the size of the box along each dimension of the view."""
        return tuple(_size(factors) for factors in self.dims)


class CheckpointView(NamedTuple):
    """A shape, and disjoint pieces that cover it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, tensor: CheckpointTensor) -> CheckpointView:
        """Return the view of a complete checkpoint tensor."""
        shape = tensor.shape
        return cls(shape, (Piece(tensor, 0, (0,) * len(shape), _complete(shape)),))

    def narrowed(self, dim: int, begin: int, end: int) -> CheckpointView:
        """Return the indices from `begin` to `end` of one dimension."""
        if begin == 0 and end == self.shape[dim]:
            return self
        pieces = []
        for piece in self.pieces:
            first = piece.starts[dim]
            low, high = max(begin - first, 0), min(end - first, _size(piece.dims[dim]))
            if low < high:
                for start, offset, factors in _narrowed(piece.dims[dim], low, high):
                    pieces.append(
                        Piece(
                            piece.tensor,
                            piece.offset + offset,
                            _replaced(piece.starts, dim, first + start - begin),
                            _replaced(piece.dims, dim, factors),
                        )
                    )
        return CheckpointView(_replaced(self.shape, dim, max(end - begin, 0)), tuple(pieces))

    def stepped(self, dim: int, step: int) -> CheckpointView:
        """Return each `step`-th index of one dimension. Raises NotStridedError if it consists of several parts."""
        if step == 1:
            return self
        size = -(-self.shape[dim] // step)
        pieces = []
        for piece in self.pieces:
            factors = piece.dims[dim]
            if len(factors) > 1 or _size(factors) != self.shape[dim]:
                raise NotStridedError("slice with a step of a dimension that has several parts")
            stepped = ((size, factors[0][1] * step),) if size != 1 else ()
            pieces.append(piece._replace(dims=_replaced(piece.dims, dim, stepped)))
        return CheckpointView(_replaced(self.shape, dim, size), tuple(pieces))

    def permuted(self, order: Sequence[int]) -> CheckpointView:
        """Return the view with its dimensions in this order."""
        pieces = tuple(
            piece._replace(
                starts=tuple(piece.starts[dim] for dim in order), dims=tuple(piece.dims[dim] for dim in order)
            )
            for piece in self.pieces
        )
        return CheckpointView(tuple(self.shape[dim] for dim in order), pieces)

    def without_dim(self, dim: int) -> CheckpointView:
        """Return the view without a dimension of size 1."""
        pieces = tuple(
            piece._replace(
                starts=piece.starts[:dim] + piece.starts[dim + 1 :], dims=piece.dims[:dim] + piece.dims[dim + 1 :]
            )
            for piece in self.pieces
        )
        return CheckpointView(self.shape[:dim] + self.shape[dim + 1 :], pieces)

    def with_dim(self, dim: int) -> CheckpointView:
        """Return the view with another dimension of size 1 before `dim`."""
        pieces = tuple(
            piece._replace(
                starts=(*piece.starts[:dim], 0, *piece.starts[dim:]), dims=(*piece.dims[:dim], (), *piece.dims[dim:])
            )
            for piece in self.pieces
        )
        return CheckpointView((*self.shape[:dim], 1, *self.shape[dim:]), pieces)

    def reshaped(self, shape: Sequence[int]) -> CheckpointView:
        """Return the elements in row-major order in another shape.

        Raises NotStridedError if the new dimensions do not divide the loops, and for several pieces.
        """
        shape = tuple(shape)
        if shape == self.shape:
            return self
        if 0 in shape:
            return CheckpointView(shape, ())
        flat = tuple(size for size in self.shape if size != 1)
        if flat == tuple(size for size in shape if size != 1):
            view = self
            for dim in reversed(range(len(self.shape))):
                if self.shape[dim] == 1:
                    view = view.without_dim(dim)
            for dim, size in enumerate(shape):
                if size == 1:
                    view = view.with_dim(dim)
            return view
        if len(self.pieces) != 1:
            raise NotStridedError("reshape of several parts")
        (piece,) = self.pieces
        loops = list(_joined(loop for factors in piece.dims for loop in factors))
        dims: list[Factors] = []
        for size in reversed(shape):
            factors: list[tuple[int, int]] = []
            while size > 1:
                count, step = loops.pop()
                if size % count == 0:
                    factors.append((count, step))
                    size //= count
                elif count % size == 0:
                    factors.append((size, step))
                    loops.append((count // size, step * size))
                    size = 1
                else:
                    raise NotStridedError("reshape that divides a dimension unevenly")
            dims.append(_joined(reversed(factors)))
        return CheckpointView(shape, (Piece(piece.tensor, piece.offset, (0,) * len(shape), tuple(reversed(dims))),))


def concatenated(views: Sequence[CheckpointView], dim: int) -> CheckpointView:
    """Return the views one after another along a dimension."""
    pieces: list[Piece] = []
    size = 0
    for view in views:
        for piece in view.pieces:
            pieces.append(piece._replace(starts=_replaced(piece.starts, dim, piece.starts[dim] + size)))
        size += view.shape[dim]
    return CheckpointView(_replaced(views[0].shape, dim, size), tuple(pieces))


@lru_cache(maxsize=1024)
def _complete(shape: tuple[int, ...]) -> tuple[Factors, ...]:
    """Return the loops over all elements of a shape, in row-major order."""
    dims: list[Factors] = []
    step = 1
    for size in reversed(shape):
        dims.append(((size, step),) if size != 1 else ())
        step *= size
    return tuple(reversed(dims))


def _size(factors: Factors) -> int:
    return factors[0][0] if len(factors) == 1 else prod(count for count, _ in factors)


def _replaced(values: tuple[object, ...], index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])


def _joined(loops: Iterator[tuple[int, int]]) -> Factors:
    """Merge adjacent loops that are one."""
    result: list[tuple[int, int]] = []
    for count, step in loops:
        if result and result[-1][1] == count * step:
            result[-1] = (result[-1][0] * count, step)
        else:
            result.append((count, step))
    return tuple(result)


def _narrowed(factors: Factors, begin: int, end: int) -> Iterator[tuple[int, int, Factors]]:
    """Yield start, checkpoint offset and loops of each part of the indices from `begin` to `end`.

    Starts count from the same index as `begin`.
    """
    if begin == 0 and end == _size(factors):
        yield 0, 0, factors
        return
    (_, step), inner_loops = factors[0], factors[1:]
    inner = _size(inner_loops)
    first, last = begin // inner, (end - 1) // inner
    full_begin, full_end = -(-begin // inner), end // inner
    if full_begin < full_end:
        if first < full_begin:
            yield from _within(first, step, inner_loops, begin - first * inner, inner)
        count = full_end - full_begin
        outer = ((count, step),) if count != 1 else ()
        yield full_begin * inner, full_begin * step, outer + inner_loops
        if full_end <= last:
            yield from _within(last, step, inner_loops, 0, end - last * inner)
        return
    yield from _within(first, step, inner_loops, begin - first * inner, min(inner, end - first * inner))
    if last > first:
        yield from _within(last, step, inner_loops, 0, end - last * inner)


def _within(index: int, step: int, loops: Factors, begin: int, end: int) -> Iterator[tuple[int, int, Factors]]:
    inner = _size(loops)
    for start, offset, factors in _narrowed(loops, begin, end):
        yield index * inner + start, index * step + offset, factors
