"""The layout of an image: which tensors it carries, and where each lies on its line of bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rfork.image.chunks import Chunks

LAYOUT_DOMAIN = b"rfork-layout-v1\n"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of an image.

    `dtype` is torch's name without the ``torch.`` prefix; `shape` and `stride` count elements;
    `offset` is the image offset, in bytes, of the element at index (0, …, 0). Specs whose bytes
    overlap are aliases of one storage (tied weights, views).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def describe(self) -> str:
        """What a person needs to tell two specs apart, on one line."""
        return f"{self.dtype}{list(self.shape)} stride {list(self.stride)} at byte {self.offset}"


@dataclass(frozen=True)
class Layout:
    """The ordered tensor specs of one image and its size in bytes.

    Two images with one `layout_id` can be copied byte by byte into one another, whatever addresses
    their allocators chose.
    """

    tensors: tuple[TensorSpec, ...]
    image_bytes: int

    @cached_property
    def layout_id(self) -> str:
        """SHA-256 over the size and all specs, as 32 hex digits."""
        state = hashlib.sha256(LAYOUT_DOMAIN)
        state.update(b"%d\n" % self.image_bytes)
        for spec in self.tensors:
            state.update(json.dumps([spec.name, spec.dtype, spec.shape, spec.stride, spec.offset]).encode())
            state.update(b"\n")
        return state.hexdigest()[:32]

    @cached_property
    def chunks(self) -> Chunks:
        """How this image is cut into chunks."""
        return Chunks.of(self.image_bytes)

    def differences(self, other: Layout) -> Iterator[str]:
        """Each difference to `other` on one line, in canonical order; "here" is self, "there" is other."""
        return (line for line, _ in self._compare(other))

    def _compare(self, other: Layout) -> Iterator[tuple[str, bool]]:
        """Each difference, and whether it is one in kind (not only in offset)."""
        ours = {spec.name for spec in self.tensors}
        theirs = {spec.name: spec for spec in other.tensors}
        for spec in self.tensors:
            match = theirs.get(spec.name)
            if match is None:
                yield f"{spec.name}: here {spec.describe()}, there no such tensor", True
            elif match != spec:
                kind = (spec.dtype, spec.shape, spec.stride) != (match.dtype, match.shape, match.stride)
                yield f"{spec.name}: here {spec.describe()}, there {match.describe()}", kind
        for spec in other.tensors:
            if spec.name not in ours:
                yield f"{spec.name}: here no such tensor, there {spec.describe()}", True
        if self.image_bytes != other.image_bytes:
            yield f"image size: here {self.image_bytes} bytes, there {other.image_bytes} bytes", False

    def first_difference(self, other: Layout) -> str | None:
        """The difference that explains the mismatch best, or None when the layouts are equal.

        A tensor of another dtype or shape shifts the offset of all that follow it, so a difference
        in kind is preferred over one in offset alone.
        """
        fallback: str | None = None
        for line, kind_differs in self._compare(other):
            if kind_differs:
                return line
            fallback = fallback or line
        return fallback
