"""The checks of `rfork doctor`, each with literal inputs."""

from __future__ import annotations

import resource
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rfork.diagnostics.machine import (
    Gpus,
    check_cuda,
    check_locked_memory,
    check_python,
    check_shared_memory,
    probe_gpus,
)
from rfork.diagnostics.network import check_clock, check_planner, check_tls, check_token
from rfork.diagnostics.rdma import check_device, check_gpu_direct, check_mooncake, check_rdma
from rfork.diagnostics.result import Status
from rfork.diagnostics.same_host import (
    check_cuda_ipc,
    check_sealed_memory,
    check_unix_sockets,
    shmem_huge_pages,
)
from rfork.diagnostics.transports import check_collectives, check_digest, check_nixl, has_compiler
from rfork.settings import InstanceSettings
from rfork.transport.mooncake.library import LibraryState
from rfork.transport.mooncake.topology import RdmaDevice, pci_location, rdma_devices
from rfork.transport.nixl.library import NixlLibrary
from tests.unit.fake_sysfs import Nic, build_sysfs, hgx_sysfs

WHEEL, CUDA_WHEEL = "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"
PLANNER = InstanceSettings(planner="http://planner.test")


def write_certificate(folder: Path, days: float) -> tuple[Path, Path]:
    """Write a self-signed certificate that expires in `days` and its key; return both paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rfork.test")])
    end = datetime.now(timezone.utc) + timedelta(days=days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(end - timedelta(days=100))
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


@pytest.mark.parametrize(
    ("days", "status", "message"),
    [(90.5, "ok", "in 90 days"), (3.5, "warn", "in 3 days"), (-1, "fail", "expired")],
)
def test_a_certificate_that_expires_soon_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, status: Status, message: str
) -> None:
    """An expired certificate is a failure; one that expires later passes."""
    certificate, key = write_certificate(tmp_path, days)
    monkeypatch.setenv("RFORK_TLS_CERTIFICATE", str(certificate))
    monkeypatch.setenv("RFORK_TLS_KEY", str(key))
    check = check_tls(InstanceSettings())
    assert status == check.status
    assert message in check.detail


def test_a_key_of_another_certificate_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate and a key that do not match fail the check."""
    monkeypatch.setenv("RFORK_TLS_CERTIFICATE", str(write_certificate(tmp_path / "one", 90)[0]))
    monkeypatch.setenv("RFORK_TLS_KEY", str(write_certificate(tmp_path / "other", 90)[1]))
    assert "fail" == check_tls(InstanceSettings()).status


