"""RDMA devices, their way to GPU memory, and the library that drives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rfork.diagnostics.result import CheckResult
from rfork.errors import DeviceDown, GpuDirectUnavailable, VersionMismatch
from rfork.transport.mooncake.gpu_direct import gpu_direct
from rfork.transport.mooncake.library import LibraryState, reinstall_hint, require_cuda
from rfork.transport.mooncake.topology import PciLocation, RdmaDevice, pci_distance, select_devices

REINSTALL = "pip install --force-reinstall 'rfork[mooncake]'"


def check_rdma(devices: Sequence[RdmaDevice], wanted: str) -> CheckResult:
    """Whether there are RDMA devices that work, and those that RFORK_RDMA_DEVICES names are among them."""
    if not devices and not wanted:
        return CheckResult("rdma", "skip", "no device in /sys/class/infiniband")
    try:
        usable = select_devices(devices, wanted, ())
    except DeviceDown as error:
        return CheckResult("rdma", "fail", str(error), error.hint or "correct RFORK_RDMA_DEVICES, or see `ibstat`")
    names = ", ".join(device.name for device in usable)
    return CheckResult("rdma", "ok", f"{names}, as RFORK_RDMA_DEVICES says" if wanted else names)


def check_device(device: RdmaDevice, gpus: Mapping[str, PciLocation]) -> CheckResult:
    """One RDMA device: its port, and the GPU (of `gpus`, by name) that it is nearest to."""
    name = f"rdma {device.name}"
    detail = ", ".join(part for part in (device.state, device.link_layer, device.rate) if part)
    if gpus:
        min_distance = min(pci_distance(device.pci_location, pci_location) for pci_location in gpus.values())
        near = [
            gpu for gpu, pci_location in gpus.items() if pci_distance(device.pci_location, pci_location) == min_distance
        ]
        detail += f"; nearest to {', '.join(near)}"
    if device.state != "ACTIVE":
        fix = "check cable, switch port and, on InfiniBand, the subnet manager (ibstat)"
        return CheckResult(name, "warn", f"port is down: {detail}", fix)
    if not device.has_address:
        return CheckResult(name, "warn", f"{device.fault}: {detail}", "give its network interface an IP address")
    return CheckResult(name, "ok", detail)


def check_gpu_direct(peer_module: bool, dma_buf: bool, *, needed: bool) -> CheckResult:
    """Whether network cards reach GPU memory; `needed`: there are cards that work, and GPUs."""
    try:
        mode = gpu_direct(peer_module=peer_module, dma_buf=dma_buf)
    except GpuDirectUnavailable as error:
        if not needed:
            return CheckResult("gpudirect", "skip", "no GPU and RDMA device that work")
        return CheckResult("gpudirect", "fail", str(error), error.hint or "modprobe nvidia-peermem")
    return CheckResult("gpudirect", "ok", f"by {mode}")


def check_mooncake(state: LibraryState, *, cuda: bool, torch_cuda: str | None = None) -> CheckResult:
    """The wheel that brings transfer_engine, and whether it fits this machine and torch's CUDA.

    `cuda`: the machine has a GPU.
    """
    if not state.wheels and state.error:
        return CheckResult("mooncake", "skip", "not installed, so no transfer_engine", state.hint)
    if state.error:
        if cuda and len(state.wheels) == 1 and torch_cuda and "cuda" in state.error:
            return CheckResult("mooncake", "fail", state.error, reinstall_hint(state, torch_cuda.partition(".")[0]))
        return CheckResult("mooncake", "fail", state.error, state.hint or REINSTALL)
    if cuda:
        try:
            require_cuda(state, torch_cuda)
        except VersionMismatch as error:
            return CheckResult("mooncake", "warn", str(error), error.hint or REINSTALL)
    return CheckResult("mooncake", "ok", ", ".join(state.wheels) or "imports, but belongs to no known wheel")
