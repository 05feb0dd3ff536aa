"""What is said about the three Mooncake wheels and the machine under them."""

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
        ("libcudart.so.12: cannot open shared object file", ["mooncake-transfer-engine"], "another CUDA"),
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
            f"{TWELVE} is for CUDA 12, and torch for CUDA 13",
            f"pip uninstall -y {TWELVE}, then pip install 'rfork[mooncake-cuda13]'",
        ),
        (
            LibraryState((THIRTEEN,), cuda=True),
            "12.8",
            f"{THIRTEEN} is for CUDA 13, and torch for CUDA 12",
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
def test_a_wheel_that_does_not_fit(state: LibraryState, torch_cuda: str | None, message: str, hint: str) -> None:
    """It says what to remove and which extra fits the CUDA of torch."""
    with pytest.raises(VersionMismatch) as raised:
        require_cuda(state, torch_cuda)
    assert (message, hint) == (str(raised.value), raised.value.hint)


@pytest.mark.parametrize(
    ("state", "torch_cuda"),
    [
        (LibraryState((TWELVE,), cuda=True), "12.8"),
        (LibraryState((THIRTEEN,), cuda=True), "13.0"),
        (LibraryState((), cuda=True), "13.0"),
    ],
    ids=["12", "13", "built from source"],
)
def test_a_wheel_that_fits(state: LibraryState, torch_cuda: str) -> None:
    """A wheel for torch's CUDA is taken, and one that nobody knows but that has CUDA."""
    require_cuda(state, torch_cuda)


class Native:
    """An engine that keeps what it saw of the variable it goes by: when it was made, when it started."""

    seen: list[tuple[str, str | None, str | None]]
    status = 0

    def __init__(self) -> None:
        self._made_under = os.environ.get("MC_FORCE_TCP")

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        threading.Event().wait(0.001)  # lets the others run
        self.seen.append((protocol, self._made_under, os.environ.get("MC_FORCE_TCP")))
        return self.status


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> type[Native]:
    """The engines that are made in this test."""
    made = type("Made", (Native,), {"seen": []})
    monkeypatch.setattr(module, "library_state", lambda: LibraryState(("a wheel",)))
    engine = SimpleNamespace(TransferEngine=made)
    monkeypatch.setattr(module, "importlib", SimpleNamespace(import_module=lambda name: engine))
    return made


@pytest.mark.parametrize("before", [None, "1"])
def test_two_wires_in_one_process(monkeypatch: pytest.MonkeyPatch, native: type[Native], before: str | None) -> None:
    """Engines that start at once each see their own setting; what the user has set is there afterwards."""
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
    assert (expected, before) == (sorted(native.seen, key=str), os.environ.get("MC_FORCE_TCP"))


@pytest.mark.parametrize(("wire_protocol", "error"), [("rdma", DeviceDown), ("tcp", TransportUnavailable)])
def test_an_engine_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
    native: type[Native],
    wire_protocol: WireProtocol,
    error: type[TransportUnavailable],
) -> None:
    """The next transport is taken, and the setting is put back."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(native, "status", -1)
    with pytest.raises(error, match=f"could not start over {wire_protocol} at 10.0.0.1"):
        start_engine(wire_protocol, "10.0.0.1", "")
    assert None is os.environ.get("MC_FORCE_TCP")
