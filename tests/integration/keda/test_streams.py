"""State that the scaler pushes: the current state first, then each change."""

from __future__ import annotations

import asyncio

from planner.integrations.health import IntegrationStatus
from tests.integration.keda.scaler_harness import (
    HOSTS,
    EngineServers,
    ReportingPlanner,
    RunningScaler,
    next_state,
)
from tests.unit.planner.integrations.keda.fakes import engine, instance


async def test_a_stream_sends_the_current_state_and_then_changes(
    planner: ReportingPlanner, engines: EngineServers, scaler: RunningScaler
) -> None:
    """The current state first, then each change and nothing else."""
    planner.report(*map(instance, HOSTS))
    engines.pages = dict.fromkeys(HOSTS, engine(1))
    stream = scaler.stub.StreamIsActive(scaler.scaled_object(activation="2", poll="0.1"))
    states = [await next_state(stream)]
    for waiting in (2, 1, 5):
        engines.pages = dict.fromkeys(HOSTS, engine(waiting))
        states.append(await next_state(stream))
        if waiting == 1:
            stream.cancel()
            stream = scaler.stub.StreamIsActive(scaler.scaled_object(activation="2", poll="0.1"))
            states.append(await next_state(stream))
    assert [False, True, False, False, True] == states


async def test_a_model_at_zero_is_woken(planner: ReportingPlanner, scaler: RunningScaler) -> None:
    """`POST /v1/scaleups` activates triggers on engine metrics, like those on `expected`."""
    streams = [
        scaler.stub.StreamIsActive(scaler.scaled_object(metric=metric, poll="0.1"))
        for metric in ("waiting", "expected")
    ]
    before = [await next_state(stream) for stream in streams]
    planner.announce(3)
    after = [await next_state(stream) for stream in streams]
    assert [False, False] == before
    assert [True, True] == after
    assert 0.0 == await scaler.value()
    assert 3.0 == await scaler.value(metric="expected")


async def test_hundreds_of_streams_share_their_polls(
    planner: ReportingPlanner, engines: EngineServers, scaler: RunningScaler
) -> None:
    """Each stream reports the change; the engines are polled as if for one."""
    planner.report(instance(HOSTS[0]))
    engines.pages = {HOSTS[0]: engine(0)}
    streams = [scaler.stub.StreamIsActive(scaler.scaled_object(poll="0.2")) for _ in range(300)]
    before = await asyncio.gather(*(next_state(stream) for stream in streams))
    requests_before, open_streams = (
        engines.request_count,
        scaler.status.registry.get_sample_value("rfork_scaler_streams"),
    )
    engines.pages = {HOSTS[0]: engine(1)}
    after = await asyncio.gather(*(next_state(stream) for stream in streams))
    assert {False} == set(before)
    assert {True} == set(after)
    assert 300.0 == open_streams
    assert max(requests_before, engines.request_count - requests_before) < 30
    for stream in streams:
        stream.cancel()
    await scaler.until(lambda: open_stream_count(scaler.status), 0.0)


async def open_stream_count(status: IntegrationStatus) -> float | None:
    """Return the number of open streams."""
    return status.registry.get_sample_value("rfork_scaler_streams")
