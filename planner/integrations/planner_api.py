"""Interface of the integrations to the planner's REST API, asynchronous, and its implementation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Final, ParamSpec, Protocol, TypeVar

import httpx

from rfork.asyncio_timeout import timeout
from rfork.errors import NetworkError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo, InstanceInfo, ModelInfo, ScaleUp, ScaleUpInfo
from rfork.settings import InstanceSettings

MAX_CALLS: Final = 16
"""Maximum concurrent calls to the planner; more wait, within their timeout."""

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class PlannerUnavailable(Exception):
    """The planner did not respond, or its response was invalid. The text names the request and the cause."""


class PlannerApi(Protocol):
    """Calls to the planner. Every call raises PlannerUnavailable, within `planner_timeout_s`."""

    async def instances(self, *, model: str | None = None) -> tuple[InstanceInfo, ...]:
        """Return all instances, or those of one model (`GET /v1/instances`, all pages)."""

    async def forks(self) -> tuple[ForkInfo, ...]:
        """Return active and recently finished forks (`GET /v1/forks`, all pages)."""

    async def models(self) -> tuple[ModelInfo, ...]:
        """Return the fleet's state of each model and rank (`GET /v1/models`)."""

    async def scaleups(self) -> tuple[ScaleUpInfo, ...]:
        """Return active scale-ups (`GET /v1/scaleups`)."""

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """Announce that replicas will start, or update how many (`POST /v1/scaleups`)."""

    async def withdraw(self, scaleup_id: str) -> None:
        """Withdraw a scale-up (`DELETE /v1/scaleups/{scaleup_id}`)."""

    async def remove(self, instance_id: str) -> None:
        """Remove an instance (`DELETE /v1/instances/{instance_id}`). An unknown one is no error."""

    async def close(self) -> None:
        """Close all connections."""


class AsyncPlannerClient:
    """Implements `PlannerApi`: runs each call of a `PlannerClient` on a thread of its own pool.

    Not on the event loop's pool, which resolves names: a planner that does not respond would delay other servers.
    A cancelled call ends on its thread by its deadline, or when the client is closed. The constructor raises
    SettingsError as `PlannerClient.of`. `transport` replaces the network in tests.
    """

    def __init__(self, settings: InstanceSettings, transport: httpx.BaseTransport | None = None) -> None:
        self._client = PlannerClient.of(settings, transport=transport)
        self._timeout_s = settings.planner_timeout_s
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="rfork-planner-api")
        self._closed = False

    async def instances(self, *, model: str | None = None) -> tuple[InstanceInfo, ...]:
        """See `PlannerApi`."""
        deadline = time.monotonic() + self._timeout_s
        return tuple(await self._run("GET /v1/instances", self._client.instances, model=model, deadline=deadline))

    async def forks(self) -> tuple[ForkInfo, ...]:
        """See `PlannerApi`."""
        deadline = time.monotonic() + self._timeout_s
        return tuple(await self._run("GET /v1/forks", self._client.forks, deadline=deadline))

    async def models(self) -> tuple[ModelInfo, ...]:
        """See `PlannerApi`."""
        return tuple(await self._run("GET /v1/models", self._client.models))

    async def scaleups(self) -> tuple[ScaleUpInfo, ...]:
        """See `PlannerApi`."""
        return tuple(await self._run("GET /v1/scaleups", self._client.scaleups))

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """See `PlannerApi`."""
        return await self._run("POST /v1/scaleups", self._client.announce, scaleup)

    async def withdraw(self, scaleup_id: str) -> None:
        """See `PlannerApi`."""
        await self._run("DELETE /v1/scaleups", self._client.withdraw, scaleup_id)

    async def remove(self, instance_id: str) -> None:
        """See `PlannerApi`."""
        await self._run("DELETE /v1/instances", self._client.remove, instance_id)

    async def close(self) -> None:
        """Close all connections. Later calls raise PlannerUnavailable."""
        self._closed = True
        self._client.close()
        self._threads.shutdown(wait=False)

    async def _run(self, request: str, call: Callable[P, ResultT], *arguments: P.args, **options: P.kwargs) -> ResultT:
        if self._closed:
            raise PlannerUnavailable(f"{request}: the client of planner {self._client.url} is closed")
        call_in_context = partial(copy_context().run, call, *arguments, **options)
        try:
            async with timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, call_in_context)
        except TimeoutError:
            reason = f"no response within {self._timeout_s:g} s"
            raise PlannerUnavailable(f"{request}: planner {self._client.url} is unreachable: {reason}") from None
        except NetworkError as error:
            hint = f"; {error.hint}" if error.hint else ""
            raise PlannerUnavailable(f"{request}: {error}{hint}") from error
