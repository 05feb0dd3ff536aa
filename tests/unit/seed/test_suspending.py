"""Weights that go away and come back: what a seed gives and holds meanwhile, without sockets."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from rfork.errors import LayoutMismatch, SourceBusy, SourceChanged
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.seed import holding
from rfork.seed.holding import seal
from rfork.seed.seed import Seed
from rfork.transport.memory import MemoryNetwork, MemoryTransport
from tests.unit.seed.going_away import SIZE, image_with, made, open_channel, serving, suspended, token, told


def test_what_is_suspended_is_not_given() -> None:
    """The planner hears that it has nothing; old leases are void, and new ones open no channel."""
    with made() as seed:
        seed.suspend()
        heard = told(seed)
        with pytest.raises(SourceChanged):
            open_channel(seed, 0)
        with pytest.raises(SourceBusy, match="put its weights away"):
            open_channel(seed, 1)
    assert suspended(1) == heard


def test_what_is_suspended_is_not_held() -> None:
    """Nothing of the seed keeps the memory alive, so that the engine can release it."""
    network = MemoryNetwork()
    image = image_with(1)
    memory = weakref.ref(image)
    with made(MemoryTransport(network), of=image) as seed:
        del image
        seed.suspend()
        gc.collect()
        assert (None, {}, SIZE) == (memory(), network.exports, seed.image.layout.image_bytes)


def test_what_is_resumed_is_given_from_where_it_is_now() -> None:
    """Other memory, other weights, another generation."""
    network = MemoryNetwork()
    other = image_with(2)
    with made(MemoryTransport(network)) as seed:
        seed.suspend()
        seed.resume(other)
        heard, opened = told(seed), open_channel(seed, 1)
        (exporter,) = network.exports.values()
        assert (serving(1, other), "memory", other) == (heard, opened, exporter.image)


@pytest.mark.parametrize("times", [1, 2])
def test_doing_it_again_does_nothing(times: int) -> None:
    """Neither counts another generation, nor opens anything anew."""
    network = MemoryNetwork()
    image = image_with(1)
    with made(MemoryTransport(network)) as seed:
        for _ in range(times):
            seed.suspend()
        put_away = told(seed)
        for _ in range(times):
            seed.resume(image)
        assert (suspended(1), serving(1, image), ["memory-2"]) == (put_away, told(seed), [*network.exports])


def test_resuming_at_other_addresses_without_suspending() -> None:
    """The engine has moved the weights by then: what was given before is given no more."""
    network = MemoryNetwork()
    other = image_with(2)
    with made(MemoryTransport(network)) as seed:
        seed.resume(other)
        assert (serving(1, other), ["memory-2"]) == (told(seed), [*network.exports])


def test_another_layout_is_not_resumed() -> None:
    """It stays suspended, and takes the right one afterwards."""
    image = image_with(1)
    with made() as seed:
        seed.suspend()
        with pytest.raises(LayoutMismatch):
            seed.resume(image_of({"b": torch.zeros(8)}))
        refused = told(seed)
        seed.resume(image)
        assert (suspended(1), serving(1, image)) == (refused, told(seed))


def test_suspending_waits_for_the_slice_under_way() -> None:
    """A reader that does not take its slice is cut; afterwards the memory is read no more."""
    said: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        with seed.reading(token(), 0, MIB, ended.set):
            begun.set()
            ended.wait(60)
            said.append("read")

    with made() as seed:
        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        seed.suspend()
        said.append("suspended")
        thread.join()
    assert ["read", "suspended"] == said


def test_suspending_waits_for_the_digest_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the memory too; what it finds is of no use any more."""
    said: list[str] = []
    begun, done = threading.Event(), threading.Event()

    def sealed(image: Image) -> Manifest:
        begun.set()
        done.wait(0.3)  # who does not wait for this is done by then
        said.append("digested")
        return seal(image)

    def suspend() -> None:
        seed.suspend()
        said.append("suspended")
        done.set()

    with made() as seed:
        seed.fence()
        monkeypatch.setattr(holding, "seal", sealed)
        threads = [threading.Thread(target=seed.reseal), threading.Thread(target=suspend)]
        threads[0].start()
        assert begun.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join()
        assert (["digested", "suspended"], suspended(2)) == (said, told(seed))


