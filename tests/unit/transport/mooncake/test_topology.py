"""RDMA devices, those nearest to a GPU, and GPUDirect RDMA, on simulated /proc and /sys trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rfork.cuda.library import DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, DriverError
from rfork.errors import DeviceDown, GpuDirectUnavailable
from rfork.transport.mooncake import topology
from rfork.transport.mooncake.topology import (
    PciLocation,
    gpu_direct,
    has_dma_buf,
    has_open_modules,
    has_peer_module,
    pci_location,
    rdma_devices,
    select_devices,
)
from tests.unit.fake_sysfs import (
    GID,
    NO_GID,
    Nic,
    build_sysfs,
    hgx_sysfs,
    two_socket_sysfs,
    virtual_machine_sysfs,
)


def selected_names(sysfs: Path, requested_devices: str = "", *gpus: str) -> list[str]:
    locations = [pci_location(gpu, sysfs) for gpu in gpus]
    return [device.name for device in select_devices(rdma_devices(sysfs), requested_devices, locations)]


@pytest.mark.parametrize(
    ("machine", "gpus", "expected"),
    [
        (hgx_sysfs, ["0000:13:00.0"], ["mlx5_7"]),
        (hgx_sysfs, ["0000:83:00.0"], ["mlx5_0"]),
        (hgx_sysfs, ["0000:13:00.0", "0000:83:00.0"], ["mlx5_0", "mlx5_7"]),
        (hgx_sysfs, [], [f"mlx5_{index}" for index in range(8)]),
        (two_socket_sysfs, ["0000:18:00.0"], ["mlx5_0", "mlx5_1"]),
        (two_socket_sysfs, ["0000:98:00.0"], ["mlx5_2"]),
        (virtual_machine_sysfs, ["0000:00:05.0"], ["mlx5_0"]),
        (two_socket_sysfs, ["0000:ff:00.0"], ["mlx5_0", "mlx5_1", "mlx5_2"]),
    ],
    ids=[
        "HGX, first GPU",
        "HGX, last GPU",
        "HGX, two GPUs in one image",
        "HGX, host memory",
        "two sockets, first",
        "two sockets, second",
        "virtual machine",
        "a GPU unknown to sysfs",
    ],
)
def test_the_nearest_devices_are_used(
    tmp_path: Path, machine: Callable[[Path], Path], gpus: list[str], expected: list[str]
) -> None:
    """Devices under the GPU's own switch, otherwise of its NUMA node, otherwise all; host memory uses all."""
    assert expected == selected_names(machine(tmp_path), "", *gpus)


