"""Detection of GPUDirect RDMA, on simulated /proc and /sys trees."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from rfork.errors import GpuDirectUnavailable
from rfork.transport.mooncake.topology import gpu_direct, has_dma_buf, has_open_modules, has_peer_module

LOADED = "nvidia_peermem 16384 0 - Live 0x0000000000000000\nib_uverbs 1 1 nvidia_peermem, Live 0x0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"


@pytest.mark.parametrize(
    ("modules", "folder", "expected"),
    [
        (LOADED, None, True),
        ("ib_uverbs 1 1 nvidia_peermem, Live 0x0\n", None, False),
        ("nv_peer_mem 1 0 - Live 0x0\n", None, True),
        (None, "nvidia_peermem", True),
        (None, None, False),
    ],
    ids=["loaded", "only mentioned", "its predecessor", "only in /sys", "no information"],
)
def test_the_peer_module_is_detected(tmp_path: Path, modules: str | None, folder: str | None, expected: bool) -> None:
    """It is searched in /proc/modules, and in /sys/module if /proc/modules is hidden."""
    (tmp_path / "proc").mkdir()
    if modules is not None:
        (tmp_path / "proc" / "modules").write_text(modules)
    if folder is not None:
        (tmp_path / "sys" / "module" / folder).mkdir(parents=True)
    assert expected == has_peer_module(tmp_path)


@pytest.mark.parametrize(("version", "expected"), [(OPEN, True), (CLOSED, False), (None, False)])
def test_open_kernel_modules_are_detected(tmp_path: Path, version: str | None, expected: bool) -> None:
    """The driver's version file shows if its kernel modules are open."""
    if version is not None:
        (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
        (tmp_path / "proc" / "driver" / "nvidia" / "version").write_text(version)
    assert expected == has_open_modules(tmp_path)


@pytest.mark.parametrize(
    ("peer_module", "dma_buf", "expected"),
    [(True, False, "nvidia-peermem"), (True, True, "nvidia-peermem"), (False, True, "dma-buf")],
)
def test_the_peer_module_is_preferred_to_dma_buf(peer_module: bool, dma_buf: bool, expected: str) -> None:
    """Either mechanism is sufficient; Mooncake uses the kernel module by default."""
    assert expected == gpu_direct(peer_module=peer_module, dma_buf=dma_buf)


def test_without_gpu_direct_the_transport_is_unavailable() -> None:
    """The hint names the module to load."""
    with pytest.raises(GpuDirectUnavailable, match="cannot access GPU memory") as raised:
        gpu_direct(peer_module=False, dma_buf=False)
    assert "modprobe nvidia-peermem" in raised.value.hint


def test_files_that_are_not_text_are_ignored(tmp_path: Path) -> None:
    """A file that cannot be decoded counts as missing information."""
    for name in ("modules", "driver/nvidia/version"):
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / name).write_bytes(b"\xff\xfe")
    assert not has_peer_module(tmp_path)
    assert not has_open_modules(tmp_path)


class Driver:
    """A CUDA driver that replies only after initialization; all GPUs except the first support dma-buf."""

    def __init__(self, *, starts: bool) -> None:
        self._starts = starts
        self._initialized = False

    def cuInit(self, flags: int) -> int:
        self._initialized = self._starts
        return 0 if self._starts else 100

    def cuDeviceGetAttribute(self, value: object, attribute: int, device: int) -> int:
        if not self._initialized:
            return 3
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = int(device > 0)  # type: ignore[arg-type]
        return 0


@pytest.mark.parametrize(
    ("starts", "version", "device", "expected"),
    [
        (True, CLOSED, "cuda:1", True),
        (True, OPEN, "cuda:0", False),
        (False, OPEN, "cuda:0", True),
        (False, CLOSED, "cuda:1", False),
    ],
    ids=["supported", "not supported", "initialization fails, open modules", "initialization fails, closed modules"],
)
def test_dma_buf_support_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool, version: str, device: str, expected: bool
) -> None:
    """The driver reports it; if it cannot be initialized, open kernel modules imply it."""
    (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "proc" / "driver" / "nvidia" / "version").write_text(version)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(starts=starts))
    assert expected == has_dma_buf(torch.device(device), tmp_path)
