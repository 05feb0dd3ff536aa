"""Fixtures: a clock, and a Secret in memory."""

from __future__ import annotations

import pytest

from tests.unit.planner.integrations.kubernetes.certificates.webhook_replicas import FakeUnixTime
from tests.unit.planner.integrations.kubernetes.memory_certificate_store import MemoryCertStore


@pytest.fixture
def time() -> FakeUnixTime:
    return FakeUnixTime()


@pytest.fixture
def store() -> MemoryCertStore:
    return MemoryCertStore("pods.rfork.dev", "bindings.rfork.dev")
