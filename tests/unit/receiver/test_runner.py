"""The threads of a transfer: replay of its events, planning concurrent with reads, progress of an opaque loader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from rfork.errors import NoSource
from rfork.image.chunks import MIB
from rfork.receiver import runner
from rfork.receiver.events import Action, Event
from rfork.receiver.machine import TransferMachine
from rfork.receiver.runner import LoaderLiveness
from rfork.schema import ChunkAssignment, Plan, SourceFault
from rfork.settings import InstanceSettings
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import (
    ALL,
    CHUNKS,
    NEVER_S,
    Fleet,
    Target,
    content_hash,
    image,
    plan,
    route,
    settings,
)


class Recorder:
    """Records the events of a transfer, and replays them through another machine."""

    def __init__(self) -> None:
        self._steps: list[tuple[Event | None, float, Sequence[Action]]] = []
        self._deadline_at = 0.0
        self._target: Target

    def __call__(self, event: Event | None, now: float, actions: Sequence[Action]) -> None:
        self._steps.append((event, now, actions))

    @property
    def failed(self) -> bool:
        """True if a source has failed."""
        return bool(self._target.transfer.reasons)

    def run(self, target: Target) -> None:
        """Run the transfer."""
        self._target, self._deadline_at = target, target.transfer._timer.deadline
        target.run()

    def check_replay(self, chosen: InstanceSettings) -> None:
        """Check that a new machine returns the same actions."""
        layout = self._target.image.layout
        machine = TransferMachine(layout, chosen, instance_id="target", deadline_at=self._deadline_at)
        for event, now, actions in self._steps:
            repeated = machine.start(now) if event is None else machine.handle(event, now)
            assert repr(actions) == repr(repeated)  # errors are compared by their text
        assert machine.finished


FAULTS: dict[str, Callable[[], FaultInjection]] = {
    **{f"chunk {chunk} corrupt": partial(FaultInjection, corrupt_chunks={chunk}) for chunk in range(CHUNKS)},
    **{f"dies after {count} MiB": partial(FaultInjection, dies_after_bytes=count * MIB) for count in range(CHUNKS)},
    "rejects leases": partial(FaultInjection, rejects_leases=True),
    "all chunks corrupt": partial(FaultInjection, corrupt_chunks=set(range(CHUNKS))),
    "two chunks corrupt": partial(FaultInjection, corrupt_chunks={0, 4}),
    "two faults": partial(FaultInjection, corrupt_chunks={1}, dies_after_bytes=3 * MIB),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_recorded_transfer_can_be_replayed(fleet: Fleet, fault: str) -> None:
    """The same events at the same times lead to the same actions."""
    source_image = image(1)
    manifest = source_image.manifest()
    a = fleet.source("a", source_image, FAULTS[fault](), manifest=manifest)
    b = fleet.source("b", source_image, manifest=manifest)
    recorder = Recorder()
    target = Target(
        fleet,
        lambda faults, current: plan(route(b if recorder.failed else a, ALL)),
        settings(no_source_timeout_s=1.0),
        observer=recorder,
    )
    recorder.run(target)
    recorder.check_replay(settings(no_source_timeout_s=1.0))
    assert content_hash(source_image) == content_hash(target.image)


@pytest.mark.parametrize("count", range(1, CHUNKS - 1))
def test_a_transfer_across_an_update_can_be_replayed(fleet: Fleet, count: int) -> None:
    """The weights change once `count` chunks have been verified."""
    seed = fleet.source("seed", image(1))
    recorder = Recorder()

    def replan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        known = target.serving_state.manifests[-1] if len(target.chunk_state) else None
        return plan(route(seed, ALL)) if seed.manifest is not None and known in (None, seed.manifest) else plan()

    def update() -> None:
        if not seed.generation and len(target.chunk_state) == count:
            with seed.updating():
                for region, other in zip(seed.image.regions, image(2).regions, strict=True):
                    region.copy_(other)

    chosen = settings(max_inflight_chunks=1)  # with a second read in flight, the fork could end before the update
    target = Target(fleet, replan, chosen, observer=recorder)
    target.chunk_state.subscribe(update)
    recorder.run(target)
    recorder.check_replay(chosen)
    assert content_hash(image(2)) == content_hash(target.image)


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


def test_a_blocked_thread_is_inactive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last activity stays unchanged however often it is polled."""
    monkeypatch.setattr(runner, "PROCESS_IO", tmp_path / "none")
    monkeypatch.setattr(runner, "MIN_CPU_S", 0.1)  # starting to wait costs some CPU time too
    created: list[LoaderLiveness] = []
    ready, finished = threading.Event(), threading.Event()

    def wait() -> None:
        created.append(LoaderLiveness())
        ready.set()
        finished.wait(NEVER_S)

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait(NEVER_S)
    is_active = [created[0].last_activity() for _ in range(3)]
    finished.set()
    thread.join()
    assert 1 == len(set(is_active))


def test_cpu_time_counts_as_activity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the CPU time of the observed thread counts."""
    monkeypatch.setattr(runner, "PROCESS_IO", tmp_path / "none")
    liveness = LoaderLiveness()
    before = liveness.last_activity()
    sum(range(2_000_000))
    assert liveness.last_activity() > before


@pytest.mark.parametrize(("count", "is_active"), [(runner.MIN_BYTES, True), (10, False)])
def test_reads_count_as_activity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, is_active: bool) -> None:
    """Reads of the process count even on other threads; a few bytes do not."""
    io_file = tmp_path / "io"
    io_file.write_text("rchar: 1000\nwchar: 5\nread_bytes: 0\n")
    monkeypatch.setattr(runner, "PROCESS_IO", io_file)
    monkeypatch.setattr(runner, "MIN_CPU_S", NEVER_S)
    liveness = LoaderLiveness()
    before = liveness.last_activity()
    io_file.write_text(f"rchar: 1000\nwchar: 5\nread_bytes: {count}\n")
    assert is_active == (liveness.last_activity() > before)
