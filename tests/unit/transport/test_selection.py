"""The transport table: what is chosen, in which order, and how refusals read."""

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
    """A transport that only says whether it can run."""

    name: str
    usable: bool
    one_sided: bool = False

    def availability(self) -> Availability:
        return Availability(self.usable, "has it" if self.usable else "lacks it", "" if self.usable else "buy it")

    def export(self, image: Image, gate: AccessGate) -> Exporter:
        raise NotImplementedError

    def connect(self, endpoint: Endpoint, image: Image, token: TokenSource, deadline: float) -> Reader:
        raise NotImplementedError


def build_registry(**usable: bool) -> TransportRegistry:
    """A table of transports by whether each can run."""
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
def test_best_first(usable: dict[str, bool], requested: tuple[TransportName, ...] | None, expected: list[str]) -> None:
    """All that can run, fastest first; or exactly what was asked for, in that order."""
    selected = select_transports(InstanceSettings(transports=requested), build_registry(**usable))
    assert expected == [transport.name for transport in selected]


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (("transfer_engine",), "transfer_engine cannot be used here: lacks it"),
        (("http", "http"), "names one twice"),
        ((), "names no transport"),
    ],
)
def test_what_cannot_be_is_refused(requested: tuple[TransportName, ...], message: str) -> None:
    """A transport asked for is used or refused, never replaced in silence."""
    with pytest.raises(SettingsError, match=message):
        select_transports(InstanceSettings(transports=requested), build_registry(transfer_engine=False, http=True))


def test_a_transport_outside_the_table_is_refused() -> None:
    """A name that the table does not have is an error that lists those it has."""
    with pytest.raises(SettingsError, match="no transport 'http'"):
        select_transports(InstanceSettings(transports=("http",)), build_registry(transfer_engine=True))


def test_no_transport_at_all_is_an_error() -> None:
    """Where nothing can run, that is said."""
    with pytest.raises(SettingsError, match="no transport can run here"):
        select_transports(InstanceSettings(), build_registry(transfer_engine=False, http=False))


def test_plain_tcp_is_off_unless_asked_for() -> None:
    """On any machine, the default choice without RDMA or unguarded_tcp leaves http as the last resort."""
    assert "http" == select_transports(InstanceSettings())[-1].name


def test_explain_says_what_choose_does() -> None:
    """Rows in use come first with their place, then the others with the reason."""
    rows = explain_selection(InstanceSettings(), build_registry(transfer_engine=False, http=True))
    assert [
        TransportStatus("http", True, 1, "has it"),
        TransportStatus("transfer_engine", False, None, "lacks it", "buy it"),
    ] == rows


def test_explain_names_what_was_not_asked_for() -> None:
    """A transport that settings leave out is listed as such."""
    rows = explain_selection(InstanceSettings(transports=("http",)), build_registry(transfer_engine=True, http=True))
    assert [("http", True), ("transfer_engine", False)] == [(row.name, row.used) for row in rows]
