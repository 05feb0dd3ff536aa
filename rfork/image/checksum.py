"""Proof that two processes hold the same tensors, by a hash that the transfer never used."""

from __future__ import annotations

import hashlib

from rfork.image.memory import Image


def image_sha256(image: Image) -> str:
    """SHA-256 over the layout_id and every byte of the image, as 64 hex digits. For people and tests.

    The transfer verifies chunks by their digests; this reads all bytes again, on the host, with
    another hash, so that the two cannot be wrong together.
    """
    state = hashlib.sha256(image.layout.layout_id.encode())
    for begin, end in image.layout.chunks:
        with image.readable(begin, end) as views:
            for view in views:
                state.update(view)
    return state.hexdigest()
