"""KEDA's calls as spans."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
import pytest

from planner.integrations.health import IntegrationStatus
from planner.integrations.keda.metric_source import MetricSource
from planner.integrations.keda.scaler import SERVICE, Scaler
from planner.integrations.keda.v1 import externalscaler_pb2 as pb
from rfork.tracing import NOOP_TRACER, TraceContext, Tracer
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.keda.fakes import (
    MODEL,
    FakeEngines,
    ScriptedPlannerApi,
    engine,
    instance,
)
from tests.unit.tracing.span_recorder import SpanRecorder

CALLER = TraceContext("1" * 32, "2" * 16)
WAITING = {"model": MODEL, "metric": "waiting", "target": "4", "port": "8000"}


class Aborted(Exception):
    """A call was ended with an error."""


@dataclass
class FakeCallContext:
    """A call's context."""

    metadata: tuple[tuple[str, str | bytes], ...] = (("user-agent", "keda"),)
    ended: list[grpc.StatusCode] = field(default_factory=list)

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return self.metadata

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        self.ended.append(code)
        raise Aborted(details)


class ScalerHarness:
    """A scaler, its planner and its engines."""

    def __init__(self, tracer: Tracer) -> None:
        self.clock, self.planner_api, self.engines = FakeClock(), ScriptedPlannerApi(), FakeEngines()
        self.planner_api.instance_views = (instance("10.0.0.1"), instance("10.0.0.2"))
        self.engines.pages = {"10.0.0.1": engine(3)}
        status = IntegrationStatus("scaler")
        metric_source = MetricSource(self.planner_api, self.engines, self.clock, status.registry, tracer)
        self.scaler = Scaler(metric_source, status, tracer)

    async def is_active(self, call: FakeCallContext, **metadata: str) -> bool:
        """KEDA asks whether there is anything to do."""
        scaled_object = pb.ScaledObjectRef(name="llama", namespace="serving", scalerMetadata={**WAITING, **metadata})
        return (await self.scaler.IsActive(scaled_object, call)).result  # type: ignore[arg-type]


async def test_a_call_goes_on_with_its_callers_trace() -> None:
    """Within it the looks at planner and engines; told by the names that OpenTelemetry has for calls."""
    recorder = SpanRecorder()
    assert await ScalerHarness(recorder.tracer).is_active(FakeCallContext((("traceparent", CALLER.traceparent),)))
    name = f"{SERVICE}/IsActive"
    assert {name: "another process's", "GET /v1/instances": name, "ask engines": name} == {
        each: recorder.parent(each) for each in recorder.spans
    }
    assert {
        "rpc.system.name": "grpc", "rpc.method": name, "rpc.response.status_code": "OK",
        "k8s.namespace.name": "serving", "rfork.scaled_object": "llama", "rfork.model": MODEL,
        "rfork.metric": "waiting", "rfork.value": 3.0, "rfork.active": True,
    } == recorder.attributes(name)  # fmt: skip
    assert (2, 1) == tuple(recorder.attributes("ask engines")[f"rfork.{key}"] for key in ("engines", "silent"))


async def test_whoever_asks_within_a_second_shares_the_looks() -> None:
    """Which are spans of the first."""
    recorder = SpanRecorder()
    harness = ScalerHarness(recorder.tracer)
    await asyncio.gather(*(harness.is_active(FakeCallContext()) for _ in range(5)))
    assert {f"{SERVICE}/IsActive": 5, "GET /v1/instances": 1, "ask engines": 1} == {
        name: recorder.names.count(name) for name in recorder.spans
    }


@pytest.mark.parametrize(
    ("metadata", "code", "failed"),
    [({"target": "many"}, "INVALID_ARGUMENT", False), ({"metric": "forks"}, "UNAVAILABLE", True)],
)
async def test_what_is_not_answered_says_why(metadata: dict[str, str], code: str, failed: bool) -> None:
    """By its code; a mistake of the caller's is no failure of the scaler's."""
    recorder, call = SpanRecorder(), FakeCallContext()
    harness = ScalerHarness(recorder.tracer)
    harness.planner_api.unavailable_reason = "the planner is away"
    with pytest.raises(Aborted):
        await harness.is_active(call, **metadata)
    span = recorder.spans[f"{SERVICE}/IsActive"]
    status_code = recorder.attributes(f"{SERVICE}/IsActive")["rpc.response.status_code"]
    assert (code, code, failed) == (call.ended[0].name, status_code, not span.status.is_unset)


async def test_a_stream_is_its_first_answer() -> None:
    """What it looks at from then on, every two seconds, is none."""
    recorder = SpanRecorder()
    harness = ScalerHarness(recorder.tracer)
    scaled_object = pb.ScaledObjectRef(scalerMetadata={**WAITING, "poll": "0.1"})
    states = harness.scaler.StreamIsActive(scaled_object, FakeCallContext())  # type: ignore[arg-type]
    assert (await anext(states)).result
    before = list(recorder.names)
    harness.clock.now += 60
    harness.engines.pages["10.0.0.1"] = engine(0)
    assert not (await anext(states)).result
    await states.aclose()  # type: ignore[attr-defined]
    assert (1, before) == (before.count(f"{SERVICE}/StreamIsActive"), recorder.names)


async def test_untraced_it_answers_all_the_same() -> None:
    """And looks at nothing that the caller sent beside."""
    assert await ScalerHarness(NOOP_TRACER).is_active(FakeCallContext((("traceparent", "nonsense"),)))
