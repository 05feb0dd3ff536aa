"""RDMA devices: which are usable, which are nearest to a GPU, and if they can access its memory. Runs on both sides.

A network card that shares a PCIe switch with the GPU accesses its memory without involving the CPU; a card
under another root port goes through one CPU, a card on the other socket through two.

The kernel module nvidia-peermem lets a card register GPU addresses like host addresses. Without it, memory is
exported as a dma-buf, which needs NVIDIA's open kernel modules. With neither, registering GPU memory fails,
or reads never end, so this is checked first.

All functions have a parameter for the root of sysfs, or of the file system, so that tests can use a directory tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rfork.cuda.device import cuda_driver
from rfork.cuda.library import DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, DriverError
from rfork.errors import DeviceDown, GpuDirectUnavailable, TransportUnavailable

GpuDirectMode = Literal["nvidia-peermem", "dma-buf"]
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
OPEN_MODULES = "Open Kernel Module"
HINT = "modprobe nvidia-peermem, or use NVIDIA's open kernel modules, which support dma-buf"

SYSFS = Path("/sys")
PORT = 1
"""The port of each device that Mooncake opens (MC_IB_PORT changes it)."""
_PCI_STEP = re.compile(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\.[0-9a-f]")


def gpu_direct(*, peer_module: bool, dma_buf: bool) -> GpuDirectMode:
    """Return the mode in which network cards access GPU memory. Raises GpuDirectUnavailable if there is none."""
    if peer_module:
        return "nvidia-peermem"
    if dma_buf:
        return "dma-buf"
    raise GpuDirectUnavailable(
        "network cards cannot access GPU memory: nvidia-peermem is not loaded, and the driver does not support dma-buf",
        hint=HINT,
    )


def has_peer_module(root: Path = Path("/")) -> bool:
    """Return True if the kernel module nvidia-peermem, or its predecessor, is loaded or built in."""
    try:
        listed = (root / "proc" / "modules").read_text(errors="replace").splitlines()
    except OSError:  # hidden in some containers
        listed = []
    loaded = {line.split(" ", 1)[0] for line in listed}
    return any(name in loaded or os.path.isdir(root / "sys" / "module" / name) for name in PEER_MODULES)


def has_open_modules(root: Path = Path("/")) -> bool:
    """Return True if NVIDIA's open kernel modules are loaded."""
    try:
        version = (root / "proc" / "driver" / "nvidia" / "version").read_text(errors="replace")
    except OSError:
        return False
    return OPEN_MODULES in version


def has_dma_buf(device: torch.device, root: Path = Path("/")) -> bool:
    """Return True if CUDA can export this GPU's memory as a dma-buf; if unknown, if the kernel modules are
    open.
    """
    try:
        return bool(cuda_driver().attribute(device.index or 0, DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED))
    except (TransportUnavailable, DriverError):
        return has_open_modules(root)


def gpu_direct_mode(device: torch.device, root: Path = Path("/")) -> GpuDirectMode:
    """Return the mode for a GPU of this machine; see `gpu_direct`."""
    peer_module = has_peer_module(root)
    return gpu_direct(peer_module=peer_module, dma_buf=peer_module or has_dma_buf(device, root))


@dataclass(frozen=True, slots=True)
class PciLocation:
    """Location of a PCI device: its path from the host bridge, and its NUMA node (-1: unknown)."""

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
    """True if the port has a GID; over Ethernet that needs an IP address. Read only for an active port."""

    @property
    def fault(self) -> str:
        """Reason why the device cannot be used; empty if it can."""
        if self.state != "ACTIVE":
            return f"its port is {self.state or 'missing'}"
        if not self.has_address:
            return "its port has no address (GID)"
        return ""


def rdma_devices(root: Path = SYSFS) -> tuple[RdmaDevice, ...]:
    """Return all RDMA devices of this machine by name, usable or not; never raises."""
    folder = root / "class" / "infiniband"
    return tuple(_device(folder / name) for name in sorted(_list_dir(folder)))


