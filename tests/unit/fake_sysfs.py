"""Directory trees that simulate sysfs of various machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GID = "fe80:0000:0000:0000:0002:c903:0000:0001"
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True)
class PciDevice:
    """A PCI device: its path below /sys/devices, and its NUMA node."""

    sysfs_path: str
    numa_node: int = 0

    @property
    def address(self) -> str:
        return self.sysfs_path.rpartition("/")[2]


@dataclass(frozen=True)
class Nic(PciDevice):
    """The network card of an RDMA device, and its port."""

    state: str = "4: ACTIVE"
    link_layer: str = "InfiniBand"
    gids: tuple[str, ...] = (GID,)


def build_sysfs(root: Path, gpus: list[PciDevice], nics: Mapping[str, Nic]) -> Path:
    """Write the tree under `root`/sys and return that path."""
    sysfs = root / "sys"
    (sysfs / "class" / "infiniband").mkdir(parents=True)
    (sysfs / "bus" / "pci" / "devices").mkdir(parents=True)
    for pci_device in (*gpus, *nics.values()):
        device = sysfs / "devices" / pci_device.sysfs_path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{pci_device.numa_node}\n")
        (sysfs / "bus" / "pci" / "devices" / pci_device.address).symlink_to(device)
    for name, nic in nics.items():
        device = sysfs / "devices" / nic.sysfs_path / "infiniband" / name
        port = device / "ports" / "1"
        (port / "gids").mkdir(parents=True)
        (port / "state").write_text(f"{nic.state}\n")
        (port / "link_layer").write_text(f"{nic.link_layer}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        for index, gid in enumerate(nic.gids):
            (port / "gids" / str(index)).write_text(f"{gid}\n")
        (device / "device").symlink_to(sysfs / "devices" / nic.sysfs_path)
        (sysfs / "class" / "infiniband" / name).symlink_to(device)
    return sysfs


def hgx_sysfs(root: Path) -> Path:
    """Eight GPUs, each under a PCIe switch with its own card; four per socket."""
    gpus, nics = [], {}
    for index in range(8):
        bus = 0x10 + 0x10 * index
        switch = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        gpus.append(PciDevice(f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", index // 4))
        # In reverse order, so that names are not sorted by location.
        sysfs_path = f"{switch}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0"
        nics[f"mlx5_{7 - index}"] = Nic(sysfs_path, index // 4)
    return build_sysfs(root, gpus, nics)


def two_socket_sysfs(root: Path) -> Path:
    """GPUs and cards, each under its own root port, on two sockets."""
    return build_sysfs(
        root,
        [
            PciDevice("pci0000:17/0000:17:00.0/0000:18:00.0", 0),
            PciDevice("pci0000:97/0000:97:00.0/0000:98:00.0", 1),
        ],
        {
            "mlx5_0": Nic("pci0000:30/0000:30:00.0/0000:31:00.0", 0),
            "mlx5_1": Nic("pci0000:50/0000:50:00.0/0000:51:00.0", 0),
            "mlx5_2": Nic("pci0000:b0/0000:b0:00.0/0000:b1:00.0", 1),
        },
    )


def virtual_machine_sysfs(root: Path) -> Path:
    """One card, one GPU, a flat bus, and no NUMA."""
    return build_sysfs(root, [PciDevice("pci0000:00/0000:00:05.0", -1)], {"mlx5_0": Nic("pci0000:00/0000:00:06.0", -1)})
