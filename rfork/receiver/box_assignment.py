"""Assignment of the boxes that a target needs to the layouts that have them. Pure.

A state machine: `start` returns the first parts, `failed` those that replace a failed one. Parts are disjoint; together
they are the boxes that the target needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rfork.placement.boxes import Box, coverage, divide
from rfork.placement.placement_map import PlacementMap


class AssignedPart(NamedTuple):
    """Boxes to fetch from one layout."""

    layout: int
    """Position of the layout."""
    boxes: tuple[Box, ...]

    @property
    def byte_count(self) -> int:
        """Number of bytes of its boxes."""
        return sum(box.byte_count for box in self.boxes)


class MissingBoxes(Exception):
    """No remaining layout has some of the boxes; the message names the first one."""


def by_coverage(wanted: Sequence[Box], layouts: Sequence[PlacementMap]) -> list[int]:
    """Return the positions of the layouts, those with most of the wanted bytes first: few large parts are best.

    `wanted` has at most one box per tensor.
    """
    covered = coverage(wanted, layouts)
    return sorted(range(len(layouts)), key=lambda each: (-covered[each], each))


class BoxAssignment:
    """Parts that are being fetched, and the layouts that have not failed."""

    def __init__(self, wanted: Sequence[Box], layouts: Sequence[PlacementMap]) -> None:
        """`wanted` has at most one box per tensor. Earlier layouts are preferred to later ones with as many bytes."""
        self._wanted = wanted
        self._maps = layouts
        self._usable = by_coverage(wanted, layouts)
        self.in_flight: list[AssignedPart] = []

    @property
    def is_complete(self) -> bool:
        """True if no part is left to fetch."""
        return not self.in_flight

    def start(self) -> list[AssignedPart]:
        """Return the first parts. Raises MissingBoxes. Call it once."""
        return self._assign(self._wanted)

    def completed(self, part: AssignedPart) -> None:
        """Handle a part that was fetched."""
        self.in_flight.remove(part)

    def failed(self, part: AssignedPart) -> list[AssignedPart]:
        """Return the parts that replace a failed one; its layout gets no further part. Raises MissingBoxes."""
        self.in_flight.remove(part)
        if part.layout in self._usable:
            self._usable.remove(part.layout)
        return self._assign(part.boxes)

    def _assign(self, boxes: Sequence[Box]) -> list[AssignedPart]:
        division = divide(boxes, [self._maps[each] for each in self._usable])
        if division.missing:
            raise MissingBoxes(division.missing[0][1])
        parts = [AssignedPart(each, found) for each, found in zip(self._usable, division.parts, strict=True) if found]
        self.in_flight += parts
        return parts
