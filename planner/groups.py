"""Builds what the policy decides over from what the store holds."""

from __future__ import annotations

from collections import defaultdict

from planner.fleet import Group
from planner.store.base import Store
from planner.store.records import GroupKey


def group_of(store: Store, key: GroupKey) -> Group:
    """The group as the policy sees it: who could give, who reads from whom."""
    records = {record.report.instance_id: record for record in store.instances_in(key)}
    readers: defaultdict[str, set[str]] = defaultdict(set)
    parents: dict[str, tuple[str, ...]] = {}
    for fork in store.live_forks_in(key):
        parents[fork.instance_id] = fork.sources
        target = records.get(fork.instance_id)
        if target is not None and target.missing:
            continue  # whoever reads in its place must find its place free
        for source_id in fork.sources:
            readers[source_id].add(fork.fork_id)
    for instance_id, record in records.items():
        # Readers that this planner never heard of are from before it restarted: they count.
        readers[instance_id].update(name for name in record.report.readers if store.fork(name) is None)
    model, rank_key = key
    return Group(
        model=model,
        rank_key=rank_key,
        sources={instance_id: record.source for instance_id, record in records.items()},
        readers={instance_id: frozenset(forks) for instance_id, forks in readers.items()},
        parents=parents,
        other_ranks=tuple(
            sorted(rank for name, rank in store.groups() if name == model and rank != rank_key)
        ),
    )
