"""The manifest: a layout and the digest of every chunk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from rfork.image.layout import Layout

WEIGHTS_DOMAIN = b"rfork-weights-v1\n"


def weights_id(layout_id: str, digests: tuple[bytes, ...]) -> str:
    """Return SHA-256 over a layout_id and its chunk digests, as 32 hex digits."""
    state = hashlib.sha256(WEIGHTS_DOMAIN)
    state.update(layout_id.encode())
    for digest in digests:
        state.update(digest)
    return state.hexdigest()[:32]


@dataclass(frozen=True)
class Manifest:
    """Required content of an image: one digest (16 bytes) per chunk, in chunk order."""

    layout: Layout
    digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.digests) != len(self.layout.chunks):
            raise ValueError(f"{len(self.digests)} digests for {len(self.layout.chunks)} chunks")

    @cached_property
    def weights_id(self) -> str:
        """Two images with the same `weights_id` have the same bytes."""
        return weights_id(self.layout.layout_id, self.digests)