@pytest.mark.parametrize("change", [Seed.serve, Seed.reseal, Seed.fence])
def test_nothing_else_brings_it_back(change: Callable[[Seed], None]) -> None:
    """The end of its own fork, or of an update, finds it suspended, and it stays so."""
    with made() as seed:
        seed.suspend()
        change(seed)
        state, _, *rest = told(seed)
    assert ("loading", [(), None, ()]) == (state, rest)


def test_a_seed_that_drains_goes_on_draining() -> None:
    """Its readers are out at once, so draining is over; nothing brings new ones."""
    with made() as seed:
        open_channel(seed, 0)
        draining = threading.Event()
        drained: list[bool] = []
        with seed.on_change(lambda: draining.set() if seed.draining else None):
            thread = threading.Thread(target=lambda: drained.append(seed.drain(60.0)))
            thread.start()
            assert draining.wait(60)
            seed.suspend()
            thread.join()
        put_away = told(seed)
        seed.resume(image_with(1))
        assert ([True], suspended(1, "draining"), "draining") == (drained, put_away, told(seed)[0])


def test_a_closed_seed_opens_nothing() -> None:
    """Whoever resumes late finds it closed; suspending is harmless."""
    network = MemoryNetwork()
    seed = made(MemoryTransport(network)).start()
    seed.suspend()
    seed.close()
    seed.resume(image_with(1))
    seed.suspend()
    seed.close()
    assert ({}, suspended(1)) == (network.exports, told(seed))


@pytest.mark.parametrize(
    "touch",
    [
        lambda image: image.digest(0),
        lambda image: image.segments(0, 1),
        lambda image: image.parts(0, 1),
        lambda image: image.manifest(),
        lambda image: image.readable(0, 1).__enter__(),
        lambda image: image.writable(0, 1).__enter__(),
    ],
)
def test_what_is_put_away_is_an_error_to_touch(touch: Callable[[Image], None]) -> None:
    """Whoever looked up the image too late gets an error, not the bytes at address 0."""
    with made() as seed:
        seed.suspend()
        with pytest.raises(SourceChanged, match="put away"):
            touch(seed.image)


class Broken(Exception):
    """What an engine's own work raises."""


def failing(image: Image) -> Manifest:
    raise Broken


def test_resuming_again_after_the_digest_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt is no reason to believe that it is given."""
    image = image_with(1)
    with made() as seed:
        seed.suspend()
        monkeypatch.setattr(holding, "seal", failing)
        with pytest.raises(Broken):
            seed.resume(image)
        monkeypatch.undo()
        seed.resume(image)
        assert serving(1, image) == told(seed)


def test_resuming_after_an_update_failed() -> None:
    """An engine that mended its weights says so of memory that never moved."""
    image = image_with(1)
    with made(of=image) as seed:
        with pytest.raises(Broken), seed.updating():
            raise Broken
        seed.resume(image)
        assert serving(1, image) == told(seed)


def test_resuming_after_another_fenced_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fenced during the digest of the first attempt is given after the second."""
    image = image_with(1)

    def fenced(image: Image) -> Manifest:
        seed.fence()
        return seal(image)

    with made() as seed:
        seed.suspend()
        monkeypatch.setattr(holding, "seal", fenced)
        seed.resume(image)
        between = told(seed)[0]
        monkeypatch.undo()
        seed.resume(image)
        assert ("loading", serving(2, image)) == (between, told(seed))


def test_many_hands() -> None:
    """Suspended, resumed, fenced and closed from several threads at once, nothing of it is left."""
    network = MemoryNetwork()
    images = [image_with(value) for value in range(3)]
    with ExitStack() as stack:
        seed = stack.enter_context(made(MemoryTransport(network)))
        start = threading.Barrier(5)

        def work(do: Callable[[], None]) -> None:
            start.wait(60)
            for _ in range(20):
                do()

        works: list[Callable[[], None]] = [
            seed.suspend,
            seed.fence,
            seed.reseal,
            *(lambda image=image: seed.resume(image) for image in images[:2]),
        ]
        threads = [threading.Thread(target=work, args=(do,)) for do in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seed.resume(images[2])
        state, _, verified, weights_id, transports = told(seed)
    assert ("serving", ((0, 3),), seal(images[2]).weights_id, ("memory",)) == (
        state,
        verified,
        weights_id,
        transports,
    )
    assert {} == network.exports
