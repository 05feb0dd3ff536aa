"""KEDA's periodic calls: the metric spec, the value, the active state, and errors for unknown values."""

from __future__ import annotations

import contextlib
import socket
import threading

import grpc
import grpc.aio
import pytest

from planner.integrations.keda.v1 import externalscaler_pb2 as pb
from tests.integration.keda.scaler_harness import (
    HOSTS,
    EngineServers,
    ReportingPlanner,
    RunningScaler,
    next_state,
)
from tests.unit.planner.integrations.keda.fakes import SGLANG, VLLM, engine, instance


async def test_keda_reads_the_spec_the_value_and_the_active_state(
    planner: ReportingPlanner, engines: EngineServers, scaler: RunningScaler
) -> None:
    """The spec, the value over both engines, and whether there is work."""
    planner.report(*map(instance, HOSTS))
    engines.pages = {HOSTS[0]: VLLM, HOSTS[1]: SGLANG}
    spec = (await scaler.stub.GetMetricSpec(scaler.scaled_object(target="0.5"))).metricSpecs
    values = [
        (await scaler.value(metric=metric), await scaler.active(metric=metric))
        for metric in ("waiting", "running", "kv_cache", "forks", "expected")
    ]
    assert [("rfork-waiting-5bc623025e", 1, 0.5)] == [
        (each.metricName, each.targetSize, each.targetSizeFloat) for each in spec
    ]
    assert [(25.0, True), (16.0, True), (0.78, True), (0.0, False), (0.0, False)] == values


async def test_engines_that_do_not_respond_are_left_out(
    planner: ReportingPlanner, engines: EngineServers, scaler: RunningScaler
) -> None:
    """One of two is left out; with none the value is unknown, and KEDA's fallback applies."""
    planner.report(*map(instance, HOSTS))
    engines.pages = {HOSTS[0]: 503, HOSTS[1]: engine(7)}
    values = [await scaler.value()]
    engines.pages = {HOSTS[0]: 302, HOSTS[1]: 200}  # a redirect to another host is not followed
    await scaler.until(scaler.value, "UNAVAILABLE")
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await scaler.active()
    url = f"http://{HOSTS[0]}:{engines.port}/metrics"
    assert [7.0] == values
    assert grpc.StatusCode.UNAVAILABLE == unknown.value.code()
    assert f"waiting of org/llama is unknown: {HOSTS[0]} returned HTTP 302 at {url}" in str(unknown.value.details())


@pytest.mark.slow  # also: the next tests
async def test_endless_responses_delay_no_one_else(
    planner: ReportingPlanner, engines: EngineServers, scaler: RunningScaler
) -> None:
    """An engine that accepts the connection and stays silent, and one that sends without end, delay no other."""
    planner.report(*map(instance, (*HOSTS, "127.0.0.3", "127.0.0.4")))
    engines.pages = dict.fromkeys(HOSTS, engine(4))
    ended = threading.Event()

    def send_endless_response(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not ended.is_set():
                connection.sendall(b"vllm:num_requests_waiting 9\n" * 4096)

    with (
        socket.create_server(("127.0.0.3", engines.port)),
        socket.create_server(("127.0.0.4", engines.port)) as endless_server,
    ):
        accepting = threading.Thread(target=lambda: send_endless_response(endless_server.accept()[0]))
        accepting.start()
        value = await scaler.value()
        ended.set()
        accepting.join()
    silent = scaler.status.registry.get_sample_value("rfork_scaler_engine_requests_total", {"result": "failed"})
    assert 8.0 == value
    assert 2.0 == silent


async def test_each_call_rejects_invalid_metadata(scaler: RunningScaler) -> None:
    """Each call reports the error that KEDA's log and the ScaledObject's events show."""
    scaled_object = scaler.scaled_object(port="http")
    calls = (
        scaler.stub.IsActive(scaled_object),
        scaler.stub.GetMetricSpec(scaled_object),
        scaler.stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=scaled_object, metricName="s0-x")),
        next_state(scaler.stub.StreamIsActive(scaled_object)),
    )
    errors = []
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        errors.append((refused.value.code(), refused.value.details()))
    expected = (grpc.StatusCode.INVALID_ARGUMENT, "`port` must be a number from 1 to 65535, not 'http'")
    assert [expected] * 4 == errors
