"""A planner, engines and a scaler, and the calls that KEDA makes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import httpx
from pydantic import SecretStr

from planner.integrations.health import IntegrationStatus
from planner.integrations.keda.scaler import run
from planner.integrations.keda.v1 import externalscaler_pb2 as pb
from planner.integrations.keda.v1.externalscaler_pb2_grpc import ExternalScalerStub
from planner.integrations.planner_api import AsyncPlannerClient
from rfork.asyncio_timeout import timeout
from rfork.planner_client.ownership import OWNER_HEADER
from rfork.schema import InstanceInfo, InstanceReport, ScaleUp
from rfork.settings import InstanceSettings, KubernetesSettings
from tests.unit.planner.integrations.keda.fakes import MODEL

if TYPE_CHECKING:
    from planner.integrations.keda.v1.externalscaler_pb2_grpc import ExternalScalerAsyncStub


DEADLINE_S = 30.0
ENGINE_S = 6.0
"""Timeout long enough for an engine that responds on a busy machine."""
OPERATOR, READER = "o" * 32, "r" * 32
HOSTS = ("127.0.0.1", "127.0.0.2")


@dataclass
class EngineServers:
    """Two engines' HTTP servers on one port of two addresses; a numeric page is sent as a status."""

    port: int
    pages: dict[str, str | int] = field(default_factory=dict)
    request_count: int = 0


@dataclass
class ReportingPlanner:
    """A planner, and the reports that instances and autoscalers send to it."""

    url: str

    def report(self, *views: InstanceInfo) -> None:
        """Send heartbeats."""
        for view in views:
            self._send("PUT", f"/v1/instances/{view.report.instance_id}", view.report)

    def announce(self, replicas: int) -> None:
        """Announce a scale-up."""
        self._send("POST", "/v1/scaleups", ScaleUp(scaleup_id="u", model=MODEL, replicas=replicas))

    def _send(self, method: str, path: str, body: InstanceReport | ScaleUp) -> None:
        headers = {
            "Authorization": f"Bearer {OPERATOR}", "Content-Type": "application/json", OWNER_HEADER: "o" * 32,
        }  # fmt: skip
        content = body.model_dump_json()
        response = httpx.request(method, self.url + path, content=content, headers=headers, trust_env=False)
        response.raise_for_status()


@dataclass
class RunningScaler:
    """A scaler in this process, and the calls that KEDA makes."""

    channel: grpc.aio.Channel
    status: IntegrationStatus
    task: asyncio.Task[None]
    metadata: dict[str, str]

    @property
    def stub(self) -> ExternalScalerAsyncStub:
        return ExternalScalerStub(self.channel)

    def scaled_object(self, **changes: str) -> pb.ScaledObjectRef:
        """Return a ScaledObject's trigger."""
        return pb.ScaledObjectRef(name="llama", namespace="default", scalerMetadata={**self.metadata, **changes})

    async def value(self, **changes: str) -> float:
        """Return the value of GetMetrics."""
        response = await self.stub.GetMetrics(
            pb.GetMetricsRequest(scaledObjectRef=self.scaled_object(**changes)), timeout=DEADLINE_S
        )
        return response.metricValues[0].metricValueFloat

    async def active(self, **changes: str) -> bool:
        """Return the result of IsActive."""
        return (await self.stub.IsActive(self.scaled_object(**changes), timeout=DEADLINE_S)).result

    async def until(self, read_value: Callable[[], Awaitable[float | None]], expected: float | str) -> None:
        """Repeat a call until it returns the expected value: results are cached for a second."""
        async with timeout(DEADLINE_S):
            while await value_or_error(read_value) != expected:
                await asyncio.sleep(0.05)


async def next_state(stream: AsyncIterable[pb.IsActiveResponse]) -> bool:
    """Return the next state from a stream."""
    async with timeout(DEADLINE_S):
        return (await anext(aiter(stream))).result


async def value_or_error(call: Callable[[], Awaitable[float | None]]) -> float | str | None:
    """Return a call's response, or the code of its error."""
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        return error.code().name


@contextlib.asynccontextmanager
async def running_scaler(
    planner_url: str, metadata: dict[str, str], *, port: int, channel: grpc.aio.Channel | None = None
) -> AsyncIterator[RunningScaler]:
    """Run a scaler of this planner within the block."""
    fleet = AsyncPlannerClient(InstanceSettings(planner=planner_url, token=SecretStr(READER), planner_timeout_s=10.0))
    status = IntegrationStatus("scaler")
    settings = KubernetesSettings(scaler_port=port)
    task = asyncio.create_task(run(settings, fleet, status, engine_timeout_s=ENGINE_S))
    channel = channel or grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    try:
        ready = asyncio.create_task(channel.channel_ready())
        async with timeout(DEADLINE_S):
            await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            ready.cancel()
            await task
        yield RunningScaler(channel, status, task, metadata)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await channel.close(None)
        await fleet.close()
