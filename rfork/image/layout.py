"""Layout of an image: its tensors and their byte offsets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from rfork.image import attributes
from rfork.image.chunks import Chunks
from rfork.image.tensor_specs import TensorSpec, TensorSpecTable

LAYOUT_DOMAIN = b"rfork-layout-v1\n"
HASH_BATCH_SPECS = 4096
"""Number of specs per update of the hash, so that their complete text never exists in memory."""


@dataclass(frozen=True, init=False)
class Layout:
    """The ordered tensor specs of one image and its size in bytes.

    Two images with the same `layout_id` can be copied into one another byte by byte, whatever addresses their
    allocators chose.
    """

    tensors: TensorSpecTable
    image_bytes: int
    attributes: tuple[str, ...]
    """Plain values that must be equal on both sides: see `rfork.image.attributes`."""

    def __init__(self, tensors: Iterable[TensorSpec], image_bytes: int, attributes: Iterable[str] = ()) -> None:
        """A `TensorSpecTable` is kept without a copy and must not be extended afterwards."""
        object.__setattr__(
            self, "tensors", tensors if isinstance(tensors, TensorSpecTable) else TensorSpecTable(tensors)
        )
        object.__setattr__(self, "image_bytes", image_bytes)
        object.__setattr__(self, "attributes", tuple(attributes))

    @cached_property
    def layout_id(self) -> str:
        """SHA-256 over the size, all specs and all attributes, as 32 hex digits."""
        state = hashlib.sha256(LAYOUT_DOMAIN)
        state.update(b"%d\n" % self.image_bytes)
        lines = self.tensors.json_lines(", ")
        while batch := list(islice(lines, HASH_BATCH_SPECS)):
            state.update("\n".join([*batch, ""]).encode())
        if self.attributes:
            state.update(json.dumps(self.attributes).encode())
        return state.hexdigest()[:32]

    @cached_property
    def chunks(self) -> Chunks:
        """Division of this image into chunks."""
        return Chunks.of(self.image_bytes)

    def differences(self, other: Layout) -> Iterator[str]:
        """Yield each difference to `other` on one line, in canonical order; "here" is self, "there" is other."""
        for here, there in self.tensors.differences(other.tensors):
            yield _line(here, there)
        if self.image_bytes != other.image_bytes:
            yield f"image size: here {self.image_bytes} bytes, there {other.image_bytes} bytes"
        if self.attributes != other.attributes:
            yield from attributes.differing(self.attributes, other.attributes)

    def first_difference(self, other: Layout) -> str | None:
        """Return the difference that explains the mismatch best, or None if the layouts are equal.

        A tensor of another dtype or shape shifts the offsets of all following tensors, so a difference in
        type is preferred to one in offset alone.
        """
        for here, there in self.tensors.differences(other.tensors):
            if here is None or there is None or here[1:4] != there[1:4]:
                return _line(here, there)
        return next(self.differences(other), None)


def _line(here: TensorSpec | None, there: TensorSpec | None) -> str:
    name = here.name if here is not None else there.name if there is not None else ""
    descriptions = [spec.describe() if spec is not None else "no such tensor" for spec in (here, there)]
    return f"{name}: here {descriptions[0]}, there {descriptions[1]}"
