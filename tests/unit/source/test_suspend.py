"""Weights that go away and come back: what a seed gives and holds meanwhile, without sockets."""

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
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.source import image_state
from rfork.source.image_state import compute_manifest
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


def test_what_is_suspended_is_not_given() -> None:
    """The planner hears that it has nothing; old leases are void, and new ones open no channel."""
    with build_seed() as seed:
        seed.suspend()
        summary = report_summary(seed)
        with pytest.raises(SourceWeightsChanged):
            open_channel(seed, 0)
        with pytest.raises(SourceBusy, match="put its weights away"):
            open_channel(seed, 1)
    assert suspended_summary(1) == summary


def test_what_is_suspended_is_not_held() -> None:
    """Nothing of the seed keeps the memory alive, so that the engine can release it."""
    network = InMemoryNetwork()
    image = image_with(1)
    memory = weakref.ref(image)
    with build_seed(InMemoryTransport(network), seed_image=image) as seed:
        del image
        seed.suspend()
        gc.collect()
        assert (None, {}, SIZE) == (memory(), network.exports, seed.image.layout.image_bytes)


def test_what_is_resumed_is_given_from_where_it_is_now() -> None:
    """Other memory, other weights, another generation."""
    network = InMemoryNetwork()
    other = image_with(2)
    with build_seed(InMemoryTransport(network)) as seed:
        seed.suspend()
        seed.resume(other)
        summary, opened = report_summary(seed), open_channel(seed, 1)
        (exporter,) = network.exports.values()
        assert (serving_summary(1, other), "memory", other) == (summary, opened, exporter.image)


@pytest.mark.parametrize("times", [1, 2])
def test_doing_it_again_does_nothing(times: int) -> None:
    """Neither counts another generation, nor opens anything anew."""
    network = InMemoryNetwork()
    image = image_with(1)
    with build_seed(InMemoryTransport(network)) as seed:
        for _ in range(times):
            seed.suspend()
        suspended_report = report_summary(seed)
        for _ in range(times):
            seed.resume(image)
        assert (suspended_summary(1), serving_summary(1, image), ["memory-2"]) == (
            suspended_report,
            report_summary(seed),
            [*network.exports],
        )


def test_resuming_at_other_addresses_without_suspending() -> None:
    """The engine has moved the weights by then: what was given before is given no more."""
    network = InMemoryNetwork()
    other = image_with(2)
    with build_seed(InMemoryTransport(network)) as seed:
        seed.resume(other)
        assert (serving_summary(1, other), ["memory-2"]) == (report_summary(seed), [*network.exports])


def test_another_layout_is_not_resumed() -> None:
    """It stays suspended, and takes the right one afterwards."""
    image = image_with(1)
    with build_seed() as seed:
        seed.suspend()
        with pytest.raises(LayoutMismatch):
            seed.resume(image_from_tensors({"b": torch.zeros(8)}))
        refused = report_summary(seed)
        seed.resume(image)
        assert (suspended_summary(1), serving_summary(1, image)) == (refused, report_summary(seed))


def test_suspending_waits_for_the_slice_under_way() -> None:
    """A reader that does not take its slice is cut; afterwards the memory is read no more."""
    events: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        with seed.read_guard(token(), 0, MIB, ended.set):
            begun.set()
            ended.wait(60)
            events.append("read")

    with build_seed() as seed:
        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        seed.suspend()
        events.append("suspended")
        thread.join()
    assert ["read", "suspended"] == events


