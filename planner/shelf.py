"""Where the members of a group lie: in buckets, by neighbourhood, so that the best are found at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from planner.fleet import Place, Source
from planner.policy.ways import only_on_kernels, only_one_host

Content = tuple[str | None, str | None]
"""weights_id, or else draft."""
Scope = tuple[str, ...]
Bucket = tuple[int, int, bool, int]
"""Tier (see `tier_of`), load in quarters, not complete, eighths missing: the least is best."""
MOST_LOAD: Final = 60
"""Quarters beyond which one load is as good as another."""


class Shelf:
    """The members of one layout and content, in buckets for each scope."""

    def __init__(self) -> None:
        self.scopes: dict[Scope, dict[Bucket, dict[str, None]]] = {}

    def add(self, place: Place, bucket: Bucket, instance_id: str) -> None:
        """Put a member into its bucket of each neighbourhood."""
        for scope in scopes_of(place):
            self.scopes.setdefault(scope, {}).setdefault(bucket, {})[instance_id] = None

    def remove(self, place: Place, bucket: Bucket, instance_id: str) -> None:
        """Take it out of them again."""
        for scope in scopes_of(place):
            buckets = self.scopes[scope]
            members = buckets[bucket]
            del members[instance_id]
            if not members:
                del buckets[bucket]
                if not buckets:
                    del self.scopes[scope]

    def best(self, scope: Scope, most: int) -> Iterator[str]:
        """The first `most` members of a scope, best first."""
        buckets = self.scopes.get(scope)
        if buckets is None:
            return
        for bucket in sorted(buckets):
            for instance_id in buckets[bucket]:
                yield instance_id
                most -= 1
                if not most:
                    return


def scopes_of(place: Place) -> tuple[Scope, ...]:
    """The neighbourhoods a member lies in, the nearest first."""
    scopes: list[Scope] = [("host", place.host)]
    if place.nvlink is not None:
        scopes.append(("nvlink", place.nvlink))
    if place.rack is not None:
        scopes.append(("rack", place.zone or "", place.rack))
    if place.zone is not None:
        scopes.append(("zone", place.zone))
    scopes.append(("all",))
    return tuple(scopes)


def bucket_of(source: Source, *, readers: int, load: float, fed: bool, gone: bool) -> Bucket:
    """Where a member lies that has so many readers, which want `load` of its link.

    `fed`: a plan says whom it reads from itself; `gone`: a reader found it gone.
    """
    quarters = min(MOST_LOAD, math.ceil(4 * load / source.weight - 0.01))
    missing = 0 if source.complete else 8 - 8 * source.watermark // max(1, source.chunk_count)
    return tier_of(source, readers, fed=fed, gone=gone), quarters, not source.complete, missing


def tier_of(source: Source, readers: int, *, fed: bool, gone: bool) -> int:
    """0: can be read from; 1: slow, or by kernels on its GPU alone; 2: has no free slot; 3: waits for nobody,
    or gives within its host alone; 4: is not to be read from.
    """
    if source.state == "draining" or source.quarantine or gone:
        return 4
    if not source.complete and not fed:
        return 3
    if only_one_host(source.transports):
        return 3
    if readers >= source.max_readers:
        return 2
    return 1 if (source.slow and not source.complete) or only_on_kernels(source.transports) else 0
