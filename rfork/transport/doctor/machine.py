"""The interpreter, the GPUs, and the memory limits of this machine."""

from __future__ import annotations

import resource
from collections.abc import Sequence

from rfork.transport.doctor.check import Check

LEAST_SHARED_MEMORY = 64 << 20


def check_python(version: Sequence[str], torch_version: str) -> Check:
    """The interpreter and torch."""
    detail = f"Python {'.'.join(version)}, torch {torch_version}"
    if (int(version[0]), int(version[1])) < (3, 11):
        return Check("python", "fail", detail, "use Python 3.11 or newer")
    return Check("python", "ok", detail)


def check_cuda(names: Sequence[str], error: str = "") -> Check:
    """The CUDA devices that torch can use; `error`: why it cannot use those there are."""
    if error:
        fix = "see nvidia-smi and dmesg: driver, fabric manager, torch's CUDA, CUDA_VISIBLE_DEVICES"
        return Check("cuda", "fail", f"there are GPUs, and CUDA does not start: {error}", fix)
    if not names:
        return Check("cuda", "skip", "no CUDA device (weights in host memory work as well)")
    return Check("cuda", "ok", f"{len(names)} devices: {', '.join(dict.fromkeys(names))}")


def check_locked_memory(limit: int, *, rdma: bool) -> Check:
    """The locked-memory limit in bytes (RLIMIT_MEMLOCK): RDMA pins all registered memory."""
    unlimited = limit == resource.RLIM_INFINITY
    detail = "unlimited" if unlimited else f"{limit >> 10} KiB"
    if not rdma:
        return Check("memlock", "skip", f"{detail} (matters with RDMA only)")
    if unlimited:
        return Check("memlock", "ok", detail)
    fix = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
    return Check("memlock", "warn", detail, fix)


def check_shared_memory(free: int | None) -> Check:
    """Free bytes of /dev/shm, which engines use between their processes; None: there is none."""
    if free is None:
        return Check("shm", "warn", "no /dev/shm", "mount a tmpfs there")
    if free < LEAST_SHARED_MEMORY:
        return Check("shm", "warn", f"{free >> 20} MiB free in /dev/shm", "raise it (docker: --shm-size=2g)")
    return Check("shm", "ok", f"{free >> 20} MiB free in /dev/shm")
