"""RDMA devices, their way to GPU memory, and the library that drives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rfork.errors import DeviceDown, NoGpuDirect, VersionMismatch
from rfork.transport.doctor.check import Check
from rfork.transport.transfer_engine.gpu_direct import gpu_direct
from rfork.transport.transfer_engine.library import LibraryState, replacing, require_cuda
from rfork.transport.transfer_engine.topology import Place, RdmaDevice, chosen, distance

REINSTALL = "pip install --force-reinstall 'rfork[mooncake]'"


def check_rdma(devices: Sequence[RdmaDevice], wanted: str) -> Check:
    """Whether there are RDMA devices that work, and those that RFORK_RDMA_DEVICES names are among them."""
    if not devices and not wanted:
        return Check("rdma", "skip", "no device in /sys/class/infiniband")
    try:
        usable = chosen(devices, wanted, ())
    except DeviceDown as error:
        return Check("rdma", "fail", str(error), error.hint or "correct RFORK_RDMA_DEVICES, or see `ibstat`")
    names = ", ".join(device.name for device in usable)
    return Check("rdma", "ok", f"{names}, as RFORK_RDMA_DEVICES says" if wanted else names)


def check_device(device: RdmaDevice, gpus: Mapping[str, Place]) -> Check:
    """One RDMA device: its port, and the GPU (of `gpus`, by name) that it is nearest to."""
    name = f"rdma {device.name}"
    detail = ", ".join(part for part in (device.state, device.link_layer, device.rate) if part)
    if gpus:
        least = min(distance(device.place, place) for place in gpus.values())
        near = [gpu for gpu, place in gpus.items() if distance(device.place, place) == least]
        detail += f"; nearest to {', '.join(near)}"
    if device.state != "ACTIVE":
        fix = "check cable, switch port and, on InfiniBand, the subnet manager (ibstat)"
        return Check(name, "warn", f"port is down: {detail}", fix)
    if not device.has_address:
        return Check(name, "warn", f"{device.fault}: {detail}", "give its network interface an IP address")
    return Check(name, "ok", detail)


def check_gpu_direct(peer_module: bool, dma_buf: bool, *, needed: bool) -> Check:
    """Whether network cards reach GPU memory; `needed`: there are cards that work, and GPUs."""
    try:
        way = gpu_direct(peer_module=peer_module, dma_buf=dma_buf)
    except NoGpuDirect as error:
        if not needed:
            return Check("gpudirect", "skip", "no GPU and RDMA device that work")
        return Check("gpudirect", "fail", str(error), error.hint or "modprobe nvidia-peermem")
    return Check("gpudirect", "ok", f"by {way}")


def check_mooncake(state: LibraryState, *, cuda: bool, torch_cuda: str | None = None) -> Check:
    """The wheel that brings transfer_engine, and whether it fits this machine and torch's CUDA.

    `cuda`: the machine has a GPU.
    """
    if not state.wheels and state.error:
        return Check("mooncake", "skip", "not installed, so no transfer_engine", state.hint)
    if state.error:
        if cuda and len(state.wheels) == 1 and torch_cuda and "cuda" in state.error:
            return Check("mooncake", "fail", state.error, replacing(state, torch_cuda.partition(".")[0]))
        return Check("mooncake", "fail", state.error, state.hint or REINSTALL)
    if cuda:
        try:
            require_cuda(state, torch_cuda)
        except VersionMismatch as error:
            return Check("mooncake", "warn", str(error), error.hint or REINSTALL)
    return Check("mooncake", "ok", ", ".join(state.wheels) or "imports, but belongs to no known wheel")
