"""Weights that come back elsewhere: transports that cannot use, open or close what they are given."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from rfork.errors import NoGpuDirect, SourceBusy, SourceChanged, TransportUnusable
from rfork.image.memory import Image
from rfork.seed import answering
from rfork.seed.exports import Exports
from rfork.transport.base import Endpoint, Gate
from rfork.transport.memory import MemoryExporter, MemoryNetwork, MemoryTransport
from tests.unit.seed.going_away import image_with, made, open_channel, serving, suspended, told


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
