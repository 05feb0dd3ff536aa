"""Order in which a source copies, verifies and serves the boxes of an image. Runs on the source. Pure.

A chunk of boxes may be served once all copies into it are done, and afterwards each chunk of the source's own image
that they read was found unchanged. A source chunk is verified once, after the last copy that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rfork.image.chunks import Chunks
from rfork.image.ranges import Range


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
    steps: list[GatherStep] = []
    last_read = np.full(len(source), -1, np.int64)
    size = boxes.chunk_size
    for index in sorted(range(len(written)), key=written.__getitem__):
        if size >= boxes.chunk_size:
            steps.append(GatherStep([], [], []))
            size = 0
        steps[-1].copies.append(index)
        size += written[index][1] - written[index][0]
        last_read[_covering(source, read[index])] = len(steps) - 1
    served_after = np.zeros(len(boxes), np.int64)
    for begin_end, target in zip(read, written, strict=True):
        part = served_after[_covering(boxes, target)]
        np.maximum(part, last_read[_covering(source, begin_end)].max(), out=part)
    for chunk in np.flatnonzero(last_read >= 0).tolist():
        steps[last_read[chunk]].verified.append(chunk)
    for chunk, step in enumerate(served_after.tolist()):
        steps[step].served.append(chunk)
    return steps


def _covering(chunks: Chunks, part: Range) -> slice:
    covering = chunks.covering(*part)
    return slice(covering.start, covering.stop)
