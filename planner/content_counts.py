"""Counts, per layout and content, of the instances of one group that serve it. Updated as members change."""

from __future__ import annotations

from collections.abc import Mapping

from planner.policy_types import HolderCount, Source
from planner.source_buckets import Content


class ContentCounts:
    """The counts of one group. A member must be removed with the values with which it was added."""

    def __init__(self) -> None:
        self._layouts: dict[str, dict[Content, HolderCount]] = {}

    def counts_for(self, layout_id: str) -> Mapping[Content, HolderCount]:
        """Return the holders of a layout, by content."""
        return self._layouts.get(layout_id, {})

    @property
    def any_seed(self) -> bool:
        """True if any member serves a complete image."""
        return any(
            holders.seeds for counts_by_content in self._layouts.values() for holders in counts_by_content.values()
        )

    def add(self, source: Source) -> None:
        """Count a member, if it serves anything."""
        self._change(source, 1)

    def remove(self, source: Source) -> None:
        """Stop counting a member."""
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