def test_suspending_waits_for_the_digest_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the memory too; what it finds is of no use any more."""
    events: list[str] = []
    begun, done = threading.Event(), threading.Event()

    def sealed(image: Image) -> Manifest:
        begun.set()
        done.wait(0.3)  # who does not wait for this is done by then
        events.append("digested")
        return compute_manifest(image)

    def suspend() -> None:
        seed.suspend()
        events.append("suspended")
        done.set()

    with build_seed() as seed:
        seed.fence()
        monkeypatch.setattr(image_state, "compute_manifest", sealed)
        threads = [threading.Thread(target=seed.publish), threading.Thread(target=suspend)]
        threads[0].start()
        assert begun.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join()
        assert (["digested", "suspended"], suspended_summary(2)) == (events, report_summary(seed))


@pytest.mark.parametrize("change", [Seed.serve, Seed.publish, Seed.fence])
def test_nothing_else_brings_it_back(change: Callable[[Seed], None]) -> None:
    """The end of its own fork, or of an update, finds it suspended, and it stays so."""
    with build_seed() as seed:
        seed.suspend()
        change(seed)
        state, _, *rest = report_summary(seed)
    assert ("loading", [(), None, ()]) == (state, rest)


def test_a_seed_that_drains_goes_on_draining() -> None:
    """Its readers are out at once, so draining is over; nothing brings new ones."""
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
        assert ([True], suspended_summary(1, "draining"), "draining") == (
            drained,
            suspended_report,
            report_summary(seed)[0],
        )


def test_a_closed_seed_opens_nothing() -> None:
    """Whoever resumes late finds it closed; suspending is harmless."""
    network = InMemoryNetwork()
    seed = build_seed(InMemoryTransport(network)).start()
    seed.suspend()
    seed.close()
    seed.resume(image_with(1))
    seed.suspend()
    seed.close()
    assert ({}, suspended_summary(1)) == (network.exports, report_summary(seed))


@pytest.mark.parametrize(
    "touch",
    [
        lambda image: image.digest(0),
        lambda image: image.segments(0, 1),
        lambda image: image.tensor_slices(0, 1),
        lambda image: image.manifest(),
        lambda image: image.readable(0, 1).__enter__(),
        lambda image: image.writable(0, 1).__enter__(),
    ],
)
def test_what_is_put_away_is_an_error_to_touch(touch: Callable[[Image], None]) -> None:
    """Whoever looked up the image too late gets an error, not the bytes at address 0."""
    with build_seed() as seed:
        seed.suspend()
        with pytest.raises(SourceWeightsChanged, match="put away"):
            touch(seed.image)


class EngineFailure(Exception):
    """What an engine's own work raises."""


def failing_digest(image: Image) -> Manifest:
    raise EngineFailure


def test_resuming_again_after_the_digest_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt is no reason to believe that it is given."""
    image = image_with(1)
    with build_seed() as seed:
        seed.suspend()
        monkeypatch.setattr(image_state, "compute_manifest", failing_digest)
        with pytest.raises(EngineFailure):
            seed.resume(image)
        monkeypatch.undo()
        seed.resume(image)
        assert serving_summary(1, image) == report_summary(seed)


def test_resuming_after_an_update_failed() -> None:
    """An engine that mended its weights says so of memory that never moved."""
    image = image_with(1)
    with build_seed(seed_image=image) as seed:
        with pytest.raises(EngineFailure), seed.updating():
            raise EngineFailure
        seed.resume(image)
        assert serving_summary(1, image) == report_summary(seed)


def test_resuming_after_another_fenced_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fenced during the digest of the first attempt is given after the second."""
    image = image_with(1)

    def fence_then_digest(image: Image) -> Manifest:
        seed.fence()
        return compute_manifest(image)

    with build_seed() as seed:
        seed.suspend()
        monkeypatch.setattr(image_state, "compute_manifest", fence_then_digest)
        seed.resume(image)
        state_after_fence = report_summary(seed)[0]
        monkeypatch.undo()
        seed.resume(image)
        assert ("loading", serving_summary(2, image)) == (state_after_fence, report_summary(seed))


def test_many_hands() -> None:
    """Suspended, resumed, fenced and closed from several threads at once, nothing of it is left."""
    network = InMemoryNetwork()
    images = [image_with(value) for value in range(3)]
    with ExitStack() as stack:
        seed = stack.enter_context(build_seed(InMemoryTransport(network)))
        start = threading.Barrier(5)

        def work(operation: Callable[[], None]) -> None:
            start.wait(60)
            for _ in range(20):
                operation()

        works: list[Callable[[], None]] = [
            seed.suspend,
            seed.fence,
            seed.publish,
            *(lambda image=image: seed.resume(image) for image in images[:2]),
        ]
        threads = [threading.Thread(target=work, args=(operation,)) for operation in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seed.resume(images[2])
        state, _, verified, weights_id, transports = report_summary(seed)
    assert ("serving", ((0, 3),), compute_manifest(images[2]).weights_id, ("memory",)) == (
        state,
        verified,
        weights_id,
        transports,
    )
    assert {} == network.exports
