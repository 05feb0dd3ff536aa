"""A service for each test."""

from __future__ import annotations

import pytest

from planner.plan_service import PlanService
from tests.unit.planner.builders import FakeTime, make_service


@pytest.fixture
def service(time: FakeTime) -> PlanService:
    """A service that plans each arrival immediately."""
    return make_service(time)
