"""The memory is registered beside what else starts up: with an engine that does what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from rfork.errors import SourceBusy, TransportUnavailable
from rfork.image.capture import image_from_tensors
from rfork.image.registration import Region
from rfork.transport.mooncake import exporter as module
from rfork.transport.mooncake.exporter import TransferEngineExporter

IMAGE = image_from_tensors({"a": torch.ones(8192, dtype=torch.uint8)})


class FakePacketFilter:
    """A packet filter that keeps its books."""

    def __init__(self) -> None:
        self.allowed: dict[str, str] = {}

    def allow(self, name: str, address: str) -> None:
        self.allowed[name] = address

    def deny(self, name: str) -> None:
        self.allowed.pop(name, None)


class FakeEngine:
    """Registers when the test lets it, or fails."""

    def __init__(self, register: Callable[[], None]) -> None:
        self.session = "127.0.0.1:1"
        self.protocol = "tcp"
        self.packet_filter = FakePacketFilter()
        self.registered: list[Region] = []
        self.closed = threading.Event()
        self._register = register

    def register(self, areas: Sequence[Region]) -> None:
        self._register()
        self.registered += areas

    def close(self) -> None:
        self.closed.set()


def wait_for(event: threading.Event) -> None:
    event.wait(60)


def start_exporter(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> TransferEngineExporter:
    monkeypatch.setattr(module, "MooncakeEngine", lambda host, protocol, devices: engine)
    return TransferEngineExporter(IMAGE, "127.0.0.1", "tcp", "")


def test_all_memory_is_registered_before_anybody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exported at once; who waits for it is then let in to all of it."""
    done = threading.Event()
    engine = FakeEngine(lambda: wait_for(done))
    exporter = start_exporter(monkeypatch, engine)
    before = list(engine.registered)
    ready_before = exporter.ready(time.monotonic())
    done.set()
    assert (False, True) == (ready_before, exporter.ready(time.monotonic() + 60))
    exporter.authorize_peer("channel", "10.0.0.1")
    assert ([], {"channel": "10.0.0.1"}, 8192) == (
        before,
        engine.packet_filter.allowed,
        sum(length for _, length in engine.registered),
    )
    exporter.close()


def test_who_comes_too_early_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for: the peer service's thread lets readers in, and answers others meanwhile."""
    done = threading.Event()
    exporter = start_exporter(monkeypatch, FakeEngine(lambda: wait_for(done)))
    for _ in range(2):
        with pytest.raises(SourceBusy, match="still registering"):
            exporter.authorize_peer("channel", "10.0.0.1")
    done.set()
    exporter.close()


@pytest.mark.parametrize("error", [TransportUnavailable("no room", hint="ulimit"), MemoryError("no room")])
def test_memory_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Each reader hears that this transport cannot be used, and the engine is gone."""

    def fail() -> None:
        raise error

    engine = FakeEngine(fail)
    exporter = start_exporter(monkeypatch, engine)
    assert exporter.ready(time.monotonic() + 60)
    with pytest.raises(TransportUnavailable, match="no room"):
        exporter.endpoint()
    for _ in range(2):
        with pytest.raises(TransportUnavailable, match="no room"):
            exporter.authorize_peer("channel", "10.0.0.1")
    exporter.close()
    assert engine.closed.is_set()


def test_closing_waits_for_what_cannot_be_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it returns nothing is registered, though the registration was under way."""
    done, begun = threading.Event(), threading.Event()

    def register() -> None:
        begun.set()
        done.wait(60)

    engine = FakeEngine(register)
    exporter = start_exporter(monkeypatch, engine)
    assert begun.wait(60)
    closing = threading.Thread(target=exporter.close)
    closing.start()
    ready_before = engine.closed.is_set()
    done.set()
    closing.join()
    with pytest.raises(SourceBusy):
        exporter.endpoint()
    assert (False, True) == (ready_before, engine.closed.is_set())
