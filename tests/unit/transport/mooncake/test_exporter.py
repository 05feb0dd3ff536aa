"""The exporter registers memory on a separate thread; tested with a fake engine."""

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
    """A packet filter that records the allowed addresses."""

    def __init__(self) -> None:
        self.allowed: dict[str, str] = {}

    def allow(self, name: str, address: str) -> None:
        self.allowed[name] = address

    def deny(self, name: str) -> None:
        self.allowed.pop(name, None)


class FakeEngine:
    """An engine whose registration calls a function of the test."""

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


def test_a_reader_is_authorized_only_after_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter is created immediately; a reader waits until all memory is registered."""
    done = threading.Event()
    engine = FakeEngine(lambda: wait_for(done))
    exporter = start_exporter(monkeypatch, engine)
    before = list(engine.registered)
    ready_before = exporter.ready(time.monotonic())
    done.set()
    assert not ready_before
    assert exporter.ready(time.monotonic() + 60)
    exporter.authorize_peer("channel", "10.0.0.1")
    assert [] == before
    assert {"channel": "10.0.0.1"} == engine.packet_filter.allowed
    assert 8192 == sum(length for _, length in engine.registered)
    exporter.close()


def test_a_reader_is_rejected_during_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """authorize_peer raises SourceBusy instead of waiting, so the peer service's thread can serve others."""
    done = threading.Event()
    exporter = start_exporter(monkeypatch, FakeEngine(lambda: wait_for(done)))
    for _ in range(2):
        with pytest.raises(SourceBusy, match="still registering"):
            exporter.authorize_peer("channel", "10.0.0.1")
    done.set()
    exporter.close()


@pytest.mark.parametrize("error", [TransportUnavailable("no memory", hint="ulimit"), MemoryError("no memory")])
def test_a_failed_registration_makes_the_transport_unavailable(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Each reader gets TransportUnavailable, and the engine is closed."""

    def fail() -> None:
        raise error

    engine = FakeEngine(fail)
    exporter = start_exporter(monkeypatch, engine)
    assert exporter.ready(time.monotonic() + 60)
    with pytest.raises(TransportUnavailable, match="no memory"):
        exporter.endpoint()
    for _ in range(2):
        with pytest.raises(TransportUnavailable, match="no memory"):
            exporter.authorize_peer("channel", "10.0.0.1")
    exporter.close()
    assert engine.closed.is_set()


def test_closing_waits_for_the_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """When close returns, nothing is registered, even if the registration was running."""
    done, started = threading.Event(), threading.Event()

    def register() -> None:
        started.set()
        done.wait(60)

    engine = FakeEngine(register)
    exporter = start_exporter(monkeypatch, engine)
    assert started.wait(60)
    closing = threading.Thread(target=exporter.close)
    closing.start()
    ready_before = engine.closed.is_set()
    done.set()
    closing.join()
    with pytest.raises(SourceBusy):
        exporter.endpoint()
    assert not ready_before
    assert engine.closed.is_set()
