"""The memory is registered beside what else starts up: with an engine that does what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from rfork.errors import SourceBusy, TransportUnusable
from rfork.image.areas import Area
from rfork.image.capture import image_of
from rfork.transport.transfer_engine import exporter as module
from rfork.transport.transfer_engine.exporter import TransferEngineExporter

IMAGE = image_of({"a": torch.ones(8192, dtype=torch.uint8)})


class Ports:
    """A packet filter that keeps its books."""

    def __init__(self) -> None:
        self.inside: dict[str, str] = {}

    def let_in(self, name: str, address: str) -> None:
        self.inside[name] = address

    def let_out(self, name: str) -> None:
        self.inside.pop(name, None)


class FakeEngine:
    """Registers when the test lets it, or fails."""

    def __init__(self, register: Callable[[], None]) -> None:
        self.session = "127.0.0.1:1"
        self.protocol = "tcp"
        self.packet_filter = Ports()
        self.registered: list[Area] = []
        self.closed = threading.Event()
        self._register = register

    def register(self, areas: Sequence[Area]) -> None:
        self._register()
        self.registered += areas

    def close(self) -> None:
        self.closed.set()


def wait_for(event: threading.Event) -> None:
    event.wait(60)


def exported(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> TransferEngineExporter:
    monkeypatch.setattr(module, "Engine", lambda host, protocol, devices: engine)
    return TransferEngineExporter(IMAGE, "127.0.0.1", "tcp", "")


def test_all_memory_is_registered_before_anybody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exported at once; who waits for it is then let in to all of it."""
    done = threading.Event()
    engine = FakeEngine(lambda: wait_for(done))
    giving = exported(monkeypatch, engine)
    before = list(engine.registered)
    early = giving.ready(time.monotonic())
    done.set()
    assert (False, True) == (early, giving.ready(time.monotonic() + 60))
    giving.let_in("channel", "10.0.0.1")
    assert ([], {"channel": "10.0.0.1"}, 8192) == (
        before,
        engine.packet_filter.inside,
        sum(length for _, length in engine.registered),
    )
    giving.close()


def test_who_comes_too_early_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for: the peer service's thread lets readers in, and answers others meanwhile."""
    done = threading.Event()
    giving = exported(monkeypatch, FakeEngine(lambda: wait_for(done)))
    for _ in range(2):
        with pytest.raises(SourceBusy, match="still registering"):
            giving.let_in("channel", "10.0.0.1")
    done.set()
    giving.close()


@pytest.mark.parametrize("error", [TransportUnusable("no room", hint="ulimit"), MemoryError("no room")])
def test_memory_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Each reader hears that this transport cannot be used, and the engine is gone."""

    def fail() -> None:
        raise error

    engine = FakeEngine(fail)
    giving = exported(monkeypatch, engine)
    assert giving.ready(time.monotonic() + 60)
    with pytest.raises(TransportUnusable, match="no room"):
        giving.endpoint()
    for _ in range(2):
        with pytest.raises(TransportUnusable, match="no room"):
            giving.let_in("channel", "10.0.0.1")
    giving.close()
    assert engine.closed.is_set()


def test_closing_waits_for_what_cannot_be_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it returns nothing is registered, though the registration was under way."""
    done, begun = threading.Event(), threading.Event()

    def register() -> None:
        begun.set()
        done.wait(60)

    engine = FakeEngine(register)
    giving = exported(monkeypatch, engine)
    assert begun.wait(60)
    closing = threading.Thread(target=giving.close)
    closing.start()
    early = engine.closed.is_set()
    done.set()
    closing.join()
    with pytest.raises(SourceBusy):
        giving.endpoint()
    assert (False, True) == (early, engine.closed.is_set())
