"""Weights that are resumed elsewhere: transports that fail to export, authorize or close."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from rfork.errors import GpuDirectUnavailable, SourceBusy, SourceWeightsChanged, TransportUnavailable
from rfork.image.memory import Image
from rfork.source import seed as seed_module
from rfork.source.exporters import ExporterSet
from rfork.testing.transport import InMemoryExporter, InMemoryNetwork, InMemoryTransport
from rfork.transport.base import AccessGate, Endpoint
from tests.unit.source.suspendable_seeds import (
    build_seed,
    image_with,
    open_channel,
    report_summary,
    serving_summary,
    suspended_summary,
)


class ConfigurableTransport(InMemoryTransport):
    """A memory transport with a name and with failures that the test chooses."""

    def __init__(
        self, network: InMemoryNetwork, name: str, *, authorizes: bool = True, can_export: bool = True
    ) -> None:
        super().__init__(network)
        self._transport_name = name
        self.authorizes = authorizes
        self.can_export = can_export

    @property
    def name(self) -> str:
        return self._transport_name

    def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
        if not self.can_export:
            raise GpuDirectUnavailable("no GPU access", hint="modprobe")
        exporter = super().export(image, gate)
        if not self.authorizes:
            exporter.authorize_peer = fail_authorization  # type: ignore[method-assign]
        return exporter


def fail_authorization(channel_id: str, address: str) -> None:
    raise TransportUnavailable("the memory could not be registered")


def test_resuming_memory_that_no_transport_can_export_fails() -> None:
    """The seed stays suspended until it resumes memory that a transport can export."""
    network = InMemoryNetwork()
    transport, image = ConfigurableTransport(network, "memory"), image_with(1)
    with build_seed(transport) as seed:
        seed.suspend()
        transport.can_export = False
        with pytest.raises(GpuDirectUnavailable):
            seed.resume(image)
        refused = report_summary(seed)
        transport.can_export = True
        seed.resume(image)
        assert suspended_summary(1) == refused
        assert serving_summary(1, image) == report_summary(seed)


def test_a_transport_that_fails_after_it_was_offered_is_skipped() -> None:
    """The first reader that requests it uses the next one, and it is no longer offered."""
    network = InMemoryNetwork()
    with build_seed(
        ConfigurableTransport(network, "first", authorizes=False), ConfigurableTransport(network, "second")
    ) as seed:
        before = seed.report().transports
        opened = open_channel(seed, 0, "first", "second")
        after = seed.report()
    assert ("first", "second") == before
    assert "memory" == opened
    assert ("second",) == after.transports
    assert ("fork-1",) == after.readers


def test_the_only_transport_fails_after_it_was_offered(caplog: pytest.LogCaptureFixture) -> None:
    """Every reader receives the reason, which does not blame the source, and the log has it once."""
    with (
        caplog.at_level("ERROR", "rfork"),
        build_seed(ConfigurableTransport(InMemoryNetwork(), "first", authorizes=False)) as seed,
    ):
        for _ in range(2):
            with pytest.raises(TransportUnavailable, match="could not be registered"):
                open_channel(seed, 0, "first")
        with pytest.raises(SourceWeightsChanged, match="offers"):
            open_channel(seed, 0, "unknown")
        assert () == seed.report().transports
        assert () == seed.report().readers
    assert 1 == sum("no transport is left" in record.getMessage() for record in caplog.records)


def test_a_transport_that_cannot_be_used_at_the_start_is_omitted() -> None:
    """The others are offered without it."""
    with build_seed(
        ConfigurableTransport(InMemoryNetwork(), "first", can_export=False),
        ConfigurableTransport(InMemoryNetwork(), "second"),
    ) as seed:
        assert ("second",) == seed.report().transports


class UnreadyTransport(ConfigurableTransport):
    """Its exporters authorize no reader until the test sets `ready`."""

    def __init__(self, network: InMemoryNetwork, name: str) -> None:
        super().__init__(network, name)
        self.ready = False

    def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
        exporter = super().export(image, gate)
        exporter.authorize_peer = self._authorize_peer  # type: ignore[method-assign]
        exporter.endpoint = lambda: Endpoint(self.name, {})  # type: ignore[method-assign]
        return exporter

    def _authorize_peer(self, channel_id: str, address: str) -> None:
        if not self.ready:
            raise SourceBusy("not ready yet")


def test_an_unready_transport_is_skipped() -> None:
    """The reader uses the next transport on its list, or is rejected as busy; the unready one is still
    offered.
    """
    network = InMemoryNetwork()
    unready = UnreadyTransport(network, "first")
    with build_seed(unready, InMemoryTransport(network)) as seed:
        opened = [open_channel(seed, 0, "first", "memory")]
        with pytest.raises(SourceBusy, match="not ready yet"):
            open_channel(seed, 0, "first")
        readers, transports = seed.report().readers, seed.report().transports
        unready.ready = True
        opened.append(open_channel(seed, 0, "first", "memory"))
    assert ["memory", "first"] == opened
    assert ("fork-1",) == readers
    assert ("first", "memory") == transports


class PreparingTransport(ConfigurableTransport):
    """Its exporters become ready once `ready_event` is set."""

    def __init__(self, network: InMemoryNetwork, name: str) -> None:
        super().__init__(network, name)
        self.ready_called, self.ready_event = threading.Event(), threading.Event()

    def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
        exporter = super().export(image, gate)
        exporter.ready = self._ready  # type: ignore[method-assign]
        exporter.endpoint = lambda: Endpoint(self.name, {})  # type: ignore[method-assign]
        return exporter

    def _ready(self, deadline: float) -> bool:
        self.ready_called.set()
        return self.ready_event.wait(max(0.0, deadline - time.monotonic()))


def test_a_preferred_transport_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that is almost ready is used although another one is ready."""
    monkeypatch.setattr(seed_module, "EXPORTER_READY_TIMEOUT_S", 60.0)
    network = InMemoryNetwork()
    preparing = PreparingTransport(network, "first")
    with build_seed(preparing, InMemoryTransport(network)) as seed:
        opened: list[str] = []
        opening = threading.Thread(target=lambda: opened.append(open_channel(seed, 0, "first", "memory")))
        opening.start()
        assert preparing.ready_called.wait(60)
        preparing.ready_event.set()
        opening.join()
    assert ["first"] == opened


