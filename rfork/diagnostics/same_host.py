"""Checks of what processes on the same host share: GPUs, sockets and memory pages."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from rfork.diagnostics.result import CheckResult


def check_cuda_ipc(namespace: str, gpus: Sequence[int], has_access: Callable[[int, int], bool]) -> CheckResult:
    """Check peer access between the visible GPUs (`has_access(one, other)`), and report the IPC namespace.

    CUDA opens another process's memory only within one IPC namespace, so containers must share it.
    """
    where = f"IPC namespace {namespace or 'unknown'}"
    if not gpus:
        return CheckResult("cuda ipc", "skip", f"no CUDA device in use ({where})")
    if len(gpus) == 1:
        detail = f"one visible GPU: only sources on that GPU can be read ({where})"
        return CheckResult(
            "cuda ipc", "ok", detail, "expose all GPUs of the host to the container (NVIDIA_VISIBLE_DEVICES)"
        )
    pairs = [(one, other) for one in gpus for other in gpus if one < other]
    try:
        disconnected = [f"{one}-{other}" for one, other in pairs if not has_access(one, other)]
    except RuntimeError as error:
        detail = f"{len(gpus)} GPUs; peer access between them is unknown: {' '.join(str(error).split())} ({where})"
        return CheckResult("cuda ipc", "warn", detail, "check nvidia-smi topo -p2p r, and dmesg")
    if disconnected:
        detail = f"{len(gpus)} GPUs; no peer access between {', '.join(disconnected)} ({where})"
        fix = "check nvidia-smi topo -p2p r; PCIe ACS, the IOMMU or different CPU sockets may prevent it"
        return CheckResult("cuda ipc", "warn", detail, fix)
    return CheckResult("cuda ipc", "ok", f"{len(gpus)} GPUs, all with peer access ({where})")


def check_unix_sockets(folder: Path | None, namespace: str) -> CheckResult:
    """Check that Unix sockets for instances on this host can be created. `folder` None: abstract namespace."""
    if folder is None:
        detail = f"only processes of this network namespace can connect ({namespace or 'unknown'})"
        fix = "for containers with separate networks, set RFORK_UNIX_SOCKET_DIR to a folder that they share"
        return CheckResult("unix sockets", "ok", detail, fix)
    fix = "create it, or correct RFORK_UNIX_SOCKET_DIR (a hostPath, or an emptyDir of one pod)"
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            return CheckResult("unix sockets", "fail", f"{folder} is not a folder", fix)
    except OSError as error:
        return CheckResult("unix sockets", "fail", f"{folder}: {error.strerror or error}", fix)
    if not os.access(folder, os.W_OK | os.X_OK):
        fix = "make it writable for this process's user, or correct RFORK_UNIX_SOCKET_DIR"
        return CheckResult("unix sockets", "fail", f"{folder} is not writable", fix)
    return CheckResult("unix sockets", "ok", f"created in {folder}")


def check_sealed_memory(sealed: bool, huge_pages: str) -> CheckResult:
    """Check that memory can be shared as sealed memfd pages, and whether as huge pages."""
    if not sealed:
        return CheckResult(
            "memfd", "skip", "this system has no memfd, which the shared_memory transport needs", "use Linux"
        )
    if huge_pages in ("always", "within_size", "advise"):
        return CheckResult("memfd", "ok", f"processes can share memory, in huge pages ({huge_pages})")
    detail = f"processes can share memory, but in 4 KiB pages (huge pages: {huge_pages or 'unknown'})"
    fix = "for more speed, as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return CheckResult("memfd", "ok", detail, fix)


def namespace(namespace_type: str) -> str:
    """Return the number of this process's `ipc` or `net` namespace; empty if unknown."""
    try:
        return os.readlink(f"/proc/self/ns/{namespace_type}").partition("[")[2].rstrip("]")
    except OSError:
        return ""


def shmem_huge_pages(root: Path) -> str:
    """Return the huge page mode of shared memory, the word in brackets in ``always within_size [advise] never``."""
    try:
        text = (root / "kernel" / "mm" / "transparent_hugepage" / "shmem_enabled").read_text(errors="replace")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
