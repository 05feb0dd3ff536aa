"""Checks of the interpreter, the GPUs and the memory limits."""

from __future__ import annotations

import resource
from collections.abc import Sequence

from rfork.diagnostics.result import CheckResult

MIN_SHM_BYTES = 64 << 20


def check_python(version: Sequence[str], torch_version: str) -> CheckResult:
    """Check the versions of Python and torch."""
    detail = f"Python {'.'.join(version)}, torch {torch_version}"
    if (int(version[0]), int(version[1])) < (3, 11):
        return CheckResult("python", "fail", detail, "use Python 3.11 or newer")
    return CheckResult("python", "ok", detail)


def check_cuda(names: Sequence[str], error: str = "") -> CheckResult:
    """Check the CUDA devices. `error`: why torch cannot use existing ones."""
    if error:
        fix = "check nvidia-smi and dmesg: driver, fabric manager, torch's CUDA, CUDA_VISIBLE_DEVICES"
        return CheckResult("cuda", "fail", f"GPUs found, but CUDA does not start: {error}", fix)
    if not names:
        return CheckResult("cuda", "skip", "no CUDA device; weights in host memory also work")
    return CheckResult("cuda", "ok", f"{len(names)} devices: {', '.join(dict.fromkeys(names))}")


def check_locked_memory(limit: int, *, rdma: bool) -> CheckResult:
    """Check the locked-memory limit in bytes (RLIMIT_MEMLOCK): RDMA pins all registered memory."""
    unlimited = limit == resource.RLIM_INFINITY
    detail = "unlimited" if unlimited else f"{limit >> 10} KiB"
    if not rdma:
        return CheckResult("memlock", "skip", f"{detail} (relevant only for RDMA)")
    if unlimited:
        return CheckResult("memlock", "ok", detail)
    fix = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
    return CheckResult("memlock", "warn", detail, fix)


def check_shared_memory(free: int | None) -> CheckResult:
    """Check the free bytes of /dev/shm, which engines use between their processes; None: it does not exist."""
    if free is None:
        return CheckResult("shm", "warn", "no /dev/shm", "mount a tmpfs at /dev/shm")
    if free < MIN_SHM_BYTES:
        return CheckResult("shm", "warn", f"{free >> 20} MiB free in /dev/shm", "increase it (docker: --shm-size=2g)")
    return CheckResult("shm", "ok", f"{free >> 20} MiB free in /dev/shm")
