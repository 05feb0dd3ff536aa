"""A cluster and a planner for each test of the controller."""

from __future__ import annotations

import math

import pytest

from planner.hooks.kubernetes.controller import acting
from tests.unit.hooks.kubernetes.controller.stage import Stage


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, all that is due is begun: these two go by the real clock."""
    monkeypatch.setattr(acting, "ALL_S", math.inf)
    monkeypatch.setattr(acting, "CALL_S", 60.0)


@pytest.fixture
def stage() -> Stage:
    """A cluster with nothing in it."""
    return Stage()
