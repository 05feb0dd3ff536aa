"""Among the sources that can give what a target misses, who gives which part of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from planner.fleet import Source, distance, part_of_link
from planner.policy.parts import cut
from planner.policy.ways import Way
from planner.policy.working import FREE
from rfork.image.ranges import Range, count, intersect, subtract

STRIPES: Final = 4
"""Most sources that one fork reads from at once by choice."""
MOST: Final = 8
"""Sources that one fork is divided among, where none gives everything."""
ENOUGH: Final = 0.75
"""Part of what a target needs that one source must have to spare to be read from alone."""


@dataclass(frozen=True)
class Option:
    """A source that can be read from, what it can give of the rest, and its egress to spare (0 to 1)."""

    source: Source
    gives: tuple[Range, ...]
    spare: float
    way: Way


def choose(
    target: Source, rest: tuple[Range, ...], need: float, options: list[Option]
) -> list[tuple[Source, tuple[Range, ...]]]:
    """Divide the rest, which wants `need` of the target's speed, among the options."""
    whole = [option for option in options if option.gives == rest]
    if not whole:
        return _jointly(rest, options)
    first = whole[0]
    if first.source.complete or not first.source.slow:
        whole = [option for option in whole if option.source.complete or not option.source.slow]
    whole = [option for option in whole if option.way[0] == first.way[0]]
    near = distance(first.source.place, target.place)
    alike = [
        option
        for option in whole
        if option.way == first.way and distance(option.source.place, target.place) == near
    ]
    idle = [option for option in alike if option.source.complete and option.spare > 1 - FREE]
    if first in idle:
        return _divided(target, rest, idle[:STRIPES])
    if near == 0 or first.spare >= ENOUGH * need:
        return [(first.source, rest)]
    spare: list[Option] = []
    for option in whole:
        if option.spare > FREE and sum(each.spare for each in spare) < need and len(spare) < STRIPES:
            spare.append(option)
    if sum(option.spare for option in spare) >= ENOUGH * need:
        return _divided(target, rest, spare)
    return [(first.source, rest)]


def _divided(
    target: Source, rest: tuple[Range, ...], options: list[Option]
) -> list[tuple[Source, tuple[Range, ...]]]:
    """To each its part, by what it has to spare of what it may give; of few chunks, some get none."""
    rates = [option.source.egress_rate or 0.0 for option in options]
    link = target.ingress_rate or max(rates)
    spares = [part_of_link(option.source, link) * option.spare for option in options]
    total, whole = count(rest), sum(spares)
    shares: list[tuple[Source, tuple[Range, ...]]] = []
    begin, passed = 0, 0.0
    for option, spare in zip(options, spares, strict=True):
        passed += spare
        end = math.floor(total * passed / whole + 0.5)
        if begin < end:
            shares.append((option.source, cut(rest, begin, end)))
        begin = end
    return shares


def _jointly(rest: tuple[Range, ...], options: list[Option]) -> list[tuple[Source, tuple[Range, ...]]]:
    """Nobody gives all: each gives what those before it cannot."""
    chosen: list[tuple[Source, tuple[Range, ...]]] = []
    for option in options:
        share = intersect(option.gives, rest)
        if share:
            chosen.append((option.source, share))
            rest = subtract(rest, share)
    return chosen
