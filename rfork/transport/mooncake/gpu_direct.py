"""Detects GPUDirect RDMA: if and how network cards can access GPU memory on this machine.

The kernel module nvidia-peermem lets a card register GPU addresses like host addresses. Without it, memory is
exported as a dma-buf, which needs NVIDIA's open kernel modules. With neither, registering GPU memory fails,
or reads never end, so this is checked first. Runs on both sides.
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
HINT = "modprobe nvidia-peermem, or use NVIDIA's open kernel modules, which support dma-buf"
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, since CUDA 11.7


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
    value = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        # The query fails before CUDA is initialized; initializing it twice is harmless.
        failed = driver.cuInit(0) or driver.cuDeviceGetAttribute(
            ctypes.byref(value), _DMA_BUF_SUPPORTED, device.index or 0
        )
    except (OSError, AttributeError):
        return has_open_modules(root)
    return bool(value.value) if failed == 0 else has_open_modules(root)


def gpu_direct_mode(device: torch.device, root: Path = Path("/")) -> GpuDirectMode:
    """Return the mode for a GPU of this machine; see `gpu_direct`."""
    peer_module = has_peer_module(root)
    return gpu_direct(peer_module=peer_module, dma_buf=peer_module or has_dma_buf(device, root))
