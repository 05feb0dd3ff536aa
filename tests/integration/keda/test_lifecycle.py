"""Starting and stopping: of the scaler, of its planner, and of a scaler in a separate process."""

from __future__ import annotations

import asyncio
import signal

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from planner.integrations.health import IntegrationStatus
from planner.integrations.keda.scaler import SERVICE, run
from planner.integrations.keda.v1 import externalscaler_pb2 as pb
from planner.integrations.keda.v1.externalscaler_pb2_grpc import ExternalScalerStub
from planner.integrations.planner_api import AsyncPlannerClient
from rfork.errors import PortInUse, SettingsError
from rfork.settings import InstanceSettings, KubernetesSettings
from tests.conftest import StartRfork
from tests.integration.keda.scaler_harness import (
    HOSTS,
    READER,
    EngineServers,
    ReportingPlanner,
    RunningScaler,
    next_state,
    running_scaler,
)
from tests.processes import RforkProcess
from tests.unit.planner.integrations.keda.fakes import MODEL, engine, instance


@pytest.mark.slow  # logic: tests/unit/planner/integrations/test_planner_client.py
async def test_a_planner_that_dies_is_unavailable_until_it_returns(
    rfork_process: StartRfork, free_port: int, engines: EngineServers, scaler_port: int
) -> None:
    """Calls report UNAVAILABLE and a stream stays open; when it is back, engines count before they report to
    it.
    """

    def start() -> RforkProcess:
        environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "60", "RFORK_PLANNER_INSTANCE_TTL_S": "600"}
        arguments = ("planner", "--port", str(free_port))
        return rfork_process(*arguments, until="planner ready", environment=environment)

    planner, process = ReportingPlanner(f"http://127.0.0.1:{free_port}"), start()
    planner.report(*map(instance, HOSTS))
    engines.pages = dict.fromkeys(HOSTS, engine(3))
    metadata = {"model": MODEL, "metric": "waiting", "target": "10", "port": str(engines.port)}
    async with running_scaler(planner.url, metadata, port=scaler_port) as scaler:
        stream = scaler.stub.StreamIsActive(scaler.scaled_object(poll="0.1"))
        states = [await next_state(stream)]
        process.signal(signal.SIGKILL)
        process.wait()
        await scaler.until(scaler.value, "UNAVAILABLE")
        with pytest.raises(grpc.aio.AioRpcError, match=f"planner {planner.url} is unreachable"):
            await scaler.active()
        await asyncio.to_thread(start)
        await scaler.until(scaler.value, 6.0)
        engines.pages = dict.fromkeys(HOSTS, engine(0))
        states.append(await next_state(stream))
    assert [True, False] == states


async def test_shutdown_is_reported(scaler: RunningScaler) -> None:
    """Readiness and health report it, and streams end cleanly, so that KEDA reopens them immediately."""
    health = health_pb2_grpc.HealthStub(scaler.channel)
    healthy = [(await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in ("", SERVICE)]
    stream = scaler.stub.StreamIsActive(scaler.scaled_object(metric="forks"))
    states, before = [await next_state(stream)], scaler.status.not_ready_reason
    scaler.task.cancel()
    states += [each.result async for each in stream]
    assert [1, 1] == healthy
    assert [False] == states
    assert grpc.StatusCode.OK == await stream.code()
    assert before is None
    assert "stopping" == scaler.status.not_ready_reason


async def test_an_unusable_listen_address_is_an_error(scaler: RunningScaler, scaler_port: int) -> None:
    """A port in use, and an address of another machine."""
    fleet = AsyncPlannerClient(InstanceSettings(planner="http://127.0.0.1:1"))
    with pytest.raises(PortInUse, match=f"127.0.0.1:{scaler_port}: the address is in use"):
        await run(KubernetesSettings(scaler_port=scaler_port), fleet, IntegrationStatus("scaler"))
    with pytest.raises(SettingsError, match=r"cannot listen on 192\.0\.2\.1"):
        await run(KubernetesSettings(bind="192.0.2.1", scaler_port=0), fleet, IntegrationStatus("scaler"))
    await fleet.close()


async def test_the_scaler_runs_as_a_process(
    planner: ReportingPlanner, engines: EngineServers, rfork_process: StartRfork, scaler_port: int
) -> None:
    """`rfork k8s scaler` serves KEDA and shuts down cleanly."""
    planner.report(*map(instance, HOSTS))
    engines.pages = dict.fromkeys(HOSTS, engine(2))
    process = rfork_process(
        "k8s", "scaler", until="scaler ready",
        environment={
            "RFORK_PLANNER": planner.url, "RFORK_TOKEN": READER, "RFORK_K8S_HEALTH_PORT": "0",
            "RFORK_K8S_SCALER_PORT": str(scaler_port),
        },
    )  # fmt: skip
    metadata = {"model": MODEL, "metric": "waiting", "target": "10", "port": str(engines.port)}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{scaler_port}") as channel:
        scaled_object = pb.ScaledObjectRef(name="llama", namespace="default", scalerMetadata=metadata)
        response = await ExternalScalerStub(channel).GetMetrics(pb.GetMetricsRequest(scaledObjectRef=scaled_object))
    process.signal(signal.SIGTERM)
    assert [("rfork-waiting-5bc623025e", 4, 4.0)] == [
        (each.metricName, each.metricValue, each.metricValueFloat) for each in response.metricValues
    ]
    assert 0 == await asyncio.to_thread(process.wait)
