"""Fixtures: a clock, and a Secret in memory."""

from __future__ import annotations

import pytest

from tests.unit.planner.integrations.kubernetes.certs.webhook_replicas import FakeUnixTime
from tests.unit.planner.integrations.kubernetes.secret_store import MemorySecretStore


@pytest.fixture
def time() -> FakeUnixTime:
    return FakeUnixTime()


@pytest.fixture
def store() -> MemorySecretStore:
    return MemorySecretStore("pods.rfork.dev", "bindings.rfork.dev")
