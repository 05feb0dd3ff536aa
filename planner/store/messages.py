"""Messages that planner replicas exchange through Redis."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import TypeAdapter

from planner.core.records import ForkRecord, GroupKey, InstanceRecord, ScaleUpRecord, StoreChange
from planner.store.codec import FORKS, INSTANCES, Patch

READ_COUNT: Final = 1000
"""Maximum number of changes that the follower reads at a time."""
CONFLICT_VERDICT: Final = 0
UNKNOWN_VERDICT: Final = -1
"""The change patches a record that does not exist (any more): send the complete record."""


class ReplicaOutdated(Exception):
    """The contents of Redis do not follow from what this replica has read: it must load everything again."""


@dataclass(frozen=True)
class ChangeMessage:
    """A change as it is sent: patches by record id."""

    instances: tuple[tuple[str, Patch], ...] = ()
    forks: tuple[tuple[str, Patch], ...] = ()
    removed: tuple[str, ...] = ()
    group: str = ""
    """Serialized by `group_text`; empty if the change depends on no group."""
    version: int = 0
    """Version of the group before the change."""
    emptied: tuple[str, ...] = ()
    """Groups without members: their versions are removed."""
    scaleups: tuple[tuple[str, str], ...] = ()
    """Scale-ups as JSON text (`SCALEUP_ADAPTER`), by id: always complete, the last one wins."""
    withdrawn: tuple[str, ...] = ()


CHANGE_ADAPTER: Final = TypeAdapter(ChangeMessage)
SCALEUP_ADAPTER: Final = TypeAdapter(ScaleUpRecord)


@dataclass(frozen=True)
class LogEntry:
    """One change in the stream."""

    number: int
    body: ChangeMessage
    time: float = 0.0
    """Furthest clock of any replica at that point; 0 if it is transmitted separately."""


@dataclass(frozen=True)
class CommitResult:
    """Verdicts of the sent changes, and the changes of other replicas that precede them."""

    entries_since: tuple[LogEntry, ...]
    verdicts: tuple[int, ...]
    """For each sent change: its number in the stream, CONFLICT_VERDICT or UNKNOWN_VERDICT."""
    time: float
    """Furthest clock of any replica."""


@dataclass(frozen=True)
class StoreSnapshot:
    """The complete contents after the change `number`; records by id."""

    epoch: str
    """Random id, generated when a planner finds an empty Redis."""
    number: int
    time: float
    """Furthest clock of any replica."""
    instances: Mapping[str, InstanceRecord]
    forks: Mapping[str, ForkRecord]
    versions: Mapping[GroupKey, int]
    floor: int
    """Version of every group that is not in `versions`."""
    ended: tuple[str, ...]
    """Finished forks, in the order in which they ended."""
    scaleups: Mapping[str, ScaleUpRecord] = field(default_factory=dict)


def body_of(
    change: StoreChange,
    instances: Mapping[str, InstanceRecord],
    forks: Mapping[str, ForkRecord],
    emptied: Iterable[GroupKey] = (),
) -> ChangeMessage:
    """Return the change as patches of these records, complete records where there is none; unchanged ones are
    omitted.
    """
    patches = (
        (name, INSTANCES.patch(instances.get(name), each))
        for each in change.instances
        for name in (each.report.instance_id,)
    )
    fork_patches = ((each.fork_id, FORKS.patch(forks.get(each.fork_id), each)) for each in change.forks)
    return ChangeMessage(
        instances=tuple((name, patch) for name, patch in patches if patch),
        forks=tuple((name, patch) for name, patch in fork_patches if patch),
        removed=change.removed,
        group="" if change.group is None else group_text(change.group),
        version=change.version,
        emptied=tuple(group_text(group) for group in emptied),
        scaleups=tuple((each.scaleup.scaleup_id, SCALEUP_ADAPTER.dump_json(each).decode()) for each in change.scaleups),
        withdrawn=change.withdrawn,
    )


def group_text(group: GroupKey) -> str:
    """Return a group as one line of text: JSON, since models and versions may hold any character."""
    return json.dumps(group, separators=(",", ":"))


def group_from(text: str) -> GroupKey:
    """Return the group that `group_text` serialized."""
    return GroupKey(*json.loads(text))
