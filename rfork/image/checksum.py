"""Proof that two processes have the same tensors, by a hash that transfers do not use."""

from __future__ import annotations

import hashlib

from rfork.image.memory import Image


def image_sha256(image: Image) -> str:
    """Return SHA-256 over the layout_id and every byte of the image, as 64 hex digits. For people and tests.

    Transfers verify chunks by their digests. This reads all bytes again, on the host, with another hash, so
    that both would have to be wrong together.
    """
    state = hashlib.sha256(image.layout.layout_id.encode())
    for begin, end in image.layout.chunks:
        with image.readable(begin, end) as views:
            for view in views:
                state.update(view)
    return state.hexdigest()
