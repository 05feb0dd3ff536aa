"""Whether network cards reach GPU memory on this machine (GPUDirect RDMA), and by which of its two ways.

The kernel module nvidia-peermem lets a card register GPU addresses as if they were the host's. Without it,
memory is exported as a dma-buf, which takes NVIDIA's open kernel modules. Where there is neither, to
register GPU memory fails, or ends in a read that never does: so it is looked at before. Runs on both sides.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Literal

import torch

from rfork.errors import GpuDirectUnavailable

GpuDirectMode = Literal["nvidia-peermem", "dma-buf"]
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
OPEN_MODULES = "Open Kernel Module"
HINT = "modprobe nvidia-peermem, or use NVIDIA's open kernel modules, which have dma-buf"
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, since CUDA 11.7


def gpu_direct(*, peer_module: bool, dma_buf: bool) -> GpuDirectMode:
    """How network cards reach GPU memory. Raises GpuDirectUnavailable where they do not."""
    if peer_module:
        return "nvidia-peermem"
    if dma_buf:
        return "dma-buf"
    raise GpuDirectUnavailable(
        "network cards cannot reach GPU memory: nvidia-peermem is not loaded, and the driver has no dma-buf",
        hint=HINT,
    )


def has_peer_module(root: Path = Path("/")) -> bool:
    """Whether the kernel module nvidia-peermem, or its predecessor, is loaded (or built in)."""
    try:
        listed = (root / "proc" / "modules").read_text(errors="replace").splitlines()
    except OSError:  # some containers hide it
        listed = []
    loaded = {line.split(" ", 1)[0] for line in listed}
    return any(name in loaded or os.path.isdir(root / "sys" / "module" / name) for name in PEER_MODULES)


def has_open_modules(root: Path = Path("/")) -> bool:
    """Whether NVIDIA's kernel modules are the open ones."""
    try:
        version = (root / "proc" / "driver" / "nvidia" / "version").read_text(errors="replace")
    except OSError:
        return False
    return OPEN_MODULES in version


def has_dma_buf(device: torch.device, root: Path = Path("/")) -> bool:
    """Whether CUDA exports this GPU's memory as a dma-buf; where it does not tell, what the modules are."""
    value = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        # It answers nothing in a process that did not start CUDA; to start it twice does no harm.
        failed = driver.cuInit(0) or driver.cuDeviceGetAttribute(
            ctypes.byref(value), _DMA_BUF_SUPPORTED, device.index or 0
        )
    except (OSError, AttributeError):
        return has_open_modules(root)
    return bool(value.value) if failed == 0 else has_open_modules(root)


def gpu_direct_mode(device: torch.device, root: Path = Path("/")) -> GpuDirectMode:
    """As `gpu_direct`, of this machine and one of its GPUs."""
    peer_module = has_peer_module(root)
    return gpu_direct(peer_module=peer_module, dma_buf=peer_module or has_dma_buf(device, root))
