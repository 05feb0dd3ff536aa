"""What replicas of the planner exchange through Redis."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import TypeAdapter

from planner.store.base import StoreChange
from planner.store.codec import FORKS, INSTANCES, Patch
from planner.store.records import ForkRecord, GroupKey, InstanceRecord, ScaleUpRecord

READ_COUNT: Final = 1000
"""Most changes that the follower reads at once."""
CONFLICT_VERDICT: Final = 0
UNKNOWN_VERDICT: Final = -1
"""The change patches a record that is not there (any more): offer it whole."""


class ReplicaBehind(Exception):
    """What Redis holds does not follow from what this replica has read: everything must be read anew."""


@dataclass(frozen=True)
class ChangeMessage:
    """A change as it travels: patches by id of the record."""

    instances: tuple[tuple[str, Patch], ...] = ()
    forks: tuple[tuple[str, Patch], ...] = ()
    removed: tuple[str, ...] = ()
    group: str = ""
    """As `group_text` writes it; empty where the change depends on no group."""
    version: int = 0
    """Of the group, before the change."""
    emptied: tuple[str, ...] = ()
    """Groups that nobody is in any more: their versions are forgotten."""
    scaleups: tuple[tuple[str, str], ...] = ()
    """Scale-ups as JSON text (`SCALEUP_ADAPTER`), by id: the last that is said holds, whole."""
    withdrawn: tuple[str, ...] = ()


CHANGE_ADAPTER: Final = TypeAdapter(ChangeMessage)
SCALEUP_ADAPTER: Final = TypeAdapter(ScaleUpRecord)


@dataclass(frozen=True)
class LogEntry:
    """One change in the stream."""

    number: int
    body: ChangeMessage
    time: float = 0.0
    """The furthest that any replica's clock had come by then; 0: that is told in another way."""


@dataclass(frozen=True)
class CommitResult:
    """What became of the offered changes, and the changes of others that came before them."""

    entries_since: tuple[LogEntry, ...]
    verdicts: tuple[int, ...]
    """Of each offered change: its number in the stream, CONFLICT or UNKNOWN."""
    time: float
    """The furthest that any replica's clock has come."""


@dataclass(frozen=True)
class StoreSnapshot:
    """Everything, as it was after the change `number`; the records by id."""

    epoch: str
    """Drawn when the planner first met an empty Redis."""
    number: int
    time: float
    """The furthest that any replica's clock has come."""
    instances: Mapping[str, InstanceRecord]
    forks: Mapping[str, ForkRecord]
    versions: Mapping[GroupKey, int]
    floor: int
    """The version of every group that is not among them."""
    ended: tuple[str, ...]
    """Forks in the order of their end."""
    scaleups: Mapping[str, ScaleUpRecord] = field(default_factory=dict)


def body_of(
    change: StoreChange,
    instances: Mapping[str, InstanceRecord],
    forks: Mapping[str, ForkRecord],
    emptied: Iterable[GroupKey] = (),
) -> ChangeMessage:
    """The change as patches of these records, whole where there is none; without those that are the same."""
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
    """The group that `group_text` wrote."""
    return GroupKey(*json.loads(text))