def test_a_device_that_is_down_is_skipped(tmp_path: Path) -> None:
    """If the cards of the GPU's own socket have no link, the other socket's card is used."""
    sysfs = two_socket_sysfs(tmp_path)
    for name in ("mlx5_0", "mlx5_1"):
        (sysfs / "class" / "infiniband" / name / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert ["mlx5_2"] == selected_names(sysfs, "", "0000:18:00.0")


def test_requested_devices_are_used(tmp_path: Path) -> None:
    """They are used regardless of distance, in the requested order."""
    assert ["mlx5_7", "mlx5_0"] == selected_names(hgx_sysfs(tmp_path), "mlx5_7, mlx5_0", "0000:13:00.0")


@pytest.mark.parametrize(
    ("nics", "requested_devices", "message"),
    [
        ({}, "", "no RDMA device found"),
        ({}, "mlx5_0", "no RDMA device mlx5_0 (found: none)"),
        (
            {"mlx5_0": Nic("pci0000:00/0000:00:06.0")},
            "mlx5_1",
            "no RDMA device mlx5_1 (found: mlx5_0)",
        ),
        (
            {
                "mlx5_0": Nic("pci0000:00/0000:00:06.0", state="1: DOWN"),
                "mlx5_1": Nic("pci0000:00/0000:00:07.0", state="2: INIT"),
            },
            "",
            "mlx5_0: its port is DOWN; mlx5_1: its port is INIT",
        ),
        (
            {
                "mlx5_0": Nic("pci0000:00/0000:00:06.0", state="1: DOWN"),
                "mlx5_1": Nic("pci0000:00/0000:00:07.0"),
            },
            "mlx5_0,mlx5_1",
            "mlx5_0: its port is DOWN",
        ),
        (
            {"mlx5_0": Nic("pci0000:00/0000:00:06.0", link_layer="Ethernet", gids=(NO_GID, NO_GID))},
            "",
            "mlx5_0: its port has no address (GID)",
        ),
    ],
    ids=[
        "none",
        "none, one requested",
        "another requested",
        "all down",
        "a requested one down",
        "RoCE, no address",
    ],
)
def test_an_unusable_device_is_named_with_the_reason(
    tmp_path: Path, nics: dict[str, Nic], requested_devices: str, message: str
) -> None:
    """DeviceDown makes the transport unavailable."""
    with pytest.raises(DeviceDown) as raised:
        selected_names(build_sysfs(tmp_path, [], nics), requested_devices)
    assert message == str(raised.value)
    assert raised.value.hint


def test_a_roce_port_with_an_address_is_usable(tmp_path: Path) -> None:
    """RoCE is equivalent to InfiniBand once its port has an address."""
    gids = (NO_GID, "0000:0000:0000:0000:0000:ffff:0a00:0001")
    nic = Nic("pci0000:00/0000:00:06.0", 1, link_layer="Ethernet", gids=gids)
    (device,) = rdma_devices(build_sysfs(tmp_path, [], {"mlx5_0": nic}))
    assert "Ethernet" == device.link_layer
    assert "" == device.fault
    assert "400 Gb/sec (4X NDR)" == device.rate
    assert PciLocation(("pci0000:00", "0000:00:06.0"), 1) == device.pci_location


def test_a_machine_without_devices_has_an_empty_topology(tmp_path: Path) -> None:
    """A missing directory means no devices, and an unknown card has an empty location."""
    assert () == rdma_devices(tmp_path)
    assert PciLocation() == pci_location("0000:18:00.0", tmp_path)


@pytest.mark.parametrize(
    ("gids", "state", "reads"),
    [
        ((GID,) * 256, "4: ACTIVE", 1),
        ((NO_GID, NO_GID, GID) + (NO_GID,) * 253, "4: ACTIVE", 3),
        ((NO_GID,) * 256, "1: DOWN", 0),
    ],
    ids=["the first", "the third", "a port that is down"],
)
def test_gids_are_read_up_to_the_first_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gids: tuple[str, ...], state: str, reads: int
) -> None:
    """A port has 256 GIDs, most of them empty: they are read in order until one is set."""
    sysfs = build_sysfs(tmp_path, [], {"mlx5_0": Nic("pci0000:00/0000:00:06.0", gids=gids, state=state)})
    read: list[Path] = []
    original = Path.read_text

    def read_text(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        read.append(path)
        return original(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", read_text)
    (device,) = rdma_devices(sysfs)
    assert device.has_address
    assert reads == sum(path.parent.name == "gids" for path in read)


def test_files_that_are_not_text_make_a_device_unusable(tmp_path: Path) -> None:
    """A port state in an unknown encoding is not ACTIVE, and no error is raised."""
    sysfs = build_sysfs(tmp_path, [], {"mlx5_0": Nic("pci0000:00/0000:00:06.0")})
    device = sysfs / "class" / "infiniband" / "mlx5_0"
    for name in ("ports/1/state", "ports/1/link_layer", "ports/1/gids/0"):
        (device / name).write_bytes(b"\xff\xfe")
    (device / "device" / "numa_node").write_text("--1\n")
    (found,) = rdma_devices(sysfs)
    assert found.fault
    assert PciLocation(("pci0000:00", "0000:00:06.0")) == found.pci_location


def test_an_unreadable_sysfs_has_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may hide sysfs: there are then no devices, and a GPU has an empty location."""
    sysfs = two_socket_sysfs(tmp_path)

    def denied(path: object, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        for call in ("listdir", "scandir", "stat"):
            patch.setattr(f"os.{call}", denied)
        assert () == rdma_devices(sysfs)
        assert PciLocation() == pci_location("0000:18:00.0", sysfs)


LOADED = "nvidia_peermem 16384 0 - Live 0x0000000000000000\nib_uverbs 1 1 nvidia_peermem, Live 0x0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"


@pytest.mark.parametrize(
    ("modules", "folder", "expected"),
    [
        (LOADED, None, True),
        ("ib_uverbs 1 1 nvidia_peermem, Live 0x0\n", None, False),
        ("nv_peer_mem 1 0 - Live 0x0\n", None, True),
        (None, "nvidia_peermem", True),
        (None, None, False),
    ],
    ids=["loaded", "only mentioned", "its predecessor", "only in /sys", "no information"],
)
def test_the_peer_module_is_detected(tmp_path: Path, modules: str | None, folder: str | None, expected: bool) -> None:
    """It is searched in /proc/modules, and in /sys/module if /proc/modules is hidden."""
    (tmp_path / "proc").mkdir()
    if modules is not None:
        (tmp_path / "proc" / "modules").write_text(modules)
    if folder is not None:
        (tmp_path / "sys" / "module" / folder).mkdir(parents=True)
    assert expected == has_peer_module(tmp_path)


@pytest.mark.parametrize(("version", "expected"), [(OPEN, True), (CLOSED, False), (None, False)])
def test_open_kernel_modules_are_detected(tmp_path: Path, version: str | None, expected: bool) -> None:
    """The driver's version file shows if its kernel modules are open."""
    if version is not None:
        (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
        (tmp_path / "proc" / "driver" / "nvidia" / "version").write_text(version)
    assert expected == has_open_modules(tmp_path)


@pytest.mark.parametrize(
    ("peer_module", "dma_buf", "expected"),
    [(True, False, "nvidia-peermem"), (True, True, "nvidia-peermem"), (False, True, "dma-buf")],
)
def test_the_peer_module_is_preferred_to_dma_buf(peer_module: bool, dma_buf: bool, expected: str) -> None:
    """Either mechanism is sufficient; Mooncake uses the kernel module by default."""
    assert expected == gpu_direct(peer_module=peer_module, dma_buf=dma_buf)


def test_without_gpu_direct_the_transport_is_unavailable() -> None:
    """The hint names the module to load."""
    with pytest.raises(GpuDirectUnavailable, match="cannot access GPU memory") as raised:
        gpu_direct(peer_module=False, dma_buf=False)
    assert "modprobe nvidia-peermem" in raised.value.hint


def test_files_that_are_not_text_are_ignored(tmp_path: Path) -> None:
    """A file that cannot be decoded counts as missing information."""
    for name in ("modules", "driver/nvidia/version"):
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / name).write_bytes(b"\xff\xfe")
    assert not has_peer_module(tmp_path)
    assert not has_open_modules(tmp_path)


class Driver:
    """A CUDA driver; all GPUs except the first support dma-buf."""

    def attribute(self, device: int, attribute: int) -> int:
        assert DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED == attribute
        return int(device > 0)


def failing_driver() -> Driver:
    raise DriverError("cuInit", 100, "no CUDA-capable device is detected")


@pytest.mark.parametrize(
    ("starts", "version", "device", "expected"),
    [
        (True, CLOSED, "cuda:1", True),
        (True, OPEN, "cuda:0", False),
        (False, OPEN, "cuda:0", True),
        (False, CLOSED, "cuda:1", False),
    ],
    ids=["supported", "not supported", "initialization fails, open modules", "initialization fails, closed modules"],
)
def test_dma_buf_support_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool, version: str, device: str, expected: bool
) -> None:
    """The driver reports it; if it cannot be initialized, open kernel modules imply it."""
    (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "proc" / "driver" / "nvidia" / "version").write_text(version)
    monkeypatch.setattr(topology, "cuda_driver", Driver if starts else failing_driver)
    assert expected == has_dma_buf(torch.device(device), tmp_path)
