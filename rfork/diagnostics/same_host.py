"""What processes of one host share: GPUs, sockets and pages."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from rfork.diagnostics.result import CheckResult


def check_cuda_ipc(namespace: str, gpus: Sequence[int], reaches: Callable[[int, int], bool]) -> CheckResult:
    """Whether GPUs of this process address one another (`reaches(one, other)`), and in which IPC namespace.

    CUDA opens another process's memory in one IPC namespace alone: two containers have to share it.
    """
    where = f"IPC namespace {namespace or 'unknown'}"
    if not gpus:
        return CheckResult("cuda ipc", "skip", f"no CUDA device in use ({where})")
    if len(gpus) == 1:
        detail = f"one GPU is seen, so sources on it alone can be read ({where})"
        return CheckResult("cuda ipc", "ok", detail, "show the container all GPUs of the host (NVIDIA_VISIBLE_DEVICES)")
    pairs = [(one, other) for one in gpus for other in gpus if one < other]
    try:
        parted = [f"{one}-{other}" for one, other in pairs if not reaches(one, other)]
    except RuntimeError as error:
        detail = f"{len(gpus)} GPUs; whether they address one another: {' '.join(str(error).split())} ({where})"
        return CheckResult("cuda ipc", "warn", detail, "see nvidia-smi topo -p2p r, and dmesg")
    if parted:
        detail = f"{len(gpus)} GPUs; these do not address one another: {', '.join(parted)} ({where})"
        fix = "nvidia-smi topo -p2p r says why; PCIe ACS or the IOMMU may forbid it, between two sockets too"
        return CheckResult("cuda ipc", "warn", detail, fix)
    return CheckResult("cuda ipc", "ok", f"{len(gpus)} GPUs, each addresses every other ({where})")


def check_local_sockets(folder: Path | None, namespace: str) -> CheckResult:
    """Whether sockets for other instances of this host can be made, in a folder or without one."""
    if folder is None:
        detail = f"without a folder: seen in this network namespace ({namespace or 'unknown'}) only"
        fix = "containers of their own network: set RFORK_UNIX_SOCKET_DIR to a folder that they share"
        return CheckResult("local sockets", "ok", detail, fix)
    fix = "make it, or correct RFORK_UNIX_SOCKET_DIR (a hostPath, or an emptyDir of one pod)"
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            return CheckResult("local sockets", "fail", f"{folder} is no folder", fix)
    except OSError as error:
        return CheckResult("local sockets", "fail", f"{folder}: {error.strerror or error}", fix)
    if not os.access(folder, os.W_OK | os.X_OK):
        fix = "let this process's user write to it, or correct RFORK_UNIX_SOCKET_DIR"
        return CheckResult("local sockets", "fail", f"{folder} cannot be written to", fix)
    return CheckResult("local sockets", "ok", f"in {folder}")


def check_sealed_memory(sealed: bool, huge_pages: str) -> CheckResult:
    """Whether pages can be given to other processes sealed (memfd), and in huge pages: how this is set."""
    if not sealed:
        return CheckResult("memfd", "skip", "this system has no memfd: no shared_memory transport", "use Linux")
    if huge_pages in ("always", "within_size", "advise"):
        return CheckResult("memfd", "ok", f"sealed memory, huge pages: {huge_pages}")
    detail = f"sealed memory, in pages of 4 KiB (huge pages: {huge_pages or 'unknown'})"
    fix = "faster: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return CheckResult("memfd", "ok", detail, fix)


def namespace(namespace_type: str) -> str:
    """The number of this process's `ipc` or `net` namespace; empty where the system does not tell."""
    try:
        return os.readlink(f"/proc/self/ns/{namespace_type}").partition("[")[2].rstrip("]")
    except OSError:
        return ""


def shmem_huge_pages(root: Path) -> str:
    """When shared memory is given huge pages, as in ``always within_size [advise] never``."""
    try:
        text = (root / "kernel" / "mm" / "transparent_hugepage" / "shmem_enabled").read_text(errors="replace")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
