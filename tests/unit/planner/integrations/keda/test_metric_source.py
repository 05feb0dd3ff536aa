"""Polling of engines and planner for the metrics, shared by all triggers."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from planner.integrations.keda.metric_source import CACHE_TTL_S, HOST_RETENTION_S, WARMUP_S, MetricSource
from planner.integrations.keda.signals import MetricUnavailable, TriggerReading
from planner.integrations.keda.triggers import Trigger
from planner.integrations.planner_api import PlannerUnavailable
from rfork.schema import InstanceInfo
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.keda.fakes import (
    MODEL,
    VLLM,
    FakeEngines,
    ScriptedPlannerApi,
    engine,
    fork,
    instance,
    scaleup,
)

WAITING = Trigger(MODEL, "waiting", 10.0, port=8000)


def with_holder(view: InstanceInfo) -> InstanceInfo:
    """Return the instance as a holder's image."""
    return view.model_copy(update={"report": view.report.model_copy(update={"holder": "h"})})


class MetricSourceHarness:
    """A MetricSource over fakes, with a clock that the test moves."""

    def __init__(self, **pages: str) -> None:
        self.planner_api, self.engines, self.clock = ScriptedPlannerApi(), FakeEngines(pages), FakeClock()
        self.registry = CollectorRegistry()
        self.metric_source = MetricSource(self.planner_api, self.engines, self.clock, self.registry)
        self.clock.now += WARMUP_S

    async def read_after(self, seconds: float = CACHE_TTL_S) -> TriggerReading:
        """Advance the clock and read `waiting`."""
        self.clock.now += seconds
        return await self.metric_source.read(WAITING)

    def poll_count(self, result: str) -> float | None:
        return self.registry.get_sample_value("rfork_scaler_engine_requests_total", {"result": result})


async def test_engines_are_polled_at_their_listed_hosts() -> None:
    """Each server is polled once, at the trigger's port and path; values are summed."""
    harness = MetricSourceHarness(a=engine(3), b=engine(4))
    harness.planner_api.instance_views = (instance("a"), instance("b"), instance("c", "loading"))
    trigger = Trigger(MODEL, "waiting", 10.0, port=9000, path="/m", scheme="https")
    assert TriggerReading(7.0, True) == await harness.metric_source.read(trigger)
    assert ["https://a:9000/m", "https://b:9000/m"] == sorted(harness.engines.requests)


async def test_holders_are_no_engines() -> None:
    """Their images have no server, and are no replicas that start."""
    harness = MetricSourceHarness(a=engine(3))
    harness.planner_api.instance_views = (
        instance("a"),
        with_holder(instance("b")),
        with_holder(instance("c", "loading")),
    )
    assert TriggerReading(3.0, True) == await harness.metric_source.read(WAITING)
    assert ["http://a:8000/metrics"] == harness.engines.requests


async def test_a_prefetch_activates_nothing() -> None:
    """No engine serves or starts."""
    harness = MetricSourceHarness()
    harness.planner_api.instance_views = (with_holder(instance("c", "loading")),)
    assert TriggerReading(0.0, False) == await harness.metric_source.read(WAITING)


async def test_many_triggers_share_one_poll() -> None:
    """Within a second, the planner and each engine are polled once for all metrics."""
    harness = MetricSourceHarness(a=VLLM)
    harness.planner_api.instance_views = (instance("a"),)
    triggers = [Trigger(MODEL, metric, 1.0, port=8000) for metric in ("waiting", "running", "kv_cache")]
    readings = await asyncio.gather(*(harness.metric_source.read(trigger) for trigger in triggers * 100))
    assert [20.0, 7.0, 0.5] == [reading.value for reading in readings[:3]]
    assert ["instances of org/llama"] == harness.planner_api.requests
    assert ["http://a:8000/metrics"] == harness.engines.requests
    harness.engines.pages["a"] = engine(1)
    assert 20.0 == (await harness.read_after(0.9)).value
    assert 1.0 == (await harness.read_after(0.1)).value


async def test_planner_metrics_need_no_engine() -> None:
    """Forks and scale-ups come from the planner."""
    harness = MetricSourceHarness()
    harness.planner_api.fork_views, harness.planner_api.scaleup_views = (fork(1), fork(2)), (scaleup(3, 1),)
    assert TriggerReading(2.0, True) == await harness.metric_source.read(Trigger(MODEL, "forks", 1.0))
    assert TriggerReading(3.0, True) == await harness.metric_source.read(Trigger(MODEL, "expected", 1.0))
    assert [] == harness.engines.requests
    assert ["forks", "scaleups"] == harness.planner_api.requests


