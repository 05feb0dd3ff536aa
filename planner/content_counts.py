"""Who holds what in one group: how many give each content of each layout, counted as members come and go."""

from __future__ import annotations

from collections.abc import Mapping

from planner.policy_types import HolderCount, Source
from planner.source_buckets import Content


class ContentCounts:
    """The counts of one group. A member is taken out by the same values by which it was put in."""

    def __init__(self) -> None:
        self._layouts: dict[str, dict[Content, HolderCount]] = {}

    def counts_for(self, layout_id: str) -> Mapping[Content, HolderCount]:
        """Who holds what of a layout."""
        return self._layouts.get(layout_id, {})

    @property
    def any_seed(self) -> bool:
        """Whether anybody gives all of anything."""
        return any(
            holders.seeds for counts_by_content in self._layouts.values() for holders in counts_by_content.values()
        )

    def add(self, source: Source) -> None:
        """Count a member, if it gives anything."""
        self._change(source, 1)

    def remove(self, source: Source) -> None:
        """Count it no more."""
        self._change(source, -1)

    def _change(self, source: Source, change: int) -> None:
        key = (source.weights_id, None) if source.weights_id else (None, source.provisional_id)
        if key == (None, None) or source.state == "draining" or source.quarantine or not source.verified:
            return
        counts_by_content = self._layouts.setdefault(source.layout_id, {})
        before = counts_by_content.get(key, HolderCount())
        after = HolderCount(
            seeds=before.seeds + change * source.complete,
            instances=before.instances + change,
            generation=max(before.generation, source.generation),
        )
        if after.instances:
            counts_by_content[key] = after
        else:
            del counts_by_content[key]
            if not counts_by_content:
                del self._layouts[source.layout_id]
