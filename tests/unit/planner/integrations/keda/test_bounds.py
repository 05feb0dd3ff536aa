"""Limits on what clients can send to the scaler: pages, metadata, and remembered state of both."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from planner.integrations.keda import metric_source
from planner.integrations.keda.metric_source import MAX_CONCURRENT, MetricSource
from planner.integrations.keda.signals import MAX_SAMPLE_BYTES, MAX_SAMPLES, MetricPage, parse_metrics
from planner.integrations.keda.triggers import MAX_KEYS, InvalidTrigger, Trigger, parse_trigger
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.keda.fakes import (
    MODEL,
    FakeEngines,
    ScriptedPlannerApi,
    engine,
    instance,
)

WAITING = Trigger(MODEL, "waiting", 10.0, port=8000)


def samples(number: int) -> bytes:
    return b"".join(b'vllm:num_requests_waiting{engine="%d"} 1\n' % each for each in range(number))


def test_a_page_with_too_many_samples_is_rejected() -> None:
    """Parsing it would take seconds and block all other triggers."""
    assert MAX_SAMPLES == parse_metrics(samples(MAX_SAMPLES))["waiting"]
    with pytest.raises(ValueError, match="more than"):
        parse_metrics(samples(MAX_SAMPLES + 1))
    with pytest.raises(ValueError, match="more than"):
        parse_metrics(b'vllm:num_requests_waiting{engine="' + b"a" * MAX_SAMPLE_BYTES + b'"} 1\n')


def test_metadata_with_too_many_keys_is_rejected() -> None:
    """Each unknown key is compared with the known ones."""
    with pytest.raises(InvalidTrigger, match=f"the maximum is {MAX_KEYS}"):
        parse_trigger({f"key{number}": "" for number in range(MAX_KEYS + 1)})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


async def test_the_oldest_silent_endpoints_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    """Callers may name any path, so memory is bounded: the endpoint polled longest ago is logged again."""
    monkeypatch.setattr(metric_source, "MAX_SILENT_ENDPOINTS", 2)
    planner_api, clock = ScriptedPlannerApi(), FakeClock()
    planner_api.instance_views = (instance("a"), instance("b"))
    source = MetricSource(planner_api, FakeEngines({"a": engine(1)}), clock, CollectorRegistry())
    logged = []
    for path in ("/1", "/2", "/1", "/3", "/1", "/2"):
        clock.now += 60
        before = len(lines.records)
        await source.read(replace(WAITING, path=path))
        logged.append((path, len(lines.records) - before))
    assert [("/1", 1), ("/2", 1), ("/1", 0), ("/3", 1), ("/1", 0), ("/2", 1)] == logged


async def test_removed_engines_are_not_logged_as_responding(lines: pytest.LogCaptureFixture) -> None:
    """If a silent engine is removed and no other exists, no line states that all engines respond."""
    planner_api, clock, engines = ScriptedPlannerApi(), FakeClock(), FakeEngines({"b": engine(1)})
    source = MetricSource(planner_api, engines, clock, CollectorRegistry())
    logged = []
    for listed in (("a", "b"), (), ("a", "b"), ("b",)):
        clock.now += 60
        planner_api.instance_views = tuple(map(instance, listed))
        engines.pages = {"b": engine(1)} if listed else {}
        await source.read(WAITING)
        logged.append(["again" in record.message for record in lines.records])
        lines.clear()
    assert [[False], [], [False], [True]] == logged


class CountingEngines:
    """Engines that count concurrent requests."""

    def __init__(self) -> None:
        self.in_flight = self.max_in_flight = 0

    async def read(self, host: str, *, scheme: str, port: int, path: str) -> MetricPage:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return {"waiting": 1.0}


async def test_requests_to_one_model_are_limited() -> None:
    """All of its engines are polled, a limited number at a time."""
    planner_api, engines = ScriptedPlannerApi(), CountingEngines()
    planner_api.instance_views = tuple(instance(f"h{number}") for number in range(3 * MAX_CONCURRENT))
    reading = await MetricSource(planner_api, engines, FakeClock(), CollectorRegistry()).read(WAITING)
    assert 3.0 * MAX_CONCURRENT == reading.value
    assert MAX_CONCURRENT == engines.max_in_flight
