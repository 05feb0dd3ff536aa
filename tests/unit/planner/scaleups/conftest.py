"""A registry that waits for those that were announced."""

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
    """A registry that waits for as long as it may be told to, and plans at once whom nobody announced."""
    return make_registry(time, store, scaleup_wait_s=8)
