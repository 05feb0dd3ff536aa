"""Suspended and resumed weights: what a seed serves and keeps in memory meanwhile, without sockets."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from rfork.errors import LayoutMismatch, SourceBusy, SourceWeightsChanged
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB
from rfork.image.layout import Manifest
from rfork.image.memory import Image, compute_manifest
from rfork.source import seed as seed_module
from rfork.source.seed import Seed
from rfork.testing.transport import InMemoryNetwork, InMemoryTransport
from tests.unit.source.suspendable_seeds import (
    SIZE,
    build_seed,
    image_with,
    open_channel,
    report_summary,
    serving_summary,
    suspended_summary,
    token,
)


def test_suspended_weights_are_not_served() -> None:
    """The planner receives an empty report, old leases are void, and new ones open no channel."""
    with build_seed() as seed:
        seed.suspend()
        summary = report_summary(seed)
        with pytest.raises(SourceWeightsChanged):
            open_channel(seed, 0)
        with pytest.raises(SourceBusy, match="suspended its weights"):
            open_channel(seed, 1)
    assert suspended_summary(1) == summary


def test_suspended_weights_can_be_released() -> None:
    """The seed keeps no reference to the memory, so that the engine can release it."""
    network = InMemoryNetwork()
    image = image_with(1)
    memory = weakref.ref(image)
    with build_seed(InMemoryTransport(network), seed_image=image) as seed:
        del image
        seed.suspend()
        gc.collect()
        assert memory() is None
        assert {} == network.exports
        assert SIZE == seed.image.layout.image_bytes


def test_resumed_weights_are_served_from_their_new_memory() -> None:
    """They may be other weights in other memory, and have a new generation."""
    network = InMemoryNetwork()
    other = image_with(2)
    with build_seed(InMemoryTransport(network)) as seed:
        seed.suspend()
        seed.resume(other)
        summary, opened = report_summary(seed), open_channel(seed, 1)
        (exporter,) = network.exports.values()
        assert serving_summary(1, other) == summary
        assert "memory" == opened
        assert other == exporter.image


@pytest.mark.parametrize("times", [1, 2])
def test_suspend_and_resume_are_idempotent(times: int) -> None:
    """A second call neither increments the generation nor opens another exporter."""
    network = InMemoryNetwork()
    image = image_with(1)
    with build_seed(InMemoryTransport(network)) as seed:
        for _ in range(times):
            seed.suspend()
        suspended_report = report_summary(seed)
        for _ in range(times):
            seed.resume(image)
        assert suspended_summary(1) == suspended_report
        assert serving_summary(1, image) == report_summary(seed)
        assert ["memory-2"] == [*network.exports]


def test_weights_that_moved_without_suspending_are_served_from_their_new_memory() -> None:
    """The engine has moved the weights, so the previous exporter is replaced."""
    network = InMemoryNetwork()
    other = image_with(2)
    with build_seed(InMemoryTransport(network)) as seed:
        seed.resume(other)
        assert serving_summary(1, other) == report_summary(seed)
        assert ["memory-2"] == [*network.exports]


def test_another_layout_is_not_resumed() -> None:
    """The seed stays suspended, and accepts the correct layout afterwards."""
    image = image_with(1)
    with build_seed() as seed:
        seed.suspend()
        with pytest.raises(LayoutMismatch):
            seed.resume(image_from_tensors({"b": torch.zeros(8)}))
        refused = report_summary(seed)
        seed.resume(image)
        assert suspended_summary(1) == refused
        assert serving_summary(1, image) == report_summary(seed)


def test_suspending_waits_for_inflight_reads() -> None:
    """A reader that does not finish is aborted; the memory is not read afterwards."""
    events: list[str] = []
    started, ended = threading.Event(), threading.Event()

    def read() -> None:
        with seed.read_guard(token(), 0, MIB, ended.set):
            started.set()
            ended.wait(60)
            events.append("read")

    with build_seed() as seed:
        thread = threading.Thread(target=read)
        thread.start()
        assert started.wait(60)
        seed.suspend()
        events.append("suspended")
        thread.join()
    assert ["read", "suspended"] == events


def test_suspending_waits_for_a_running_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest reads the memory too; its result is discarded."""
    events: list[str] = []
    started, done = threading.Event(), threading.Event()

    def slow_digest(image: Image) -> Manifest:
        started.set()
        done.wait(0.3)  # a suspend that does not wait for this is done by then
        events.append("digested")
        return compute_manifest(image)

    def suspend() -> None:
        seed.suspend()
        events.append("suspended")
        done.set()

    with build_seed() as seed:
        seed.fence()
        monkeypatch.setattr(seed_module, "compute_manifest", slow_digest)
        threads = [threading.Thread(target=seed.publish), threading.Thread(target=suspend)]
        threads[0].start()
        assert started.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join()
        assert ["digested", "suspended"] == events
        assert suspended_summary(2) == report_summary(seed)


