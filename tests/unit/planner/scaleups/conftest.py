"""A service that waits for announced replicas."""

from __future__ import annotations

import pytest

from planner.plan_service import PlanService
from tests.unit.planner.builders import FakeTime, make_service
from tests.unit.planner.scaleups.arrivals import CountingStore


@pytest.fixture
def store(time: FakeTime) -> CountingStore:
    """The store of `service`."""
    return CountingStore(time)


@pytest.fixture
def service(time: FakeTime, store: CountingStore) -> PlanService:
    """A service with an unlimited scale-up wait that plans unannounced requests immediately."""
    return make_service(time, store, scaleup_wait_s=8)
