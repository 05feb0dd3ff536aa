"""Order in which a source copies, verifies and serves the boxes of an image. Runs on the source. Pure.

A chunk of boxes may be served once all copies into it are done, and afterwards each chunk of the source's own image
that they read was found unchanged. A source chunk is verified once, after the last copy that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rfork.image.chunks import Chunks
from rfork.image.ranges import Range

Column = npt.NDArray[np.int64]


class GatherStep(NamedTuple):
    """Some copies, and what follows them."""

    copies: list[int]
    """Indices of the copies."""
    verified: list[int]
    """Chunks of the source image that no later copy reads: verified after these copies."""
    served: list[int]
    """Chunks of the box image that may be served after that."""


def gather_steps(read: Sequence[Range], written: Sequence[Range], source: Chunks, boxes: Chunks) -> list[GatherStep]:
    """Return all copies, in the order of the box image, in steps of about one of its chunks.

    `read` and `written`: byte ranges of each copy in the source image and in the image of the boxes, whose divisions
    into chunks are `source` and `boxes`.
    """
    ends = np.array(written, dtype=np.int64).reshape(len(written), 2)
    order = np.lexsort((ends[:, 1], ends[:, 0]))
    steps: list[GatherStep] = []
    step_of = np.zeros(len(written), dtype=np.int64)
    size = boxes.chunk_size
    for index, length in zip(order.tolist(), (ends[order, 1] - ends[order, 0]).tolist(), strict=True):
        if size >= boxes.chunk_size:
            steps.append(GatherStep([], [], []))
            size = 0
        steps[-1].copies.append(index)
        size += length
        step_of[index] = len(steps) - 1
    last_read = np.full(len(source), -1, dtype=np.int64)
    read_by, read_chunks = _covered(source, read)
    np.maximum.at(last_read, read_chunks, step_of[read_by])
    verified_after = np.zeros(len(read), dtype=np.int64)
    np.maximum.at(verified_after, read_by, last_read[read_chunks])
    served_after = np.zeros(len(boxes), dtype=np.int64)
    written_by, written_chunks = _covered(boxes, written)
    np.maximum.at(served_after, written_chunks, verified_after[written_by])
    for chunk in np.flatnonzero(last_read >= 0).tolist():
        steps[last_read[chunk]].verified.append(chunk)
    for chunk, step in enumerate(served_after.tolist()):
        steps[step].served.append(chunk)
    return steps


def _covered(chunks: Chunks, parts: Sequence[Range]) -> tuple[Column, Column]:
    """Return the position of each part once for each chunk that it overlaps, and the chunk."""
    ends = np.array(parts, dtype=np.int64).reshape(len(parts), 2)
    first = ends[:, 0] // chunks.chunk_size
    counts = -(-ends[:, 1] // chunks.chunk_size) - first
    part = np.repeat(np.arange(len(parts)), counts)
    return part, np.arange(len(part)) + np.repeat(first - np.cumsum(counts) + counts, counts)
