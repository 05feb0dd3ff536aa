"""Weights that go away and come back: what a seed gives and holds meanwhile, without sockets."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.errors import LayoutMismatch, NoGpuDirect, SourceBusy, SourceChanged, TransportUnusable
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.peer.memory import MemoryPeers
from rfork.seed import answering, holding
from rfork.seed.exports import Exports
from rfork.seed.holding import seal
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.transport.base import Endpoint, Gate, Transport
from rfork.transport.memory import MemoryExporter, MemoryNetwork, MemoryTransport

KEY = derive_key(b"s" * 32, "seed-1")
SIZE = 3 * MIB


def image_with(value: int) -> Image:
    """An image of its own memory, all of one byte."""
    return image_of({"a": torch.full((SIZE,), value, dtype=torch.uint8)})


LAYOUT_ID = image_with(0).layout.layout_id


class Named(MemoryTransport):
    """A memory transport of another name, whose exporters say something else than a reader expects."""

    def __init__(
        self, network: MemoryNetwork, name: str, *, lets_in: bool = True, exports: bool = True
    ) -> None:
        super().__init__(network)
        self._called = name
        self.lets_in = lets_in
        self.exports = exports

    @property
    def name(self) -> str:
        return self._called

    def export(self, image: Image, gate: Gate) -> MemoryExporter:
        if not self.exports:
            raise NoGpuDirect("no way to the GPU", hint="modprobe")
        exporter = super().export(image, gate)
        if not self.lets_in:
            exporter.let_in = refuse  # type: ignore[method-assign]
        return exporter


def refuse(channel_id: str, address: str) -> None:
    raise TransportUnusable("the memory could not be registered")


def made(*transports: Transport, of: Image | None = None) -> Seed:
    image = of or image_with(1)
    seed = Seed(
        image,
        Identity("model", instance_id="seed-1"),
        Settings(host="node", drain_s=0),
        list(transports) or [MemoryTransport(MemoryNetwork())],
        manifest=seal(image),
        serve_peer=MemoryPeers().service,
    )
    seed.learn_keys([KEY])
    return seed


def token(generation: int = 0, fork_id: str = "fork-1") -> str:
    claims = LeaseClaims(fork_id, "seed-1", LAYOUT_ID, None, generation, time.time() + 60)
    return sign(claims, decode_key(KEY))


Told = tuple[str, int, tuple[tuple[int, int], ...], str | None, tuple[str, ...]]


def told(seed: Seed) -> Told:
    """What the planner hears."""
    report = seed.report()
    return report.state, report.generation, report.verified, report.weights_id, report.transports


def serving(generation: int, image: Image) -> Told:
    return "serving", generation, ((0, 3),), seal(image).weights_id, ("memory",)


def suspended(generation: int, state: str = "loading") -> Told:
    return state, generation, (), None, ()


def open_channel(seed: Seed, generation: int, *transports: str) -> str:
    asked = list(transports) or ["memory"]
    fork_id = seed.check(token(generation))
    return seed.open_channel(fork_id, LAYOUT_ID, asked, "127.0.0.1")[1].transport


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


def test_memory_that_no_transport_can_use() -> None:
    """It stays suspended until it is shown some that can."""
    network = MemoryNetwork()
    picky, image = Named(network, "memory"), image_with(1)
    with made(picky) as seed:
        seed.suspend()
        picky.exports = False
        with pytest.raises(NoGpuDirect):
            seed.resume(image)
        refused = told(seed)
        picky.exports = True
        seed.resume(image)
        assert (suspended(1), serving(1, image)) == (refused, told(seed))


def test_a_transport_that_fails_after_it_was_offered() -> None:
    """The first reader that wants it gets the next one, and it is offered no more."""
    network = MemoryNetwork()
    with made(Named(network, "first", lets_in=False), Named(network, "second")) as seed:
        before = seed.report().transports
        opened = open_channel(seed, 0, "first", "second")
        after = seed.report()
    assert (("first", "second"), "memory", ("second",), ("fork-1",)) == (
        before,
        opened,
        after.transports,
        after.readers,
    )


def test_the_only_transport_fails_after_it_was_offered(caplog: pytest.LogCaptureFixture) -> None:
    """Every reader hears why it cannot be used, which is no fault of the source; the log says it once."""
    with caplog.at_level("ERROR", "rfork"), made(Named(MemoryNetwork(), "first", lets_in=False)) as seed:
        for _ in range(2):
            with pytest.raises(TransportUnusable, match="could not be registered"):
                open_channel(seed, 0, "first")
        with pytest.raises(SourceChanged, match="offers"):
            open_channel(seed, 0, "carrier pigeon")
        assert ((), ()) == (seed.report().transports, seed.report().readers)
    assert 1 == sum("no transport is left" in record.getMessage() for record in caplog.records)


def test_a_transport_that_cannot_be_used_from_the_start() -> None:
    """The others are offered without it."""
    with made(Named(MemoryNetwork(), "first", exports=False), Named(MemoryNetwork(), "second")) as seed:
        assert ("second",) == seed.report().transports


class Early(Named):
    """Its exporters are not ready to let anybody in until the test says so."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        super().__init__(network, name)
        self.ready = False

    def export(self, image: Image, gate: Gate) -> MemoryExporter:
        exporter = super().export(image, gate)
        exporter.let_in = self._let_in  # type: ignore[method-assign]
        exporter.endpoint = lambda: Endpoint(self.name, {})  # type: ignore[method-assign]
        return exporter

    def _let_in(self, channel_id: str, address: str) -> None:
        if not self.ready:
            raise SourceBusy("not ready yet")


