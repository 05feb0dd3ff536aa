"""The threads of a transfer: its events can be replayed, and planning is concurrent with reads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from rfork.errors import NoSource
from rfork.receiver.events import Action, Event
from rfork.receiver.machine import TransferMachine
from rfork.schema import ChunkAssignment, Plan, SourceFault
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import (
    CHUNKS,
    NEVER_S,
    Fleet,
    Script,
    Target,
    content_hash,
    image,
    plan,
    route,
    settings,
)
from tests.unit.receiver.transfer_helpers import ALL

Step = tuple[Event | None, float, Sequence[Action]]


def test_a_recorded_transfer_can_be_replayed(fleet: Fleet) -> None:
    """The same events at the same times lead to the same actions."""
    source_image = image(1)
    manifest = source_image.manifest()
    a = fleet.source("a", source_image, FaultInjection(corrupt_chunks={3}), manifest=manifest)
    b = fleet.source("b", source_image, manifest=manifest)
    steps: list[Step] = []
    target = Target(
        fleet,
        Script([lambda: plan(route(a, ALL)), lambda: plan(route(b, ALL))]),
        observer=lambda event, now, actions: steps.append((event, now, actions)),
    )
    deadline_at = target.transfer._deadline.monotonic_time
    target.run()
    machine = TransferMachine(target.image.layout, settings(), instance_id="target", deadline_at=deadline_at)
    assert None is steps[0][0]
    for event, now, actions in steps:
        repeated = machine.start(now) if event is None else machine.handle(event, now)
        assert repr(actions) == repr(repeated)  # errors are compared by their text
    assert machine.finished


def test_a_planner_that_does_not_respond_delays_no_read(fleet: Fleet) -> None:
    """The open sources serve the rest of the chunks meanwhile."""
    source_image = image(1)
    manifest = source_image.manifest()
    a = fleet.source("a", source_image, FaultInjection(dies_after_bytes=0), manifest=manifest)
    b = fleet.source("b", source_image, manifest=manifest)
    requests: list[tuple[SourceFault, ...]] = []
    served = threading.Event()

    def replan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        requests.append(faults)
        if len(requests) == 1:
            return plan(route(a, (0, 1)), route(b, (1, CHUNKS)))
        assert served.wait(NEVER_S)
        return plan(route(b, ALL))

    target = Target(fleet, replan)
    target.chunk_state.subscribe(lambda: served.set() if len(target.chunk_state) == CHUNKS - 1 else None)
    target.run()
    assert content_hash(source_image) == content_hash(target.image)


def test_a_source_is_closed_before_the_next_plan_is_requested(fleet: Fleet) -> None:
    """Its reader slot is free by then, so that the same source can be planned again."""
    source_image = image(1)
    seed = fleet.source("a", source_image, FaultInjection(corrupt_chunks={3}), max_readers=1)
    readers: list[tuple[str, ...]] = []

    def replan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        readers.append(seed.report().readers)
        return plan(route(seed, ALL)) if len(readers) == 1 else plan(reason="no source left")

    with pytest.raises(NoSource, match="no source left"):
        Target(fleet, replan).run()
    assert [(), ()] == readers