def test_a_missing_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing CA file fails the check, which names the file."""
    monkeypatch.setenv("RFORK_TLS_CA", str(tmp_path / "none.pem"))
    check = check_tls(InstanceSettings())
    assert "fail" == check.status
    assert "none.pem" in check.detail


@pytest.mark.parametrize(("bind", "status"), [("127.0.0.1", "off"), ("0.0.0.0", "warn")])
def test_missing_tls_is_a_warning_only_off_loopback(bind: str, status: Status) -> None:
    """Without TLS, only an address that other hosts can reach causes a warning."""
    assert status == check_tls(InstanceSettings(bind=bind)).status


@pytest.mark.parametrize(
    ("state", "cuda", "status"),
    [
        (LibraryState((WHEEL,)), False, "ok"),
        (LibraryState((WHEEL,)), True, "warn"),
        (LibraryState((), "No module named 'mooncake'", "pip"), False, "off"),
        (LibraryState((WHEEL,), "libibverbs.so.1: cannot open", "apt"), False, "fail"),
    ],
    ids=["fits", "no CUDA in the wheel", "absent", "broken"],
)
def test_only_a_broken_mooncake_wheel_is_a_failure(state: LibraryState, cuda: bool, status: Status) -> None:
    """A missing wheel is no failure, a broken one is, and one without CUDA is a warning on a GPU machine."""
    assert status == check_mooncake(state, cuda=cuda).status


NIC, DOWN = RdmaDevice("mlx5_0"), RdmaDevice("mlx5_1", state="DOWN")


@pytest.mark.parametrize(
    ("devices", "requested_devices", "status", "message"),
    [
        ([], "", "skip", "no RDMA device"),
        ([NIC, DOWN], "", "ok", "mlx5_0"),
        ([NIC, DOWN], "mlx5_0", "ok", "mlx5_0 (RFORK_RDMA_DEVICES)"),
        ([NIC, DOWN], "mlx5_1", "fail", "mlx5_1: its port is DOWN"),
        ([NIC], "mlx5_9", "fail", "no RDMA device mlx5_9 (found: mlx5_0)"),
        ([DOWN], "", "fail", "mlx5_1: its port is DOWN"),
        ([], "mlx5_0", "fail", "(found: none)"),
    ],
)
def test_requested_rdma_devices_must_work(
    devices: list[RdmaDevice], requested_devices: str, status: Status, message: str
) -> None:
    """Requested devices must exist and work; without a request one working device is enough."""
    check = check_rdma(devices, requested_devices)
    assert status == check.status
    assert message in check.detail


def test_each_rdma_device_is_shown_with_its_nearest_gpu(tmp_path: Path) -> None:
    """The result shows state, link layer, rate, and the GPU below the same switch."""
    sysfs = hgx_sysfs(tmp_path)
    gpus = {f"cuda:{index}": pci_location(f"0000:{0x13 + 0x10 * index:02x}:00.0", sysfs) for index in range(8)}
    checks = [check_device(device, gpus) for device in rdma_devices(sysfs)]
    assert [
        (f"rdma mlx5_{at}", "ok", f"ACTIVE, InfiniBand, 400 Gb/sec (4X NDR); nearest to cuda:{7 - at}")
        for at in range(8)
    ] == [(check.name, check.status, check.detail) for check in checks]


@pytest.mark.parametrize(
    ("nic", "message", "fix"),
    [
        (Nic("pci0000:00/0000:00:06.0", state="1: DOWN"), "port is down: DOWN", "cable"),
        (
            Nic("pci0000:00/0000:00:06.0", link_layer="Ethernet", gids=("0000:0000",)),
            "no address (GID): ACTIVE, Ethernet",
            "IP address",
        ),
    ],
)
def test_an_unusable_rdma_device_is_a_warning(tmp_path: Path, nic: Nic, message: str, fix: str) -> None:
    """The result names the problem of the port and the fix."""
    (device,) = rdma_devices(build_sysfs(tmp_path, [], {"mlx5_0": nic}))
    check = check_device(device, {})
    assert "warn" == check.status
    assert message in check.detail
    assert fix in check.fix


@pytest.mark.parametrize(
    ("peer_module", "dma_buf", "needed", "status"),
    [
        (True, False, True, "ok"),
        (False, True, True, "ok"),
        (False, False, True, "fail"),
        (False, False, False, "skip"),
    ],
)
def test_gpu_direct_is_required_only_with_gpus_and_network_cards(
    peer_module: bool, dma_buf: bool, needed: bool, status: Status
) -> None:
    """Without either, nothing needs direct access to GPU memory and the check is skipped."""
    assert status == check_gpu_direct(peer_module, dma_buf, needed=needed).status


@pytest.mark.parametrize(
    ("torch_cuda", "status", "fix"),
    [("12.8", "ok", ""), ("13.0", "warn", "rfork[mooncake-cuda13]")],
)
def test_the_mooncake_wheel_must_fit_torch(torch_cuda: str, status: Status, fix: str) -> None:
    """A wheel for another CUDA version than torch's is a warning that names the right extra."""
    check = check_mooncake(LibraryState((CUDA_WHEEL,), cuda=True), cuda=True, torch_cuda=torch_cuda)
    assert status == check.status
    assert fix in check.fix


def test_two_mooncake_wheels_are_a_failure() -> None:
    """The wheels overwrite each other, so the check fails even if the import works."""
    state = LibraryState((WHEEL, CUDA_WHEEL), "both installed", "pip uninstall -y both", cuda=True)
    check = check_mooncake(state, cuda=True, torch_cuda="12.8")
    assert "fail" == check.status
    assert "pip uninstall -y both" == check.fix


