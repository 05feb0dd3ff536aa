"""Divides the missing chunks of a target among the sources that can serve them."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from planner.policy.chunk_split import cut, split_alternately
from planner.policy.plan_state import IDLE_LOAD
from planner.policy.transports import TransportCost
from planner.policy.types import Source, distance, link_fraction
from rfork.image.ranges import Range, count, intersect, subtract

MAX_STRIPES: Final = 4
"""Maximum number of sources that one fork reads from concurrently by choice."""
MAX_CANDIDATES: Final = 64
"""Number of candidates that are considered although those before them have all chunks together: they may have more
egress to spare.
"""
MIN_USEFUL_SHARE: Final = 0.65
"""Fraction of a target's required speed that a single source must have to spare: one with a slow reader has 0.7."""


class SourceOption(NamedTuple):
    """A source that can be read from, the requested chunks that it can serve, and its spare egress (0 to 1)."""

    source: Source
    available: tuple[Range, ...]
    spare_egress: float
    transport_cost: TransportCost


def split_among(
    target: Source, unassigned: tuple[Range, ...], required: float, options: list[SourceOption]
) -> list[tuple[Source, tuple[Range, ...]]]:
    """Divide the rest, which requires `required` of the target's speed, among the options."""
    complete_options = [option for option in options if option.available == unassigned]
    if not complete_options:
        return _split_by_availability(unassigned, options)
    first = complete_options[0]
    if first.source.complete or not first.source.slow:
        complete_options = [option for option in complete_options if option.source.complete or not option.source.slow]
    complete_options = [option for option in complete_options if option.transport_cost[0] == first.transport_cost[0]]
    nearest = distance(first.source.location, target.location)
    equivalent = [
        option
        for option in complete_options
        if option.transport_cost == first.transport_cost
        and distance(option.source.location, target.location) == nearest
    ]
    idle = [option for option in equivalent if option.source.complete and option.spare_egress > 1 - IDLE_LOAD]
    if first in idle:
        return _split_by_capacity(target, unassigned, idle[:MAX_STRIPES])
    if nearest == 0 or first.spare_egress >= MIN_USEFUL_SHARE * required:
        return [(first.source, unassigned)]
    with_spare: list[SourceOption] = []
    for option in complete_options:
        if (
            option.spare_egress > IDLE_LOAD
            and sum(each.spare_egress for each in with_spare) < required
            and len(with_spare) < MAX_STRIPES
        ):
            with_spare.append(option)
    if sum(option.spare_egress for option in with_spare) >= MIN_USEFUL_SHARE * required:
        return _split_by_capacity(target, unassigned, with_spare)
    # Of its current sources, the target uses the egress already.
    return [(max(complete_options, key=lambda option: option.spare_egress).source, unassigned)]


def _split_by_capacity(
    target: Source, unassigned: tuple[Range, ...], options: list[SourceOption]
) -> list[tuple[Source, tuple[Range, ...]]]:
    """Assign each source a part in proportion to its spare rate; of few chunks, some get none.

    A relay mostly receives its chunks in order, so it has alternating runs of them: it would have nothing of a last
    part for long.
    """
    rates = [option.source.egress_rate or 0.0 for option in options]
    link = target.ingress_rate or max(rates)
    spare_rates = [link_fraction(option.source, link) * option.spare_egress for option in options]
    if not all(option.source.complete for option in options):
        parts = split_alternately(unassigned, spare_rates)
        return [(option.source, part) for option, part in zip(options, parts, strict=True) if part]
    total, total_spare = count(unassigned), sum(spare_rates)
    shares: list[tuple[Source, tuple[Range, ...]]] = []
    begin, offset = 0, 0.0
    for option, spare_egress in zip(options, spare_rates, strict=True):
        offset += spare_egress
        end = math.floor(total * offset / total_spare + 0.5)
        if begin < end:
            shares.append((option.source, cut(unassigned, begin, end)))
        begin = end
    return shares


def _split_by_availability(
    unassigned: tuple[Range, ...], options: list[SourceOption]
) -> list[tuple[Source, tuple[Range, ...]]]:
    """Assign each source what the ones before it do not have, if none has everything."""
    chosen: list[tuple[Source, tuple[Range, ...]]] = []
    for option in options:
        share = intersect(option.available, unassigned)
        if share:
            chosen.append((option.source, share))
            unassigned = subtract(unassigned, share)
    return chosen
