"""Which RDMA devices are near a GPU, and which can be used: read from sysfs. Runs on both sides.

A network card that shares a PCIe switch with the GPU reaches its memory past the CPU; one below another
root, past one; one at the other socket, past two. All functions take sysfs's root, so that a tree of files
can stand in for a machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rfork.errors import DeviceDown

SYSFS = Path("/sys")
PORT = 1
"""The port that Mooncake opens of each device (MC_IB_PORT changes it)."""
_STEP = re.compile(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\.[0-9a-f]")


@dataclass(frozen=True, slots=True)
class PciLocation:
    """Where a PCI device is: the way to it from its host bridge, and its NUMA node (-1: unknown)."""

    path: tuple[str, ...] = ()
    numa_node: int = -1


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One RDMA device: its port's state (ACTIVE, DOWN, …) and link layer (InfiniBand, or Ethernet: RoCE)."""

    name: str
    pci_location: PciLocation = PciLocation()
    state: str = "ACTIVE"
    link_layer: str = "InfiniBand"
    rate: str = ""
    has_address: bool = True
    """Whether the port has a GID: over Ethernet there is none without an IP address. Of an active port."""

    @property
    def fault(self) -> str:
        """Why it cannot be used; empty where it can."""
        if self.state != "ACTIVE":
            return f"its port is {self.state or 'not there'}"
        if not self.has_address:
            return "its port has no address (GID)"
        return ""


def rdma_devices(root: Path = SYSFS) -> tuple[RdmaDevice, ...]:
    """All RDMA devices of this machine, usable or not, by name; never raises."""
    folder = root / "class" / "infiniband"
    return tuple(_device(folder / name) for name in sorted(_names(folder)))


def pci_location(address: str, root: Path = SYSFS) -> PciLocation:
    """Where the PCI device of this address (``0000:18:00.0``) is; `PciLocation()` where sysfs does not tell."""
    device = root / "bus" / "pci" / "devices" / address.lower()
    return _pci_location(device) if os.path.exists(device) else PciLocation()


def gpu_address(device: torch.device) -> str:
    """The PCI address of a CUDA device, as sysfs writes it."""
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def pci_distance(one: PciLocation, other: PciLocation) -> tuple[int, int]:
    """How far two PCI devices are apart; smaller is nearer.

    First by how much of their ways they share, then by whether they share a NUMA node.
    """
    shared = 0
    for mine, others in zip(one.path, other.path, strict=False):
        if mine != others:
            break
        shared += 1
    return -shared, int(one.numa_node != other.numa_node or one.numa_node < 0)


def select_devices(devices: Sequence[RdmaDevice], wanted: str, gpus: Sequence[PciLocation]) -> tuple[RdmaDevice, ...]:
    """The devices to use: those named in `wanted` (comma separated), else the nearest to each of `gpus`.

    All that are equally near; without a GPU, all. Raises DeviceDown where there is none, or one that was
    named is missing or down.
    """
    named = [name for name in (part.strip() for part in wanted.split(",")) if name]
    known = {device.name: device for device in devices}
    if missing := [name for name in named if name not in known]:
        raise DeviceDown(
            f"there is no RDMA device {', '.join(missing)} (found: {', '.join(known) or 'none'})",
            hint="correct RFORK_RDMA_DEVICES; in a container, give it the devices (/dev/infiniband)",
        )
    candidates = [known[name] for name in named] if named else list(devices)
    usable = [device for device in candidates if not device.fault]
    if not usable or (named and len(usable) < len(named)):
        raise DeviceDown(
            "; ".join(f"{device.name}: {device.fault}" for device in candidates if device.fault)
            or "there is no RDMA device",
            hint="see rfork doctor, and `ibstat` for the link: cable, switch port, subnet manager",
        )
    if named or not gpus:
        return tuple(usable)
    near: set[str] = set()
    for gpu in gpus:
        min_distance = min(pci_distance(gpu, device.pci_location) for device in usable)
        near |= {device.name for device in usable if pci_distance(gpu, device.pci_location) == min_distance}
    return tuple(device for device in usable if device.name in near)


def _device(folder: Path) -> RdmaDevice:
    port = folder / "ports" / str(PORT)
    state = _read(port / "state").rpartition(":")[2].strip()  # as in `4: ACTIVE`
    return RdmaDevice(
        folder.name,
        _pci_location(folder / "device"),
        state,
        _read(port / "link_layer"),
        _read(port / "rate"),
        state != "ACTIVE" or _has_address(port / "gids"),
    )


def _has_address(gids: Path) -> bool:
    """Whether one of a port's GIDs, of which there are 256, is not zero: mostly the first that is read."""
    has_gid = False
    for name in sorted(_names(gids), key=lambda name: (len(name), name)):
        gid = _read(gids / name)
        if gid.strip("0:"):
            return True
        has_gid = has_gid or bool(gid)
    # Where sysfs lists none at all it does not tell: the device is given a try.
    return not has_gid


def _pci_location(device: Path) -> PciLocation:
    path = tuple(part for part in os.path.realpath(device).split(os.sep) if _STEP.fullmatch(part))
    node = _read(device / "numa_node")
    return PciLocation(path, int(node) if node.isdecimal() else -1)


def _names(folder: Path) -> list[str]:
    """What is in a folder of sysfs: nothing where there is none, or it may not be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: Path) -> str:
    """A file of sysfs, or nothing: ports come and go."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