def pci_location(address: str, root: Path = SYSFS) -> PciLocation:
    """Return the location of a PCI device (``0000:18:00.0``); `PciLocation()` if sysfs does not have it."""
    device = root / "bus" / "pci" / "devices" / address.lower()
    return _pci_location(device) if os.path.exists(device) else PciLocation()


def gpu_address(device: torch.device) -> str:
    """Return the PCI address of a CUDA device in sysfs notation."""
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def pci_distance(a: PciLocation, b: PciLocation) -> tuple[int, int]:
    """Return the distance of two PCI devices; smaller is nearer.

    Compares first the length of their common path, then their NUMA nodes.
    """
    shared = 0
    for a_step, b_step in zip(a.path, b.path, strict=False):
        if a_step != b_step:
            break
        shared += 1
    return -shared, int(a.numa_node != b.numa_node or a.numa_node < 0)


def select_devices(
    devices: Sequence[RdmaDevice], requested: str, gpus: Sequence[PciLocation]
) -> tuple[RdmaDevice, ...]:
    """Return the devices named in `requested` (comma separated); without names, those nearest to each of `gpus`.

    Returns all equally near devices, and all devices without a GPU. Raises DeviceDown if there is none, or if
    a named one is missing or down.
    """
    names = [name for name in (part.strip() for part in requested.split(",")) if name]
    by_name = {device.name: device for device in devices}
    if missing := [name for name in names if name not in by_name]:
        raise DeviceDown(
            f"no RDMA device {', '.join(missing)} (found: {', '.join(by_name) or 'none'})",
            hint="correct RFORK_RDMA_DEVICES; in a container, expose the devices (/dev/infiniband)",
        )
    candidates = [by_name[name] for name in names] if names else list(devices)
    usable = [device for device in candidates if not device.fault]
    if not usable or (names and len(usable) < len(names)):
        raise DeviceDown(
            "; ".join(f"{device.name}: {device.fault}" for device in candidates if device.fault)
            or "no RDMA device found",
            hint="see `rfork doctor`, and `ibstat` for the link: cable, switch port, subnet manager",
        )
    if names or not gpus:
        return tuple(usable)
    nearest: set[str] = set()
    for gpu in gpus:
        min_distance = min(pci_distance(gpu, device.pci_location) for device in usable)
        nearest |= {device.name for device in usable if pci_distance(gpu, device.pci_location) == min_distance}
    return tuple(device for device in usable if device.name in nearest)


def _device(folder: Path) -> RdmaDevice:
    port = folder / "ports" / str(PORT)
    state = _read_text(port / "state").rpartition(":")[2].strip()  # for example `4: ACTIVE`
    return RdmaDevice(
        folder.name,
        _pci_location(folder / "device"),
        state,
        _read_text(port / "link_layer"),
        _read_text(port / "rate"),
        state != "ACTIVE" or _has_address(port / "gids"),
    )


def _has_address(gids: Path) -> bool:
    """Return True if one of the port's 256 GIDs is not zero, usually the first."""
    has_gid = False
    for name in sorted(_list_dir(gids), key=lambda name: (len(name), name)):
        gid = _read_text(gids / name)
        if gid.strip("0:"):
            return True
        has_gid = has_gid or bool(gid)
    # If sysfs lists no GIDs, their state is unknown: try the device.
    return not has_gid


def _pci_location(device: Path) -> PciLocation:
    path = tuple(part for part in os.path.realpath(device).split(os.sep) if _PCI_STEP.fullmatch(part))
    node = _read_text(device / "numa_node")
    return PciLocation(path, int(node) if node.isdecimal() else -1)


def _list_dir(folder: Path) -> list[str]:
    """List a sysfs directory; empty if it is missing or not readable."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read_text(path: Path) -> str:
    """Read a sysfs file; empty on error, because ports come and go."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
