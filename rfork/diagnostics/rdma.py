"""Checks of RDMA devices, their access to GPU memory, and the Mooncake library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rfork.diagnostics.result import CheckResult
from rfork.errors import DeviceDown, GpuDirectUnavailable, VersionMismatch
from rfork.transport.mooncake.library import LibraryState, reinstall_hint, require_cuda
from rfork.transport.mooncake.topology import PciLocation, RdmaDevice, gpu_direct, pci_distance, select_devices

REINSTALL = "pip install --force-reinstall 'rfork[mooncake]'"


def check_rdma(devices: Sequence[RdmaDevice], requested: str) -> CheckResult:
    """Check that RDMA devices work. `requested`: the devices named by RFORK_RDMA_DEVICES."""
    if not devices and not requested:
        return CheckResult("rdma", "skip", "no RDMA device (/sys/class/infiniband has none)")
    try:
        usable = select_devices(devices, requested, ())
    except DeviceDown as error:
        return CheckResult("rdma", "fail", str(error), error.hint or "correct RFORK_RDMA_DEVICES, or check `ibstat`")
    names = ", ".join(device.name for device in usable)
    return CheckResult("rdma", "ok", f"{names} (RFORK_RDMA_DEVICES)" if requested else names)


def check_device(device: RdmaDevice, gpus: Mapping[str, PciLocation]) -> CheckResult:
    """Check the port of an RDMA device and find the nearest GPU. `gpus`: PCI locations by name."""
    name = f"rdma {device.name}"
    detail = ", ".join(part for part in (device.state, device.link_layer, device.rate) if part)
    if gpus:
        min_distance = min(pci_distance(device.pci_location, pci_location) for pci_location in gpus.values())
        near = [
            gpu for gpu, pci_location in gpus.items() if pci_distance(device.pci_location, pci_location) == min_distance
        ]
        detail += f"; nearest to {', '.join(near)}"
    if device.state != "ACTIVE":
        fix = "check the cable, the switch port and, on InfiniBand, the subnet manager (ibstat)"
        return CheckResult(name, "warn", f"port is down: {detail}", fix)
    if not device.has_address:
        return CheckResult(name, "warn", f"{device.fault}: {detail}", "assign an IP address to its network interface")
    return CheckResult(name, "ok", detail)


def check_gpu_direct(peer_module: bool, dma_buf: bool, *, needed: bool) -> CheckResult:
    """Check that network cards can access GPU memory. `needed`: there are working cards and GPUs."""
    try:
        mode = gpu_direct(peer_module=peer_module, dma_buf=dma_buf)
    except GpuDirectUnavailable as error:
        if not needed:
            return CheckResult("gpudirect", "skip", "needs a GPU and an RDMA device that work")
        return CheckResult("gpudirect", "fail", str(error), error.hint or "modprobe nvidia-peermem")
    return CheckResult("gpudirect", "ok", f"network cards access GPU memory through {mode}")


def check_mooncake(state: LibraryState, *, cuda: bool, torch_cuda: str | None = None) -> CheckResult:
    """Check that the Mooncake wheel is importable and fits torch's CUDA. `cuda`: the machine has a GPU."""
    if not state.wheels and state.error:
        return CheckResult("mooncake", "off", "not installed; required by the transfer_engine transport", state.hint)
    if state.error:
        if cuda and len(state.wheels) == 1 and torch_cuda and "cuda" in state.error:
            return CheckResult("mooncake", "fail", state.error, reinstall_hint(state, torch_cuda.partition(".")[0]))
        return CheckResult("mooncake", "fail", state.error, state.hint or REINSTALL)
    if cuda:
        try:
            require_cuda(state, torch_cuda)
        except VersionMismatch as error:
            return CheckResult("mooncake", "warn", str(error), error.hint or REINSTALL)
    source = ", ".join(state.wheels) or "from no known wheel"
    return CheckResult("mooncake", "ok", f"installed ({source}), for the transfer_engine transport")
