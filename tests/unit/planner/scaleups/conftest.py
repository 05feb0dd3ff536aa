"""A registry that waits for announced replicas."""

from __future__ import annotations

import pytest

from planner.registry import Registry
from tests.unit.planner.builders import FakeTime, make_registry
from tests.unit.planner.scaleups.arrivals import CountingStore


@pytest.fixture
def store(time: FakeTime) -> CountingStore:
    """The store of `registry`."""
    return CountingStore(time)


@pytest.fixture
def registry(time: FakeTime, store: CountingStore) -> Registry:
    """A registry with an unlimited scale-up wait that plans unannounced requests immediately."""
    return make_registry(time, store, scaleup_wait_s=8)
