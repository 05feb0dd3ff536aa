"""What holds for each test of shared_memory."""

from __future__ import annotations

import ctypes

import pytest

from rfork.transport.shared_memory import exporter


@pytest.fixture(autouse=True, scope="module")
def mmap_large_allocations() -> None:
    """As in a process that begins: glibc takes larger and larger ones from its heap as tests free them."""
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on this machine takes: sources in this process find enough memory."""
    monkeypatch.setattr(exporter, "fits_in_memory", lambda nbytes: True)
