"""Buckets of a group's members by locality, so that the best ones are found immediately."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from planner.policy.transports import has_only_gpu_kernels, has_only_same_host
from planner.policy_types import HostLocation, Source

Content = tuple[str | None, str | None]
"""weights_id, or else provisional_id."""
Scope = tuple[str, ...]
Bucket = tuple[int, int, bool, int]
"""Tier (see `availability_tier`), load in quarters, incomplete, eighths missing: the lowest is best."""
MAX_LOAD_LEVEL: Final = 60
"""Quarters from which all loads count as equal."""


class SourceBuckets:
    """The members of one layout and content, in buckets for each locality."""

    def __init__(self) -> None:
        self.scopes: dict[Scope, dict[Bucket, dict[str, None]]] = {}

    def add(self, location: HostLocation, bucket: Bucket, instance_id: str) -> None:
        """Add a member to its bucket of each locality."""
        for scope in localities(location):
            self.scopes.setdefault(scope, {}).setdefault(bucket, {})[instance_id] = None

    def remove(self, location: HostLocation, bucket: Bucket, instance_id: str) -> None:
        """Remove a member from its buckets."""
        for scope in localities(location):
            buckets = self.scopes[scope]
            members = buckets[bucket]
            del members[instance_id]
            if not members:
                del buckets[bucket]
                if not buckets:
                    del self.scopes[scope]

    def best(self, scope: Scope, limit: int) -> Iterator[str]:
        """Yield the first `limit` members of a locality, best first."""
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
    """Return the localities of a member, nearest first."""
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
    """Return the bucket of a member with this many readers, which use `load` of its link.

    `has_data`: its plan has sources; `missing`: a reader could not reach it.
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
    """Return 0: can be read from; 1: slow, or by kernels on its GPU only; 2: no free slot; 3: has no source
    of its own, or serves its own host only; 4: must not be read from.
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
