"""The transport table: selection, order and error messages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rfork.errors import SettingsError
from rfork.image.memory import Image
from rfork.settings import InstanceSettings, TransportName
from rfork.transport.base import AccessGate, Availability, Endpoint, Exporter, Reader, TokenSource
from rfork.transport.selection import TransportRegistry, TransportStatus, explain_selection, select_transports


@dataclass(frozen=True)
class FakeTransport:
    """A transport with only an availability."""

    name: str
    usable: bool
    one_sided: bool = False
    connect_timeout_s: float = 0.0

    def availability(self) -> Availability:
        return Availability(self.usable, "present" if self.usable else "missing", "" if self.usable else "install it")

    def export(self, image: Image, gate: AccessGate) -> Exporter:
        raise NotImplementedError

    def connect(self, endpoint: Endpoint, image: Image, token: TokenSource, deadline: float) -> Reader:
        raise NotImplementedError


def build_registry(**usable: bool) -> TransportRegistry:
    """Return a table of transports with the given availability."""
    return {
        name: lambda settings, name=name, is_usable=is_usable: FakeTransport(name, is_usable)  # type: ignore[misc]
        for name, is_usable in usable.items()
    }


@pytest.mark.parametrize(
    ("usable", "requested", "expected"),
    [
        ({"transfer_engine": True, "http": True}, None, ["transfer_engine", "http"]),
        ({"transfer_engine": False, "http": True}, None, ["http"]),
        ({"transfer_engine": True, "http": True}, ("http", "transfer_engine"), ["http", "transfer_engine"]),
        ({"transfer_engine": True, "http": True}, ("http",), ["http"]),
    ],
)
def test_transports_are_ordered_best_first(
    usable: dict[str, bool], requested: tuple[TransportName, ...] | None, expected: list[str]
) -> None:
    """All available transports, best first; or exactly the requested ones, in that order."""
    selected = select_transports(InstanceSettings(transports=requested), build_registry(**usable))
    assert expected == [transport.name for transport in selected]


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (("transfer_engine",), "transfer_engine is not available on this machine: missing"),
        (("http", "http"), "duplicate transport"),
        ((), "names no transport"),
    ],
)
def test_invalid_requests_are_rejected(requested: tuple[TransportName, ...], message: str) -> None:
    """A requested transport is used or rejected, never silently replaced."""
    with pytest.raises(SettingsError, match=message):
        select_transports(InstanceSettings(transports=requested), build_registry(transfer_engine=False, http=True))


def test_an_unknown_transport_is_rejected() -> None:
    """The error lists the known transports."""
    with pytest.raises(SettingsError, match="unknown transport 'http'"):
        select_transports(InstanceSettings(transports=("http",)), build_registry(transfer_engine=True))


def test_no_available_transport_is_an_error() -> None:
    """If no transport is available, selection raises SettingsError."""
    with pytest.raises(SettingsError, match="no transport is available"):
        select_transports(InstanceSettings(), build_registry(transfer_engine=False, http=False))


def test_plain_tcp_is_opt_in() -> None:
    """Without RDMA and RFORK_ALLOW_UNAUTHENTICATED_TCP, the last default transport is http."""
    assert "http" == select_transports(InstanceSettings())[-1].name


def test_explain_matches_select() -> None:
    """Used transports come first with their rank, then the others with the reason."""
    rows = explain_selection(InstanceSettings(), build_registry(transfer_engine=False, http=True))
    assert [
        TransportStatus("http", True, 1, "present"),
        TransportStatus("transfer_engine", False, None, "missing", "install it"),
    ] == rows


def test_explain_lists_transports_that_were_not_requested() -> None:
    """A transport that the settings omit is listed as unused."""
    rows = explain_selection(InstanceSettings(transports=("http",)), build_registry(transfer_engine=True, http=True))
    assert [("http", True), ("transfer_engine", False)] == [(row.name, row.used) for row in rows]