async def test_silent_engines_are_left_out_and_counted() -> None:
    """The others count. If none responds, the value is unknown, with the reasons."""
    harness = MetricSourceHarness(a=engine(3))
    harness.planner_api.instance_views = (instance("a"), instance("b"))
    assert TriggerReading(3.0, True) == await harness.read_after()
    assert 1.0 == harness.poll_count("ok")
    assert 1.0 == harness.poll_count("failed")
    del harness.engines.pages["a"]
    with pytest.raises(MetricUnavailable, match="a did not respond at http://a:8000/metrics; b did not respond"):
        await harness.read_after()


async def test_an_announcement_activates_a_model_without_engines() -> None:
    """Inactive without engines, active once replicas are announced or load, then by the engines' metrics."""
    harness = MetricSourceHarness(a=engine(0))
    states = [(await harness.read_after()).active]
    harness.planner_api.scaleup_views = (scaleup(1),)
    states.append((await harness.read_after()).active)
    harness.planner_api.scaleup_views, harness.planner_api.instance_views = (), (instance("a", "loading"),)
    states.append((await harness.read_after()).active)
    harness.planner_api.instance_views = (instance("a"),)
    states.append((await harness.read_after()).active)
    assert [False, True, True, False] == states


async def test_after_a_restart_of_the_planner_unlisted_engines_still_count() -> None:
    """Engines that it does not list yet are polled for a while, and count if they respond."""
    harness = MetricSourceHarness(a=engine(3), b=engine(4))
    harness.planner_api.instance_views = (instance("a"), instance("b"))
    values = [(await harness.read_after()).value]
    harness.planner_api.instance_views = ()
    values.append((await harness.read_after()).value)
    harness.planner_api.instance_views = (instance("b"),)
    values.append((await harness.read_after()).value)
    del harness.engines.pages["a"]  # it ended, which differs from a planner that forgot it
    values.append((await harness.read_after()).value)
    harness.engines.requests.clear()
    values.append((await harness.read_after(HOST_RETENTION_S)).value)
    harness.planner_api.instance_views, harness.planner_api.unavailable_reason = (), "an hour without a planner"
    with pytest.raises(PlannerUnavailable):
        await harness.read_after(3600)
    harness.planner_api.unavailable_reason = ""
    values.append((await harness.read_after()).value)
    assert [7.0, 7.0, 7.0, 4.0, 4.0, 4.0] == values
    assert ["http://b:8000/metrics"] * 2 == harness.engines.requests


async def test_an_empty_list_right_after_the_start_is_unknown() -> None:
    """Until instances had time to report, an empty list is unknown, not zero. Announcements count."""
    harness = MetricSourceHarness()
    harness.clock.now -= WARMUP_S
    with pytest.raises(MetricUnavailable, match="the planner lists no instance of org/llama, but the scaler has just"):
        await harness.read_after()
    harness.planner_api.scaleup_views = (scaleup(1),)
    assert TriggerReading(0.0, True) == await harness.read_after()
    harness.planner_api.scaleup_views = ()
    assert TriggerReading(0.0, False) == await harness.read_after(WARMUP_S - 2 * CACHE_TTL_S)


async def test_without_engines_the_value_is_zero() -> None:
    """The planner lists none and none responds: the value is zero, without an error."""
    harness = MetricSourceHarness(a=engine(3))
    harness.planner_api.instance_views = (instance("a"),)
    await harness.read_after()
    harness.planner_api.instance_views, harness.engines.pages = (), {}
    assert TriggerReading(0.0, False) == await harness.read_after()


async def test_errors_of_the_planner_reach_all_callers() -> None:
    """The error goes to all concurrent callers and is not cached."""
    harness = MetricSourceHarness(a=engine(3))
    harness.planner_api.instance_views, harness.planner_api.unavailable_reason = (
        (instance("a"),),
        "planner http://p is unreachable",
    )
    results = await asyncio.gather(*(harness.metric_source.read(WAITING) for _ in range(3)), return_exceptions=True)
    assert [PlannerUnavailable] * 3 == [type(result) for result in results]
    assert 1 == len(harness.planner_api.requests)
    harness.planner_api.unavailable_reason = ""
    assert TriggerReading(3.0, True) == await harness.read_after()


async def test_a_cancelled_caller_does_not_cancel_shared_requests() -> None:
    """Other callers of the same request get the response. Requests in progress end with the source."""
    harness = MetricSourceHarness(a=engine(3))
    harness.planner_api.instance_views = (instance("a"),)
    first = asyncio.create_task(harness.metric_source.read(WAITING))
    second = asyncio.create_task(harness.metric_source.read(WAITING))
    await asyncio.sleep(0)
    first.cancel()
    assert TriggerReading(3.0, True) == await second
    with pytest.raises(asyncio.CancelledError):
        await first
    harness.clock.now += CACHE_TTL_S
    third = asyncio.create_task(harness.metric_source.read(WAITING))
    await asyncio.sleep(0)
    await harness.metric_source.close()
    with pytest.raises(asyncio.CancelledError):
        await third
