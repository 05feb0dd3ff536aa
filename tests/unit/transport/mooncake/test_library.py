"""Hints about the three Mooncake wheels and their system libraries."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from rfork.errors import DeviceDown, TransportUnavailable, VersionMismatch
from rfork.transport.mooncake import library as module
from rfork.transport.mooncake.library import (
    WHEELS,
    LibraryState,
    WireProtocol,
    import_hint,
    require_cuda,
    start_engine,
)

NON_CUDA = ["mooncake-transfer-engine-non-cuda"]


@pytest.mark.parametrize(
    ("error", "wheels", "expected"),
    [
        ("No module named 'mooncake'", [], "rfork[mooncake]"),
        ("libibverbs.so.1: cannot open shared object file", NON_CUDA, "apt-get install libibverbs1"),
        ("libnuma.so.1: cannot open shared object file", NON_CUDA, "apt-get install libnuma1"),
        ("libcudart.so.12: cannot open shared object file", ["mooncake-transfer-engine"], "a different CUDA version"),
        ("undefined symbol: x", NON_CUDA, "reinstall the wheel: mooncake-transfer-engine-non-cuda"),
    ],
)
def test_import_errors_name_what_to_install(error: str, wheels: list[str], expected: str) -> None:
    """The hint names the extra, the Debian package or the wrong wheel."""
    assert expected in import_hint(error, wheels)


def test_every_wheel_has_its_extra() -> None:
    """The three wheels map to the three extras."""
    assert ["mooncake", "mooncake-cuda12", "mooncake-cuda13"] == sorted(WHEELS.values())


NONE, TWELVE, THIRTEEN = "mooncake-transfer-engine-non-cuda", *sorted(set(WHEELS) - set(NON_CUDA))


@pytest.mark.parametrize(
    ("state", "torch_cuda", "message", "hint"),
    [
        (
            LibraryState((NONE,)),
            "12.8",
            f"{NONE} cannot read GPU memory",
            f"pip uninstall -y {NONE}, then pip install 'rfork[mooncake-cuda12]'",
        ),
        (
            LibraryState((NONE,)),
            "13.0",
            f"{NONE} cannot read GPU memory",
            f"pip uninstall -y {NONE}, then pip install 'rfork[mooncake-cuda13]'",
        ),
        (
            LibraryState((TWELVE,), cuda=True),
            "13.0",
            f"{TWELVE} is built for CUDA 12, but torch for CUDA 13",
            f"pip uninstall -y {TWELVE}, then pip install 'rfork[mooncake-cuda13]'",
        ),
        (
            LibraryState((THIRTEEN,), cuda=True),
            "12.8",
            f"{THIRTEEN} is built for CUDA 13, but torch for CUDA 12",
            f"pip uninstall -y {THIRTEEN}, then pip install 'rfork[mooncake-cuda12]'",
        ),
        (
            LibraryState((NONE,)),
            None,
            f"{NONE} cannot read GPU memory",
            f"pip uninstall -y {NONE}, then pip install 'rfork[mooncake-cuda12]' or 'rfork[mooncake-cuda13]'",
        ),
    ],
)
def test_a_wheel_for_another_cuda_version_is_rejected(
    state: LibraryState, torch_cuda: str | None, message: str, hint: str
) -> None:
    """The hint names the wheel to remove and the extra for torch's CUDA version."""
    with pytest.raises(VersionMismatch) as raised:
        require_cuda(state, torch_cuda)
    assert message == str(raised.value)
    assert hint == raised.value.hint


@pytest.mark.parametrize(
    ("state", "torch_cuda"),
    [
        (LibraryState((TWELVE,), cuda=True), "12.8"),
        (LibraryState((THIRTEEN,), cuda=True), "13.0"),
        (LibraryState((), cuda=True), "13.0"),
    ],
    ids=["12", "13", "built from source"],
)
def test_a_wheel_for_the_same_cuda_version_is_accepted(state: LibraryState, torch_cuda: str) -> None:
    """So is an unknown build with CUDA support."""
    require_cuda(state, torch_cuda)


class Native:
    """An engine that records MC_FORCE_TCP when it is created and when it is initialized."""

    records: list[tuple[str, str | None, str | None]]
    status = 0

    def __init__(self) -> None:
        self._at_creation = os.environ.get("MC_FORCE_TCP")

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        threading.Event().wait(0.001)  # lets other threads run
        self.records.append((protocol, self._at_creation, os.environ.get("MC_FORCE_TCP")))
        return self.status


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> type[Native]:
    """The engines created in the test."""
    engine_class = type("Made", (Native,), {"records": []})
    monkeypatch.setattr(module, "library_state", lambda: LibraryState(("a wheel",)))
    engine = SimpleNamespace(TransferEngine=engine_class)
    monkeypatch.setattr(module, "importlib", SimpleNamespace(import_module=lambda name: engine))
    return engine_class


@pytest.mark.parametrize("before", [None, "1"])
def test_engines_of_both_protocols_start_concurrently(
    monkeypatch: pytest.MonkeyPatch, native: type[Native], before: str | None
) -> None:
    """Each engine sees the variable for its own protocol; afterwards the user's value is restored."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    if before is not None:
        monkeypatch.setenv("MC_FORCE_TCP", before)
    protocols: list[WireProtocol] = ["tcp", "rdma"] * 20
    threads = [
        threading.Thread(target=start_engine, args=(wire_protocol, "127.0.0.1", "")) for wire_protocol in protocols
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [("rdma", None, None)] * 20 + [("tcp", "1", "1")] * 20
    assert expected == sorted(native.records, key=str)
    assert before == os.environ.get("MC_FORCE_TCP")


@pytest.mark.parametrize(("wire_protocol", "error"), [("rdma", DeviceDown), ("tcp", TransportUnavailable)])
def test_an_engine_that_does_not_start_raises(
    monkeypatch: pytest.MonkeyPatch,
    native: type[Native],
    wire_protocol: WireProtocol,
    error: type[TransportUnavailable],
) -> None:
    """The error makes the transport unavailable, and the variable is restored."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(native, "status", -1)
    with pytest.raises(error, match=f"could not start over {wire_protocol} at 10.0.0.1"):
        start_engine(wire_protocol, "10.0.0.1", "")
    assert None is os.environ.get("MC_FORCE_TCP")
