"""Specs of an image's tensors in column lists, as there may be a million of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as quoted
from operator import itemgetter
from typing import NamedTuple, Self, overload

SpecType = tuple[str, tuple[int, ...], tuple[int, ...]]
"""dtype, shape and stride. Most tensors of a model share a few of these."""


class TensorSpec(NamedTuple):
    """One named tensor of an image.

    `dtype` is torch's name without the ``torch.`` prefix; `shape` and `stride` count elements; `offset` is
    the image offset, in bytes, of the element at index (0, …, 0). Specs whose bytes overlap are aliases of
    one storage (tied weights, views).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def describe(self) -> str:
        """Return a one-line description for people."""
        return f"{self.dtype}{list(self.shape)} stride {list(self.stride)} at byte {self.offset}"


class TensorSpecTable(Sequence[TensorSpec]):
    """Sequence of specs, created on iteration.

    It takes 150 bytes per spec and, except for the spec types, contains nothing that the garbage collector
    traverses. As objects, a million specs would take twice that, and seconds of garbage collection in every
    process.
    """

    def __init__(self, specs: Iterable[TensorSpec] = ()) -> None:
        self._names: list[str] = []
        self._spec_types: list[SpecType] = []
        self._offsets: list[int] = []
        self._known: dict[SpecType, SpecType] = {}
        self.extend(specs)

    @classmethod
    def of_columns(cls, names: list[str], spec_types: Sequence[SpecType], offsets: list[int]) -> Self:
        """Return a table of these columns of equal length. The lists are not copied."""
        specs = cls()
        specs._names = names
        specs._spec_types = [specs._known.setdefault(spec_type, spec_type) for spec_type in spec_types]
        specs._offsets = offsets
        return specs

    def extend(self, specs: Iterable[TensorSpec]) -> None:
        """Append specs. Only allowed while the table is being built."""
        for name, dtype, shape, stride, offset in specs:
            spec_type = dtype, shape, stride
            self._names.append(name)
            self._spec_types.append(self._known.setdefault(spec_type, spec_type))
            self._offsets.append(offset)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[TensorSpec]:
        return self._walk(slice(None))

    def _walk(self, part: slice) -> Iterator[TensorSpec]:
        spec_types = self._spec_types[part]
        dtypes, shapes, strides = (map(itemgetter(field_index), spec_types) for field_index in range(3))
        return map(TensorSpec, self._names[part], dtypes, shapes, strides, self._offsets[part])

    @overload
    def __getitem__(self, index: int) -> TensorSpec: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorSpec]: ...

    def __getitem__(self, index: int | slice) -> TensorSpec | Sequence[TensorSpec]:
        if isinstance(index, slice):
            return tuple(self._walk(index))
        return TensorSpec(self._names[index], *self._spec_types[index], self._offsets[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpecTable):
            return NotImplemented
        return self._columns == other._columns

    def __hash__(self) -> int:
        return hash((len(self), *self._names[:1]))

    @property
    def _columns(self) -> tuple[list[str], list[SpecType], list[int]]:
        return self._names, self._spec_types, self._offsets

    def differences(self, other: TensorSpecTable) -> Iterator[tuple[TensorSpec | None, TensorSpec | None]]:
        """Yield pairs of specs with equal names that differ, own ones first; None for a missing spec."""
        ours, theirs = self._names, other._names
        if ours == theirs:  # the common case, without an index of names
            pairs: Iterable[tuple[int, int | None]] = ((position, position) for position in range(len(self)))
        else:
            positions = {name: position for position, name in enumerate(theirs)}
            pairs = ((position, positions.get(name)) for position, name in enumerate(ours))
        for here, there in pairs:
            if there is None:
                yield self[here], None
            elif self._offsets[here] != other._offsets[there] or self._spec_types[here] != other._spec_types[there]:
                yield self[here], other[there]
        if ours != theirs:
            known = set(ours)
            yield from ((None, other[position]) for position, name in enumerate(theirs) if name not in known)

    def json_lines(self, comma: str) -> Iterator[str]:
        """Yield each spec as a JSON array (name, dtype, shape, stride, offset) with the separator `comma`.

        The output is that of `json.dumps`, several times as fast.
        """
        texts = {id(spec_type): json.dumps(spec_type, separators=(comma, ":"))[1:-1] for spec_type in self._known}
        for name, spec_type, offset in zip(self._names, self._spec_types, self._offsets, strict=True):
            yield f"[{quoted(name)}{comma}{texts[id(spec_type)]}{comma}{offset}]"

    def __repr__(self) -> str:
        return f"Specs({list(self)!r})"
