"""Differences between the fleet and the rows that were sent to the pages, as messages.

Each turn builds at most `MAX_ROWS` rows, so that in a busy fleet the page lags instead of planning. Nothing
here blocks, and pages are unknown here: that is the broadcaster's task. Use from the event loop's thread
only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, TypeVar

from pydantic import JsonValue
from pydantic_core import to_json

import rfork
from planner.api.models import model_infos
from planner.core.records import ForkRecord, InstanceRecord
from planner.core.state import PlannerState
from planner.plan_service import PlanService
from planner.ui.rows import Row, fork_row, instance_row, next_change_at, row_diff

TOTALS_INTERVAL_S: Final = 2.0
"""Seconds between updates of the totals over all instances of a model, and of scale-ups."""
MAX_ROWS: Final = 500
"""Maximum number of rows of instances, and of forks, per turn."""
MAX_ENDED: Final = 500
"""Maximum number of finished forks that the page can show."""
ROWS_PER_MESSAGE: Final = 500
"""Rows per message in the initial state."""
SILENT_HEARTBEATS: Final = 2.5
"""Missed heartbeats after which an instance is shown as silent."""

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class SentRow:
    """The last sent row of an instance."""

    record: InstanceRecord
    row: Row
    next_change_at: float
    """Time at which the row changes even without a report."""


class FleetDiff:
    """The last sent rows of instances and forks, and the last sent totals."""

    def __init__(self, service: PlanService, *, heartbeat_s: float) -> None:
        """`heartbeat_s`: heartbeat interval of instances."""
        self._service = service
        self._heartbeat_s = heartbeat_s
        self._silent_after_s = SILENT_HEARTBEATS * heartbeat_s
        self._instances: dict[str, SentRow] = {}
        self._forks: dict[str, Row] = {}
        self._ended: dict[str, None] = {}
        self._changed: dict[str, None] = {}  # forks that changed since they were sent
        self._totals: dict[str, JsonValue] = {}
        self._totals_at = 0.0
        self._next = 0

    def mark_changed(self, fork: ForkRecord) -> None:
        """Mark a fork as changed, to be sent with the next changes."""
        self._changed.setdefault(fork.fork_id)

    def start(self) -> int:
        """Start over: everything has to be sent. Return how many turns that may take."""
        self.clear()
        state = self._service.state
        ended = sorted((fork for fork in state.forks() if not fork.live), key=lambda fork: fork.seen_at)
        for fork in (*ended[-MAX_ENDED:], *state.live_forks()):
            self._changed[fork.fork_id] = None
        return 1 + max(state.instance_count, len(self._changed)) // MAX_ROWS

    def clear(self) -> None:
        """Forget everything that was sent."""
        for table in (self._instances, self._forks, self._ended, self._changed, self._totals):
            table.clear()
        self._totals_at = 0.0

    def next_changes(self) -> bytes:
        """Return the changes since the last call as one message; empty if there are none."""
        now = self._service.now()
        forks, ended = self._changed_forks()
        parts: dict[str, JsonValue] = {
            "instances": [*self._changed_instances(now)],
            "removed": [*self._removed_instances()],
            "forks": [*forks],
            "dropped": [*ended],
            **self._changed_totals(now),
        }
        changes = {name: part for name, part in parts.items() if part or name in self._totals}
        return _message("change", {"now": round(now, 2), **changes}) if changes else b""

    def _changed_instances(self, now: float) -> list[Row]:
        """Return the changed rows. Heartbeats make new records, but most of them change no row."""
        found: list[Row] = []
        records = self._service.state.instances()
        # Continue where the last turn stopped, or the last instances would never be sent.
        start = self._next if self._next < len(records) else 0
        self._next = 0
        for index, record in enumerate(chain(records[start:], records[:start])):
            instance_id = record.report.instance_id
            sent_row = self._instances.get(instance_id)
            if sent_row is not None and sent_row.record is record and now < sent_row.next_change_at:
                continue
            row = instance_row(record, now, self._silent_after_s)
            self._instances[instance_id] = SentRow(record, row, next_change_at(record, now, self._silent_after_s))
            if fields := row_diff(sent_row.row if sent_row else None, row):
                found.append(fields)
            if len(found) >= MAX_ROWS:
                self._next = (start + index + 1) % len(records)
                break
        return found

    def _removed_instances(self) -> list[str]:
        state = self._service.state
        if len(self._instances) <= state.instance_count:
            # Some instances may not have been sent yet: removals wait for that.
            return []
        removed = [name for name in self._instances if state.instance(name) is None]
        for name in removed:
            del self._instances[name]
        return removed

    def _changed_forks(self) -> tuple[list[Row], list[str]]:
        """Return rows, and the ids of finished forks that are no longer shown: the oldest, and the forgotten."""
        found: list[Row] = []
        dropped: list[str] = []
        for fork_id in list(islice(self._changed, MAX_ROWS)):
            del self._changed[fork_id]
            record = self._service.state.fork(fork_id)
            if record is None:  # it finished and was forgotten since it was sent
                if self._forks.pop(fork_id, None) is not None:
                    self._ended.pop(fork_id, None)
                    dropped.append(fork_id)
                continue
            row = fork_row(record)
            if fields := row_diff(self._forks.get(fork_id), row):
                found.append(fields)
            self._forks[fork_id] = row
            self._end(record)
        oldest = [*islice(self._ended, max(0, len(self._ended) - MAX_ENDED))]
        for fork_id in oldest:
            del self._ended[fork_id], self._forks[fork_id]
        return found, dropped + oldest

    def _end(self, record: ForkRecord) -> None:
        if record.live:
            self._ended.pop(record.fork_id, None)
        else:
            self._ended.setdefault(record.fork_id)

    def _changed_totals(self, now: float) -> dict[str, JsonValue]:
        """Return models, scale-ups and the store's readiness, each complete if it changed."""
        if now < self._totals_at:
            return {}
        self._totals_at = now + TOTALS_INTERVAL_S
        service = self._service
        groups = sorted(service.state.groups(), key=lambda group: group.key)
        totals: dict[str, JsonValue] = {
            "models": [row.model_dump() for group in groups for row in model_infos(service.state, group)],
            "scaleups": [view.model_dump(exclude={"expires_in_s"}) for view in service.scaleups()],
            "ready": service.store.ready,
            "seconds_saved": _seconds_saved(service.state),
        }
        changes = {name: value for name, value in totals.items() if self._totals.get(name) != value}
        self._totals = totals
        return changes

    def full_state(self) -> Iterator[bytes]:
        """Return everything sent so far; serialized lazily, but from the rows of this moment."""
        instances = [sent_row.row for sent_row in self._instances.values()]
        return self._pieces(instances, list(self._forks.values()), dict(self._totals))

    def _pieces(self, instances: list[Row], forks: list[Row], totals: dict[str, JsonValue]) -> Iterator[bytes]:
        now = round(self._service.now(), 2)
        header: Row = {"version": rfork.__version__, "heartbeat_s": self._heartbeat_s, "now": now}
        yield _message("begin", header)
        for piece in chunked(instances):
            yield _message("change", {"now": now, "instances": [*piece]})
        for piece in chunked(forks):
            yield _message("change", {"now": now, "forks": [*piece]})
        yield _message("change", {"now": now, **totals})
        yield _message("ready", {"now": now})


def _seconds_saved(state: PlannerState) -> float | None:
    """Return the total over all models, including those scaled to zero; None if unknown."""
    saved = [each.seconds_saved for each in state.histories() if each.seconds_saved is not None]
    return round(sum(saved), 3) if saved else None


def chunked(items: list[ItemT]) -> Iterator[list[ItemT]]:
    """Yield the items in lists of `ROWS_PER_MESSAGE`."""
    for start in range(0, len(items), ROWS_PER_MESSAGE):
        yield items[start : start + ROWS_PER_MESSAGE]


def _message(event: str, data: Row) -> bytes:
    """Return one event. JSON contains no line breaks, so `data` is one line."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), to_json(data))
