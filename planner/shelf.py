"""Where the members of a group lie: in buckets, by neighbourhood, so that the best are found at once."""

from __future__ import annotations

from collections.abc import Iterator

from planner.fleet import Place

Content = tuple[str | None, str | None]
"""weights_id, or else draft."""
Scope = tuple[str, ...]
Bucket = tuple[int, int, bool, int]
"""Tier (see `planner.groups`), load in quarters, not complete, eighths missing: the least is best."""


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
