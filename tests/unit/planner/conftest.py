"""The planner's application without sockets."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI

from planner.app import create_app
from rfork.planner_client.client import PlannerClient
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import AppTransport
from tests.unit.planner.builders import FakeTime

MakeApp = Callable[..., FastAPI]


@pytest.fixture
def time() -> FakeTime:
    """The clock of `app`, `planner` and `web`."""
    return FakeTime()


@pytest.fixture
def app(time: FakeTime) -> FastAPI:
    """A planner that plans each arrival separately and immediately."""
    return create_app(PlannerSettings(lease_keys="s" * 32, batch_window_s=0), time.clock)  # type: ignore[arg-type]


@pytest.fixture
def planner(app: FastAPI) -> PlannerClient:
    """The typed client of `app`."""
    return PlannerClient("http://planner", transport=AppTransport(app))


@pytest.fixture
def web(app: FastAPI) -> httpx.Client:
    """Any HTTP client of `app`."""
    return httpx.Client(base_url="http://planner", transport=AppTransport(app))
