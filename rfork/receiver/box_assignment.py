"""Decisions of a fork across layouts: which layouts are sources, and which boxes are fetched from which. Pure.

`BoxAssignment` is a state machine: `start` returns the first parts, `failed` those that replace a failed one. Parts are
disjoint; together they are the boxes that the target needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from rfork.errors import (
    ForkFailed,
    LayoutMismatch,
    NetworkError,
    NoSource,
    RforkError,
    SourceError,
    SourceWeightsChanged,
    TransportUnavailable,
)
from rfork.peer.base import BOX_IDLE_S, BoxImage
from rfork.placement.boxes import Box, coverage, divide, wanted_boxes
from rfork.placement.placement_map import PlacementMap
from rfork.schema import InstanceInfo, InstanceReport, Rank
from rfork.weights_version import STATE_VERSION_HINT

OPENED_FOR_S: Final = BOX_IDLE_S / 2
"""Time for which an image that was opened is certainly served, unless its source fails or changes its weights."""


class AssignedPart(NamedTuple):
    """Boxes to fetch from one layout."""

    layout: int
    """Position of the layout."""
    boxes: tuple[Box, ...]

    @property
    def byte_count(self) -> int:
        """Number of bytes of its boxes."""
        return sum(box.byte_count for box in self.boxes)


def choose_samples(
    model: str, serving: Sequence[InstanceInfo], rank: Rank, version: str | None
) -> tuple[str, list[InstanceReport]]:
    """Return the version and a serving instance of each rank and layout of it.

    `version`: the required one; None: the one that is served. Raises NoSource if there is none, or several.
    """
    healthy = [info for info in serving if info.quarantined is None and info.report.rank.role == rank.role]
    if version is None:
        versions = sorted({info.version for info in healthy if info.version is not None})
        if len(versions) != 1:
            served, hint = ", ".join(versions) or "none", STATE_VERSION_HINT if versions else ""
            raise NoSource(f"the version of {model} is not known: served are {served}", hint=hint)
        (version,) = versions
    found: dict[tuple[str, str], InstanceReport] = {}
    for info in healthy:
        if info.version == version:
            report = info.report.model_copy(update={"version": version})
            found.setdefault((report.rank.key, report.layout_id), report)
    if not found:
        raise NoSource(f"no instance serves version {version} of {model} in any layout")
    return version, list(found.values())


def first_and_later(placement_map: PlacementMap) -> tuple[list[Box], list[Box]]:
    """Return the boxes that a loader with this map needs before it runs, and those that it only copies."""
    computed_from = frozenset(placement_map.read_completely)
    first: list[Box] = []
    later: list[Box] = []
    for box in wanted_boxes(placement_map):
        is_later = placement_map.only_copies and box.tensor not in computed_from
        (later if is_later else first).append(box)
    return first, later


def check_opened(opened: BoxImage, version: str, layout_id: str) -> None:
    """Raise SourceWeightsChanged or LayoutMismatch unless the opened boxes are those requested, of this version."""
    if opened.version != version:
        raise SourceWeightsChanged(f"the source began to serve version {opened.version} during the fork")
    if opened.layout_id != layout_id:
        raise LayoutMismatch("the source opened other boxes than requested: the versions of rfork differ")


class OpenedParts:
    """Images that sources have opened and that were not read yet."""

    def __init__(self) -> None:
        self._images: dict[AssignedPart, tuple[BoxImage, float]] = {}

    def add(self, part: AssignedPart, image: BoxImage, now: float) -> None:
        """Handle the image that a source has opened for a part."""
        self._images[part] = image, now

    def pop(self, part: AssignedPart, now: float) -> BoxImage | None:
        """Return the image of a part, once; None if it must be opened, perhaps again."""
        image, opened_at = self._images.pop(part, (None, now))
        return image if now - opened_at < OPENED_FOR_S else None


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
        self._repeated: list[AssignedPart] = []
        self.in_flight: list[AssignedPart] = []

    @property
    def needed_bytes(self) -> int:
        """Number of wanted bytes."""
        return sum(box.byte_count for box in self._wanted)

    @property
    def is_complete(self) -> bool:
        """True if no part is left to fetch."""
        return not self.in_flight

    def start(self) -> list[AssignedPart]:
        """Return the first parts. Raises LayoutMismatch, with the name, for a tensor that no layout has.

        Call it once.
        """
        parts, missing = self._assign(self._wanted)
        if missing:
            raise LayoutMismatch(missing)
        return parts

    def completed(self, part: AssignedPart) -> None:
        """Handle a part that was fetched."""
        self.in_flight.remove(part)

    def failed(self, part: AssignedPart, error: RforkError) -> list[AssignedPart]:
        """Return the parts that replace a failed one. Raises the error if no remaining layout has some of its boxes.

        A part is fetched again once if another instance of its layout may serve it. After that, its layout gets no
        further part.
        """
        is_final = isinstance(error, TransportUnavailable) or part in self._repeated
        if isinstance(error, SourceError | NetworkError | ForkFailed) and not is_final:
            self._repeated.append(part)
            return [part]
        self.in_flight.remove(part)
        if part.layout in self._usable:
            self._usable.remove(part.layout)
        parts, missing = self._assign(part.boxes)
        if missing:
            raise error
        return parts

    def _assign(self, boxes: Sequence[Box]) -> tuple[list[AssignedPart], str]:
        """Return the parts that have boxes, or the reason for which a box is missing."""
        division = divide(boxes, [self._maps[each] for each in self._usable])
        if division.missing:
            return [], division.missing[0][1]
        parts = [AssignedPart(each, found) for each, found in zip(self._usable, division.parts, strict=True) if found]
        self.in_flight += parts
        return parts, ""
