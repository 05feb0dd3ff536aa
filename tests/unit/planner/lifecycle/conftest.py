"""A registry for each test."""

from __future__ import annotations

import pytest

from planner.registry import Registry
from tests.unit.planner.builders import FakeTime, make_registry


@pytest.fixture
def registry(time: FakeTime) -> Registry:
    """A registry that plans each arrival immediately."""
    return make_registry(time)
