"""Availability of nixl on machines with and without RDMA, on simulated sysfs trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.settings import InstanceSettings
from rfork.transport.nixl import NixlTransport, transport
from rfork.transport.nixl.library import NixlLibrary, compatible


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL can be imported."""
    monkeypatch.setattr(transport, "library_state", lambda: NixlLibrary("1.5.1", ("nixl",)))


def add_device(root: Path, state: str = "4: ACTIVE") -> None:
    """Add an RDMA device to a sysfs tree."""
    port = root / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "state").write_text(state)
    (port / "gids" / "0").write_text("fe80:0000:0000:0000:0000:0000:0000:0001")


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the hint that installs it."""
    monkeypatch.setattr(transport, "library_state", lambda: NixlLibrary(error="is missing", hint="pip install it"))
    available = NixlTransport(InstanceSettings(), tmp_path).availability()
    assert not available.usable
    assert "pip install it" == available.hint


def test_plain_tcp_must_be_allowed(tmp_path: Path) -> None:
    """Without RDMA it depends on RFORK_ALLOW_UNAUTHENTICATED_TCP."""
    assert not NixlTransport(InstanceSettings(), tmp_path).availability().usable
    assert NixlTransport(InstanceSettings(allow_unauthenticated_tcp=True), tmp_path).availability().usable


def test_an_active_rdma_device_is_used(tmp_path: Path) -> None:
    """Without any setting."""
    add_device(tmp_path)
    available = NixlTransport(InstanceSettings(), tmp_path).availability()
    assert available.usable
    assert "mlx5_0" in available.reason


def test_a_configured_device_that_is_down_is_reported(tmp_path: Path) -> None:
    """Even if TCP is allowed: the user wants RDMA."""
    add_device(tmp_path, state="1: DOWN")
    settings = InstanceSettings(allow_unauthenticated_tcp=True, rdma_devices="mlx5_0")
    available = NixlTransport(settings, tmp_path).availability()
    assert not available.usable
    assert "DOWN" in available.reason


def test_another_backend_decides_for_itself(tmp_path: Path) -> None:
    """LIBFABRIC has its own devices."""
    available = NixlTransport(InstanceSettings(nixl_backend="LIBFABRIC"), tmp_path).availability()
    assert available.usable
    assert "LIBFABRIC" in available.reason


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("1.5.1", "1.5.0", True), ("1.5.1", "1.6.0", False), ("", "", False), ("1.5", "1.5.1", True)],
)
def test_releases_with_the_same_minor_number_are_compatible(one: str, other: str, expected: bool) -> None:
    """NIXL's metadata has no version."""
    assert expected == compatible(one, other)
