"""Many ranges of blobs into memory at once: the one engine that fills tensors from storage.

What comes in is cut into blocks of like size, whatever the size of the tensors: small ones that lie side
by side in their blob are read together, large ones in parts, in the order of the blob, by several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rfork.settings import StorageSettings
from rfork.storage.blob import Blob


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of a blob's bytes, and the memory they belong in: uint8, 1-D, contiguous, on any device."""

    blob: Blob
    offset: int
    into: torch.Tensor


def fill(
    extents: Sequence[Extent],
    settings: StorageSettings,
    *,
    on_filled: Callable[[int], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill all extents; returns once every byte is there (of a GPU's memory too).

    `on_filled` is told the index of each extent that is whole, on the engine's threads, several at once: what
    it does (digesting, giving onwards) overlaps with the reads of others. `progress` is told the bytes of each
    block, one call at a time. Takes at most `settings.memory` bytes of staging. Raises what the blobs raise, or
    what a callback raises; reads under way have ended by then.
    """
    raise NotImplementedError
