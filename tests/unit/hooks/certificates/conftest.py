"""A clock, and a Secret in memory."""

from __future__ import annotations

import pytest

from tests.unit.hooks.certificates.replicas import Time
from tests.unit.hooks.secret_store import MemorySecretStore


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def store() -> MemorySecretStore:
    return MemorySecretStore("pods.rfork.dev", "bindings.rfork.dev")
