"""Checks of the interpreter, the GPUs that torch can use, and the memory limits."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rfork.diagnostics.result import CheckResult
from rfork.transport.mooncake import topology

MIN_SHM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A usable CUDA device: index, name and PCI location."""

    index: int
    name: str
    pci_location: topology.PciLocation


@dataclass(frozen=True, slots=True)
class Gpus:
    """All usable GPUs; or none, and the error with which CUDA failed to start."""

    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def probe_gpus() -> Gpus:
    """Initialise CUDA and return its GPUs. Never raises.

    torch may count GPUs with NVML even if CUDA does not start.
    """
    try:
        return Gpus(tuple(_gpu(index) for index in range(torch.cuda.device_count())))
    except Exception as error:  # an old driver, no fabric manager, …: torch raises many types
        return Gpus(error=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _gpu(index: int) -> Gpu:
    device = torch.device("cuda", index)
    name = torch.cuda.get_device_name(device)
    return Gpu(index, name, topology.pci_location(topology.gpu_address(device)))


def check_python(version: Sequence[str], torch_version: str) -> CheckResult:
    """Check the versions of Python and torch."""
    detail = f"Python {'.'.join(version)}, torch {torch_version}"
    if (int(version[0]), int(version[1])) < (3, 10):
        return CheckResult("python", "fail", f"{detail}: this Python is too old", "use Python 3.10 or newer")
    return CheckResult("python", "ok", detail)


def check_cuda(names: Sequence[str], error: str = "") -> CheckResult:
    """Check the CUDA devices. `error`: why torch cannot use existing ones."""
    if error:
        fix = "check nvidia-smi and dmesg: the driver, the fabric manager, torch's CUDA version, CUDA_VISIBLE_DEVICES"
        return CheckResult("cuda", "fail", f"GPUs found, but CUDA does not start: {error}", fix)
    if not names:
        return CheckResult("cuda", "skip", "no CUDA device; weights in host memory also work")
    count = f"{len(names)} {'device' if len(names) == 1 else 'devices'}"
    return CheckResult("cuda", "ok", f"{count}: {', '.join(dict.fromkeys(names))}")


def check_locked_memory(limit: int, *, rdma: bool) -> CheckResult:
    """Check the locked-memory limit in bytes (RLIMIT_MEMLOCK): RDMA pins all registered memory."""
    unlimited = limit == resource.RLIM_INFINITY
    detail = "unlimited" if unlimited else f"{limit >> 10} KiB"
    if not rdma:
        return CheckResult("memlock", "skip", f"locked memory limit {detail} (relevant only for RDMA)")
    if unlimited:
        return CheckResult("memlock", "ok", f"locked memory limit {detail}")
    fix = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
    return CheckResult("memlock", "warn", f"locked memory limit {detail}; RDMA locks all weights that it serves", fix)


def check_shared_memory(free: int | None) -> CheckResult:
    """Check the free bytes of /dev/shm, which engines use between their processes; None: it does not exist."""
    if free is None:
        return CheckResult("shm", "warn", "there is no /dev/shm, which engines need", "mount a tmpfs at /dev/shm")
    if free < MIN_SHM_BYTES:
        detail = f"only {free >> 20} MiB free in /dev/shm, which engines need"
        return CheckResult("shm", "warn", detail, "increase it (docker: --shm-size=2g)")
    return CheckResult("shm", "ok", f"{free >> 20} MiB free in /dev/shm")
