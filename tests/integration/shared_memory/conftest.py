"""Fixtures for every shared_memory test."""

from __future__ import annotations

import ctypes

import pytest

from rfork.transport.shared_memory import exporter


@pytest.fixture(autouse=True, scope="module")
def mmap_large_allocations() -> None:
    """Reset glibc's mmap threshold to that of a fresh process: glibc raises it as tests free large
    allocations.
    """
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sources in this process find enough free memory, whatever else runs on the machine."""
    monkeypatch.setattr(exporter, "fits_in_memory", lambda nbytes: True)
