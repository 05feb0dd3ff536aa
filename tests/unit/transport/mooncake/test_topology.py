"""Which RDMA devices are used for a GPU, on machines made of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rfork.errors import DeviceDown
from rfork.transport.mooncake.topology import PciLocation, pci_location, rdma_devices, select_devices
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
        "a GPU that sysfs does not know",
    ],
)
def test_the_nearest_devices_are_used(
    tmp_path: Path, machine: Callable[[Path], Path], gpus: list[str], expected: list[str]
) -> None:
    """Those below the GPU's own switch, else those of its NUMA node, else all; host memory takes all."""
    assert expected == selected_names(machine(tmp_path), "", *gpus)


def test_a_device_that_is_down_leaves_the_next_nearest(tmp_path: Path) -> None:
    """The card of the GPU's own socket has no link: the other socket's is used."""
    sysfs = two_socket_sysfs(tmp_path)
    for name in ("mlx5_0", "mlx5_1"):
        (sysfs / "class" / "infiniband" / name / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert ["mlx5_2"] == selected_names(sysfs, "", "0000:18:00.0")


def test_what_is_asked_for_is_used(tmp_path: Path) -> None:
    """However far away it is, and in that order."""
    assert ["mlx5_7", "mlx5_0"] == selected_names(hgx_sysfs(tmp_path), "mlx5_7, mlx5_0", "0000:13:00.0")


@pytest.mark.parametrize(
    ("nics", "requested_devices", "message"),
    [
        ({}, "", "there is no RDMA device"),
        ({}, "mlx5_0", "there is no RDMA device mlx5_0 (found: none)"),
        (
            {"mlx5_0": Nic("pci0000:00/0000:00:06.0")},
            "mlx5_1",
            "there is no RDMA device mlx5_1 (found: mlx5_0)",
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
        "none, one named",
        "another named",
        "all down",
        "one of those named down",
        "RoCE, no address",
    ],
)
def test_without_a_device_it_says_which_and_why(
    tmp_path: Path, nics: dict[str, Nic], requested_devices: str, message: str
) -> None:
    """DeviceDown, so that the next transport is taken."""
    with pytest.raises(DeviceDown) as raised:
        selected_names(build_sysfs(tmp_path, [], nics), requested_devices)
    assert (message, True) == (str(raised.value), bool(raised.value.hint))


def test_a_port_over_ethernet(tmp_path: Path) -> None:
    """RoCE is as good as InfiniBand, once its port has an address."""
    gids = (NO_GID, "0000:0000:0000:0000:0000:ffff:0a00:0001")
    nic = Nic("pci0000:00/0000:00:06.0", 1, link_layer="Ethernet", gids=gids)
    (device,) = rdma_devices(build_sysfs(tmp_path, [], {"mlx5_0": nic}))
    assert ("Ethernet", "", "400 Gb/sec (4X NDR)", PciLocation(("pci0000:00", "0000:00:06.0"), 1)) == (
        device.link_layer,
        device.fault,
        device.rate,
        device.pci_location,
    )


def test_a_machine_without_devices(tmp_path: Path) -> None:
    """No folder is no device, and an unknown card is nowhere."""
    assert ((), PciLocation()) == (rdma_devices(tmp_path), pci_location("0000:18:00.0", tmp_path))


@pytest.mark.parametrize(
    ("gids", "state", "reads"),
    [
        ((GID,) * 256, "4: ACTIVE", 1),
        ((NO_GID, NO_GID, GID) + (NO_GID,) * 253, "4: ACTIVE", 3),
        ((NO_GID,) * 256, "1: DOWN", 0),
    ],
    ids=["the first", "the third", "a port that is down anyway"],
)
def test_one_address_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gids: tuple[str, ...], state: str, reads: int
) -> None:
    """A port has 256 GIDs, mostly empty: they are read in order, up to the first there is."""
    sysfs = build_sysfs(tmp_path, [], {"mlx5_0": Nic("pci0000:00/0000:00:06.0", gids=gids, state=state)})
    read: list[Path] = []
    really = Path.read_text

    def read_text(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        read.append(path)
        return really(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", read_text)
    (device,) = rdma_devices(sysfs)
    assert (True, reads) == (device.has_address, sum(path.parent.name == "gids" for path in read))


def test_files_that_are_no_text(tmp_path: Path) -> None:
    """What a driver writes in another encoding is not ACTIVE, and nothing is raised."""
    sysfs = build_sysfs(tmp_path, [], {"mlx5_0": Nic("pci0000:00/0000:00:06.0")})
    device = sysfs / "class" / "infiniband" / "mlx5_0"
    for name in ("ports/1/state", "ports/1/link_layer", "ports/1/gids/0"):
        (device / name).write_bytes(b"\xff\xfe")
    (device / "device" / "numa_node").write_text("--1\n")
    (found,) = rdma_devices(sysfs)
    assert (True, PciLocation(("pci0000:00", "0000:00:06.0"))) == (bool(found.fault), found.pci_location)


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may hide sysfs: there is no device then, and a GPU is nowhere."""
    sysfs = two_socket_sysfs(tmp_path)

    def denied(path: object, *rest: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        for call in ("listdir", "scandir", "stat"):
            patch.setattr(f"os.{call}", denied)
        found = rdma_devices(sysfs), pci_location("0000:18:00.0", sysfs)
    assert ((), PciLocation()) == found
