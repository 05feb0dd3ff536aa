"""Who holds what in one group: how many give each content of each layout, counted as members come and go."""

from __future__ import annotations

from collections.abc import Mapping

from planner.fleet import Holders, Source
from planner.shelf import Content


class HolderCounts:
    """The counts of one group. A member is taken out by the same values by which it was put in."""

    def __init__(self) -> None:
        self._layouts: dict[str, dict[Content, Holders]] = {}

    def of(self, layout_id: str) -> Mapping[Content, Holders]:
        """Who holds what of a layout."""
        return self._layouts.get(layout_id, {})

    @property
    def any_seed(self) -> bool:
        """Whether anybody gives all of anything."""
        return any(holders.seeds for held in self._layouts.values() for holders in held.values())

    def add(self, source: Source) -> None:
        """Count a member, if it gives anything."""
        self._change(source, 1)

    def remove(self, source: Source) -> None:
        """Count it no more."""
        self._change(source, -1)

    def _change(self, source: Source, change: int) -> None:
        key = (source.weights_id, None) if source.weights_id else (None, source.draft)
        if key == (None, None) or source.state == "draining" or source.quarantine or not source.verified:
            return
        held = self._layouts.setdefault(source.layout_id, {})
        before = held.get(key, Holders())
        after = Holders(
            seeds=before.seeds + change * source.complete,
            instances=before.instances + change,
            generation=max(before.generation, source.generation),
        )
        if after.instances:
            held[key] = after
        else:
            del held[key]
            if not held:
                del self._layouts[source.layout_id]