@pytest.mark.parametrize("change", [Seed.serve, Seed.publish, Seed.fence])
def test_only_resuming_ends_a_suspension(change: Callable[[Seed], None]) -> None:
    """The end of the seed's own fork or of an update does not resume it."""
    with build_seed() as seed:
        seed.suspend()
        change(seed)
        report = seed.report()
    assert "loading" == report.state
    assert () == report.verified
    assert report.weights_id is None
    assert () == report.transports


def test_a_draining_seed_stays_draining() -> None:
    """Suspending closes its channels, so draining finishes; resuming admits no readers."""
    with build_seed() as seed:
        open_channel(seed, 0)
        draining = threading.Event()
        drained: list[bool] = []
        with seed.on_change(lambda: draining.set() if seed.draining else None):
            thread = threading.Thread(target=lambda: drained.append(seed.drain(60.0)))
            thread.start()
            assert draining.wait(60)
            seed.suspend()
            thread.join()
        suspended_report = report_summary(seed)
        seed.resume(image_with(1))
        assert [True] == drained
        assert suspended_summary(1, "draining") == suspended_report
        assert "draining" == report_summary(seed)[0]


def test_a_closed_seed_opens_nothing() -> None:
    """Resuming a closed seed opens no exporter; suspending it is harmless."""
    network = InMemoryNetwork()
    seed = build_seed(InMemoryTransport(network)).start()
    seed.suspend()
    seed.close()
    seed.resume(image_with(1))
    seed.suspend()
    seed.close()
    assert {} == network.exports
    assert suspended_summary(1) == report_summary(seed)


@pytest.mark.parametrize(
    "read",
    [
        lambda image: image.digest(0),
        lambda image: image.segments(0, 1),
        lambda image: image.tensor_slices(0, 1),
        lambda image: image.manifest(),
        lambda image: image.readable(0, 1).__enter__(),
        lambda image: image.writable(0, 1).__enter__(),
    ],
)
def test_a_suspended_image_rejects_reads(read: Callable[[Image], None]) -> None:
    """A caller that fetched the image too late receives an error instead of the bytes at address 0."""
    with build_seed() as seed:
        seed.suspend()
        with pytest.raises(SourceWeightsChanged, match="already released"):
            read(seed.image)


class EngineFailure(Exception):
    """Stands for an error of the engine."""


def failing_digest(image: Image) -> Manifest:
    raise EngineFailure


def test_resuming_succeeds_after_a_failed_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed attempt does not count as resumed."""
    image = image_with(1)
    with build_seed() as seed:
        seed.suspend()
        monkeypatch.setattr(seed_module, "compute_manifest", failing_digest)
        with pytest.raises(EngineFailure):
            seed.resume(image)
        monkeypatch.undo()
        seed.resume(image)
        assert serving_summary(1, image) == report_summary(seed)


def test_resuming_serves_repaired_weights_after_a_failed_update() -> None:
    """An engine that has repaired its weights resumes them in memory that never moved."""
    image = image_with(1)
    with build_seed(seed_image=image) as seed:
        with pytest.raises(EngineFailure), seed.updating():
            raise EngineFailure
        seed.resume(image)
        assert serving_summary(1, image) == report_summary(seed)


def test_resuming_succeeds_after_a_fence_during_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were fenced during the first attempt are served after the second."""
    image = image_with(1)

    def fence_then_digest(image: Image) -> Manifest:
        seed.fence()
        return compute_manifest(image)

    with build_seed() as seed:
        seed.suspend()
        monkeypatch.setattr(seed_module, "compute_manifest", fence_then_digest)
        seed.resume(image)
        state_after_fence = report_summary(seed)[0]
        monkeypatch.undo()
        seed.resume(image)
        assert "loading" == state_after_fence
        assert serving_summary(2, image) == report_summary(seed)


def test_concurrent_state_changes_are_safe() -> None:
    """After concurrent suspends, resumes, fences and publishes the seed serves the last image, and closing
    leaves nothing.
    """
    network = InMemoryNetwork()
    images = [image_with(value) for value in range(3)]
    with ExitStack() as stack:
        seed = stack.enter_context(build_seed(InMemoryTransport(network)))
        barrier = threading.Barrier(5)

        def work(operation: Callable[[], None]) -> None:
            barrier.wait(60)
            for _ in range(20):
                operation()

        operations: list[Callable[[], None]] = [
            seed.suspend,
            seed.fence,
            seed.publish,
            *(lambda image=image: seed.resume(image) for image in images[:2]),
        ]
        threads = [threading.Thread(target=work, args=(operation,)) for operation in operations]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seed.resume(images[2])
        state, _, verified, weights_id, transports = report_summary(seed)
    assert "serving" == state
    assert ((0, 3),) == verified
    assert compute_manifest(images[2]).weights_id == weights_id
    assert ("memory",) == transports
    assert {} == network.exports