@pytest.mark.parametrize(
    ("gpus", "unconnected_pairs", "status", "message"),
    [
        ([], [], "skip", "no CUDA device in use (IPC namespace 42)"),
        ([0], [], "ok", "one visible GPU"),
        ([0, 1, 2], [], "ok", "3 GPUs, all with peer access"),
        ([0, 1, 2], [(0, 2), (2, 0)], "warn", "no peer access between 0-2"),
    ],
)
def test_gpus_without_peer_access_are_a_warning(
    gpus: list[int], unconnected_pairs: list[tuple[int, int]], status: Status, message: str
) -> None:
    """The result shows the number of GPUs and the pairs without peer access."""
    check = check_cuda_ipc("42", gpus, lambda one, other: (one, other) not in unconnected_pairs)
    assert status == check.status
    assert message in check.detail


def test_a_configured_socket_folder_must_exist(tmp_path: Path) -> None:
    """A configured folder must exist; without one only the network namespace matters."""
    missing = check_unix_sockets(tmp_path / "none", "7")
    assert "ok" == check_unix_sockets(None, "7").status
    assert "ok" == check_unix_sockets(tmp_path, "7").status
    assert "fail" == missing.status
    assert "RFORK_UNIX_SOCKET_DIR" in missing.fix


def test_an_inaccessible_socket_folder_is_a_failure(tmp_path: Path) -> None:
    """The operating system's error is reported, not raised."""
    check = check_unix_sockets(tmp_path / ("x" * 300), "7")
    assert "fail" == check.status
    assert "File name too long" in check.detail
    assert "RFORK_UNIX_SOCKET_DIR" in check.fix


def test_unknown_peer_access_is_a_warning() -> None:
    """The result contains CUDA's error."""

    def has_access(one: int, other: int) -> bool:
        raise RuntimeError("CUDA error:\nunknown error")

    check = check_cuda_ipc("42", [0, 1], has_access)
    assert "warn" == check.status
    assert "CUDA error: unknown error" in check.detail


