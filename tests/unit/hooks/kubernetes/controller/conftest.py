"""A cluster and a planner for each test of the controller."""

from __future__ import annotations

import pytest

from tests.unit.hooks.kubernetes.controller.stage import Stage


@pytest.fixture
def stage() -> Stage:
    """A cluster with nothing in it."""
    return Stage()