def test_a_transport_that_is_not_ready_yet_is_passed_over() -> None:
    """The reader gets the next that it named, with no other the word to come again; it stays on offer."""
    network = MemoryNetwork()
    early = Early(network, "first")
    with made(early, MemoryTransport(network)) as seed:
        opened = [open_channel(seed, 0, "first", "memory")]
        with pytest.raises(SourceBusy, match="not ready yet"):
            open_channel(seed, 0, "first")
        readers, transports = seed.report().readers, seed.report().transports
        early.ready = True
        opened.append(open_channel(seed, 0, "first", "memory"))
    assert (["memory", "first"], ("fork-1",), ("first", "memory")) == (opened, readers, transports)


class Preparing(Named):
    """Its exporters become ready once `done` is set."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        super().__init__(network, name)
        self.asked, self.done = threading.Event(), threading.Event()

    def export(self, image: Image, gate: Gate) -> MemoryExporter:
        exporter = super().export(image, gate)
        exporter.ready = self._ready  # type: ignore[method-assign]
        exporter.endpoint = lambda: Endpoint(self.name, {})  # type: ignore[method-assign]
        return exporter

    def _ready(self, deadline: float) -> bool:
        self.asked.set()
        return self.done.wait(max(0.0, deadline - time.monotonic()))


def test_a_better_transport_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is almost ready is taken, though another one is: the reader stays with what it gets."""
    monkeypatch.setattr(answering, "READY_S", 60.0)
    network = MemoryNetwork()
    preparing = Preparing(network, "first")
    with made(preparing, MemoryTransport(network)) as seed:
        opened: list[str] = []
        opening = threading.Thread(target=lambda: opened.append(open_channel(seed, 0, "first", "memory")))
        opening.start()
        assert preparing.asked.wait(60)
        preparing.done.set()
        opening.join()
    assert ["first"] == opened


def test_a_better_transport_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is taken, and where there is none the reader is told to come again."""
    monkeypatch.setattr(answering, "READY_S", 0.01)
    network = MemoryNetwork()
    with made(Preparing(network, "first"), MemoryTransport(network)) as seed:
        opened = open_channel(seed, 0, "first", "memory")
        with pytest.raises(SourceBusy, match="first is not ready"):
            open_channel(seed, 0, "first")
    assert "memory" == opened


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


def test_suspending_though_an_exporter_cannot_be_closed() -> None:
    """The error is told; the memory is let go of all the same, and what is resumed is given."""
    image, other = image_with(1), image_with(2)
    memory = weakref.ref(image)
    seed = made(Stubborn(MemoryNetwork(), "memory"), of=image).start()
    del image
    with pytest.raises(OSError, match="busy"):
        seed.suspend()
    seed.suspend()
    gc.collect()
    held = memory()
    seed.resume(other)
    assert (None, serving(1, other)) == (held, told(seed))
    with pytest.raises(OSError, match="busy"):
        seed.close()


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


class Stubborn(Named):
    """Its exporters say on closing that they could not."""

    def export(self, image: Image, gate: Gate) -> MemoryExporter:
        exporter = super().export(image, gate)
        close = exporter.close

        def closed() -> None:
            close()
            raise OSError("busy")

        exporter.close = closed  # type: ignore[method-assign]
        return exporter


def test_one_that_cannot_be_closed_holds_up_no_other() -> None:
    """All have had their turn when the error is raised."""
    network = MemoryNetwork()
    exports = Exports([Stubborn(network, "first"), Named(network, "second")])
    exports.open(image_with(1), made())
    with pytest.raises(OSError, match="busy"):
        exports.close()
    assert ({}, []) == (network.exports, [*exports])


def test_one_that_cannot_be_opened_leaves_none() -> None:
    """What is no matter of this machine (a port that is taken) ends the others too."""
    network = MemoryNetwork()

    class Taken(Named):
        def export(self, image: Image, gate: Gate) -> MemoryExporter:
            raise OSError("taken")

    exports = Exports([Named(network, "first"), Taken(network, "second")])
    with pytest.raises(OSError, match="taken"):
        exports.open(image_with(1), made())
    assert ({}, []) == (network.exports, [*exports])