def test_the_wait_for_a_preferred_transport_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next transport is used; without another one the source is reported as busy."""
    monkeypatch.setattr(seed_module, "EXPORTER_READY_TIMEOUT_S", 0.01)
    network = InMemoryNetwork()
    with build_seed(PreparingTransport(network, "first"), InMemoryTransport(network)) as seed:
        opened = open_channel(seed, 0, "first", "memory")
        with pytest.raises(SourceBusy, match="first is not ready"):
            open_channel(seed, 0, "first")
    assert "memory" == opened


def test_suspending_releases_the_image_even_if_an_exporter_cannot_be_closed() -> None:
    """The error is raised, but the memory is released and resumed weights are served."""
    image, other = image_with(1), image_with(2)
    memory = weakref.ref(image)
    seed = build_seed(UncloseableTransport(InMemoryNetwork(), "memory"), seed_image=image).start()
    del image
    with pytest.raises(OSError, match="busy"):
        seed.suspend()
    seed.suspend()
    gc.collect()
    leaked_image = memory()
    seed.resume(other)
    assert leaked_image is None
    assert serving_summary(1, other) == report_summary(seed)
    with pytest.raises(OSError, match="busy"):
        seed.close()


class UncloseableTransport(ConfigurableTransport):
    """Its exporters raise an error after closing."""

    def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
        exporter = super().export(image, gate)
        close = exporter.close

        def close_and_raise() -> None:
            close()
            raise OSError("busy")

        exporter.close = close_and_raise  # type: ignore[method-assign]
        return exporter


def test_an_exporter_that_cannot_be_closed_does_not_affect_other_exporters() -> None:
    """All exporters are closed before the error is raised."""
    network = InMemoryNetwork()
    exporters = ExporterSet([UncloseableTransport(network, "first"), ConfigurableTransport(network, "second")])
    exporters.open(image_with(1), build_seed())
    with pytest.raises(OSError, match="busy"):
        exporters.close()
    assert {} == network.exports
    assert [] == [*exporters]


def test_an_exporter_that_cannot_be_opened_closes_all_exporters() -> None:
    """An unexpected error (here a port in use) closes the exporters that were already open."""
    network = InMemoryNetwork()

    class UnopenableTransport(ConfigurableTransport):
        def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
            raise OSError("taken")

    exporters = ExporterSet([ConfigurableTransport(network, "first"), UnopenableTransport(network, "second")])
    with pytest.raises(OSError, match="taken"):
        exporters.open(image_with(1), build_seed())
    assert {} == network.exports
    assert [] == [*exporters]
