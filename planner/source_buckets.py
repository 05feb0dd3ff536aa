"""Where the members of a group lie: in buckets, by neighbourhood, so that the best are found at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from planner.policy.transports import has_only_gpu_kernels, has_only_same_host
from planner.policy_types import HostLocation, Source

Content = tuple[str | None, str | None]
"""weights_id, or else draft."""
Scope = tuple[str, ...]
Bucket = tuple[int, int, bool, int]
"""Tier (see `availability_tier`), load in quarters, not complete, eighths missing: the least is best."""
MAX_LOAD_LEVEL: Final = 60
"""Quarters beyond which one load is as good as another."""


class SourceBuckets:
    """The members of one layout and content, in buckets for each scope."""

    def __init__(self) -> None:
        self.scopes: dict[Scope, dict[Bucket, dict[str, None]]] = {}

    def add(self, location: HostLocation, bucket: Bucket, instance_id: str) -> None:
        """Put a member into its bucket of each neighbourhood."""
        for scope in localities(location):
            self.scopes.setdefault(scope, {}).setdefault(bucket, {})[instance_id] = None

    def remove(self, location: HostLocation, bucket: Bucket, instance_id: str) -> None:
        """Take it out of them again."""
        for scope in localities(location):
            buckets = self.scopes[scope]
            members = buckets[bucket]
            del members[instance_id]
            if not members:
                del buckets[bucket]
                if not buckets:
                    del self.scopes[scope]

    def best(self, scope: Scope, limit: int) -> Iterator[str]:
        """The first `limit` members of a scope, best first."""
        buckets = self.scopes.get(scope)
        if buckets is None:
            return
        for bucket in sorted(buckets):
            for instance_id in buckets[bucket]:
                yield instance_id
                limit -= 1
                if not limit:
                    return


def localities(location: HostLocation) -> tuple[Scope, ...]:
    """The neighbourhoods a member lies in, the nearest first."""
    scopes: list[Scope] = [("host", location.host)]
    if location.nvlink is not None:
        scopes.append(("nvlink", location.nvlink))
    if location.rack is not None:
        scopes.append(("rack", location.zone or "", location.rack))
    if location.zone is not None:
        scopes.append(("zone", location.zone))
    scopes.append(("all",))
    return tuple(scopes)


def bucket_key(source: Source, *, readers: int, load: float, has_data: bool, missing: bool) -> Bucket:
    """Where a member lies that has so many readers, which want `load` of its link.

    `has_data`: a plan says whom it reads from itself; `missing`: a reader found it gone.
    """
    quarters = min(MAX_LOAD_LEVEL, math.ceil(4 * load / source.egress_share - 0.01))
    missing_quarters = 0 if source.complete else 8 - 8 * source.watermark // max(1, source.chunk_count)
    return (
        availability_tier(source, readers, has_data=has_data, missing=missing),
        quarters,
        not source.complete,
        missing_quarters,
    )


def availability_tier(source: Source, readers: int, *, has_data: bool, missing: bool) -> int:
    """0: can be read from; 1: slow, or by kernels on its GPU alone; 2: has no free slot; 3: waits for nobody,
    or gives within its host alone; 4: is not to be read from.
    """
    if source.state == "draining" or source.quarantine or missing:
        return 4
    if not source.complete and not has_data:
        return 3
    if has_only_same_host(source.transports):
        return 3
    if readers >= source.max_readers:
        return 2
    return 1 if (source.slow and not source.complete) or has_only_gpu_kernels(source.transports) else 0