def test_gpus_without_working_cuda_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may list GPUs although CUDA does not start; no GPU is usable then."""

    def get_device_name(device: torch.device) -> str:
        raise RuntimeError("CUDA error:\nsystem not yet initialized")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", get_device_name)
    found = probe_gpus()
    check = check_cuda([gpu.name for gpu in found.gpus], found.error)
    assert () == found.gpus
    assert "fail" == check.status
    assert "system not yet initialized" in check.detail
    assert check.fix


def test_a_machine_without_gpus_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs the list is empty and there is no error."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert Gpus() == probe_gpus()


@pytest.mark.parametrize(
    ("text", "mode", "has_fix"),
    [
        ("always within_size [advise] never deny force\n", "advise", False),
        ("always within_size advise [never] deny force\n", "never", True),
        (None, "", True),
    ],
)
def test_small_pages_of_shared_memory_are_no_failure(
    tmp_path: Path, text: str | None, mode: str, has_fix: bool
) -> None:
    """Small pages are no failure, but the result suggests huge pages."""
    if text is not None:
        folder = tmp_path / "kernel" / "mm" / "transparent_hugepage"
        folder.mkdir(parents=True)
        (folder / "shmem_enabled").write_text(text)
    check = check_sealed_memory(True, shmem_huge_pages(tmp_path))
    assert mode == shmem_huge_pages(tmp_path)
    assert "ok" == check.status
    assert has_fix == bool(check.fix)


@pytest.mark.parametrize(
    ("available", "requested", "status"),
    [
        (["gloo"], [], "off"),
        (["gloo"], ["http"], "off"),
        (["gloo"], ["gloo"], "warn"),
        (["gloo"], ["nccl"], "fail"),
        ([], ["gloo"], "fail"),
    ],
)
def test_collectives_are_used_only_if_requested(available: list[str], requested: list[str], status: Status) -> None:
    """A requested nccl or gloo must be available."""
    assert status == check_collectives(available, requested).status


@pytest.mark.parametrize(
    ("state", "requested", "status"),
    [
        (NixlLibrary(error="is not installed"), [], "off"),
        (NixlLibrary(error="is not installed"), ["nixl"], "fail"),
        (NixlLibrary("1.5.1", ("nixl",), error="libcuda.so.1 is missing"), [], "fail"),
        (NixlLibrary("1.5.1", ("nixl",)), ["http"], "off"),
        (NixlLibrary("1.5.1", ("nixl",)), ["nixl", "http"], "warn"),
    ],
)
def test_nixl_is_used_only_if_requested(state: NixlLibrary, requested: list[str], status: Status) -> None:
    """A requested nixl must be installed, and trusts its sources."""
    assert status == check_nixl(state, requested).status


@pytest.mark.parametrize(
    ("cuda", "triton", "compiler", "status", "fix"),
    [
        (False, False, False, "ok", ""),
        (False, True, False, "ok", ""),
        (True, True, True, "ok", ""),
        (True, False, True, "warn", "pip install triton"),
        (True, True, False, "warn", "gcc"),
        (True, False, False, "warn", "gcc"),
    ],
)
def test_slow_digests_on_a_gpu_are_a_warning(
    cuda: bool, triton: bool, compiler: bool, status: Status, fix: str
) -> None:
    """GPU digests are slow without Triton, or without the C compiler that it needs."""
    check = check_digest(cuda, triton, compiler=compiler)
    assert status == check.status
    assert fix in check.fix


@pytest.mark.parametrize(("name", "expected"), [("gcc", True), ("clang", True), ("cl", False)])
def test_only_compilers_that_triton_searches_for_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: bool
) -> None:
    """Triton does not search for other compilers."""
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert expected == has_compiler()


@pytest.mark.parametrize(
    ("limit", "rdma", "status"),
    [(8 << 20, True, "warn"), (8 << 20, False, "skip"), (resource.RLIM_INFINITY, True, "ok")],
)
def test_the_locked_memory_limit_matters_only_for_rdma(limit: int, rdma: bool, status: Status) -> None:
    """RDMA pins memory; nothing else does."""
    assert status == check_locked_memory(limit, rdma=rdma).status


def test_python_must_be_3_10_or_newer() -> None:
    """An older Python fails the check."""
    assert "ok" == check_python(("3", "10", "13"), "2.13.0").status
    assert "fail" == check_python(("3", "9", "1"), "2.13.0").status


def test_cuda_is_optional() -> None:
    """Without a GPU the check is skipped."""
    assert "skip" == check_cuda([]).status
    assert "ok" == check_cuda(["NVIDIA H200"]).status


def test_too_little_shared_memory_is_a_warning() -> None:
    """Engines share memory between their processes in /dev/shm."""
    assert "warn" == check_shared_memory(None).status
    assert "warn" == check_shared_memory(1 << 20).status
    assert "ok" == check_shared_memory(1 << 30).status


@pytest.mark.parametrize(
    ("status", "token_sent", "expected"),
    [(200, True, "ok"), (200, False, "ok"), (401, False, "fail"), (403, True, "fail"), (500, True, "warn")],
)
def test_a_rejected_token_is_a_failure(status: int, token_sent: bool, expected: Status) -> None:
    """An error of the planner is only a warning."""
    assert expected == check_token(status, token_sent=token_sent).status


@pytest.mark.parametrize(
    ("date", "offset", "status"),
    [
        ("Thu, 01 Jan 1970 00:16:40 GMT", 0.9, "ok"),
        ("Thu, 01 Jan 1970 00:16:40 GMT", 60, "warn"),
        ("Thu, 01 Jan 1970 00:16:40 GMT", -60, "warn"),
        (None, 0, "skip"),
        ("yesterday", 0, "skip"),
    ],
)
def test_a_clock_skew_of_more_than_five_seconds_is_a_warning(date: str | None, offset: float, status: Status) -> None:
    """Without a valid Date header, the check is skipped."""
    assert status == check_clock(date, 1000 + offset).status


def test_a_reachable_planner_passes() -> None:
    """The planner is reachable, the token accepted and the clock unknown."""
    planner_transport = httpx.MockTransport(lambda request: httpx.Response(200, json={}))
    assert [("planner", "ok"), ("token", "ok"), ("clock", "skip")] == [
        (check.name, check.status) for check in check_planner(PLANNER, planner_transport)
    ]


def test_an_unreachable_planner_is_one_failure() -> None:
    """The only result names the URL and the reason."""

    def refuse_connection(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    (check,) = check_planner(PLANNER, httpx.MockTransport(refuse_connection))
    assert "fail" == check.status
    assert "http://planner.test is unreachable: Connection refused" == check.detail


def test_a_missing_planner_is_a_warning() -> None:
    """Without a planner every fork falls back."""
    assert ["warn"] == [check.status for check in check_planner(InstanceSettings())]
