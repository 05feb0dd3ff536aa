"""A cluster and a planner for each test of the controller."""

from __future__ import annotations

import math

import pytest

from planner.integrations.kubernetes.controller import actions
from tests.unit.planner.integrations.kubernetes.controller.controller_harness import ControllerHarness


@pytest.fixture(autouse=True)
def _no_action_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, all that is due is begun: these two go by the real clock."""
    monkeypatch.setattr(actions, "TOTAL_TIMEOUT_S", math.inf)
    monkeypatch.setattr(actions, "CALL_TIMEOUT_S", 60.0)


@pytest.fixture
def harness() -> ControllerHarness:
    """A cluster with nothing in it."""
    return ControllerHarness()
