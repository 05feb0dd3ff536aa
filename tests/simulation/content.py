"""Contents of simulated images: each chunk is represented by the digest that its bytes would have."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB
from rfork.image.layout import Layout, Manifest

UNKNOWN = b"\0" * 16
"""Content of memory that was never written."""
GARBAGE = b"\xff" * 16
"""Content that no version has."""


@lru_cache
def layout_of(chunks: int) -> Layout:
    """Return the layout of an image with this many chunks of 1 MiB."""
    return image_from_tensors({"weight": torch.zeros(chunks * MIB, dtype=torch.uint8)}).layout


@lru_cache(4096)
def content_of(version: str, chunks: int, shared: int) -> tuple[bytes, ...]:
    """Return the content of a version; all versions have the same first `shared` chunks."""
    return tuple(
        hashlib.blake2b(f"{version if chunk >= shared else 'base'}/{chunk}".encode(), digest_size=16).digest()
        for chunk in range(chunks)
    )


@lru_cache(4096)
def manifest_of(layout: Layout, content: tuple[bytes, ...]) -> Manifest:
    """Return the manifest of an image with this content."""
    return Manifest(layout, content)


@lru_cache(4096)
def origin_of(content: tuple[bytes, ...]) -> str:
    """Return the fingerprint of files with this content."""
    return hashlib.blake2b(b"".join(content), digest_size=16).hexdigest()
