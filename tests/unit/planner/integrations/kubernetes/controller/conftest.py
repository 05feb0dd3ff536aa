"""Fixtures: a cluster and a planner for each test of the controller."""

from __future__ import annotations

import math

import pytest

from planner.integrations.kubernetes.controller import actions
from tests.unit.planner.integrations.kubernetes.controller.controller_harness import ControllerHarness


@pytest.fixture(autouse=True)
def _no_action_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the two timeouts by the real clock, so that all due actions start even on a slow machine."""
    monkeypatch.setattr(actions, "TOTAL_TIMEOUT_S", math.inf)
    monkeypatch.setattr(actions, "CALL_TIMEOUT_S", 60.0)


@pytest.fixture
def harness() -> ControllerHarness:
    """Return a harness with an empty cluster."""
    return ControllerHarness()
