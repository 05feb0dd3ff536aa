"""Spans of KEDA's calls."""

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
    """A call was aborted."""


@dataclass
class FakeCallContext:
    """Context of a call."""

    metadata: tuple[tuple[str, str | bytes], ...] = (("user-agent", "keda"),)
    ended: list[grpc.StatusCode] = field(default_factory=list)

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return self.metadata

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        self.ended.append(code)
        raise Aborted(details)


class ScalerHarness:
    """A scaler with its planner and engines."""

    def __init__(self, tracer: Tracer) -> None:
        self.clock, self.planner_api, self.engines = FakeClock(), ScriptedPlannerApi(), FakeEngines()
        self.planner_api.instance_views = (instance("10.0.0.1"), instance("10.0.0.2"))
        self.engines.pages = {"10.0.0.1": engine(3)}
        status = IntegrationStatus("scaler")
        metric_source = MetricSource(self.planner_api, self.engines, self.clock, status.registry, tracer)
        self.scaler = Scaler(metric_source, status, tracer)

    async def is_active(self, call: FakeCallContext, **metadata: str) -> bool:
        """Call IsActive."""
        scaled_object = pb.ScaledObjectRef(name="llama", namespace="serving", scalerMetadata={**WAITING, **metadata})
        return (await self.scaler.IsActive(scaled_object, call)).result  # type: ignore[arg-type]


async def test_a_call_continues_the_callers_trace() -> None:
    """It contains the requests to the planner and the engines, with OpenTelemetry's attribute names."""
    recorder = SpanRecorder()
    assert await ScalerHarness(recorder.tracer).is_active(FakeCallContext((("traceparent", CALLER.traceparent),)))
    name = f"{SERVICE}/IsActive"
    assert {name: "another process's", "GET /v1/instances": name, "poll engines": name} == {
        each: recorder.parent(each) for each in recorder.spans
    }
    assert {
        "rpc.system.name": "grpc", "rpc.method": name, "rpc.response.status_code": "OK",
        "k8s.namespace.name": "serving", "rfork.scaled_object": "llama", "rfork.model": MODEL,
        "rfork.metric": "waiting", "rfork.value": 3.0, "rfork.active": True,
    } == recorder.attributes(name)  # fmt: skip
    assert 2 == recorder.attributes("poll engines")["rfork.engines"]
    assert 1 == recorder.attributes("poll engines")["rfork.silent"]


async def test_shared_requests_belong_to_the_first_callers_span() -> None:
    """Callers within the same second share the requests."""
    recorder = SpanRecorder()
    harness = ScalerHarness(recorder.tracer)
    await asyncio.gather(*(harness.is_active(FakeCallContext()) for _ in range(5)))
    assert {f"{SERVICE}/IsActive": 5, "GET /v1/instances": 1, "poll engines": 1} == {
        name: recorder.names.count(name) for name in recorder.spans
    }


@pytest.mark.parametrize(
    ("metadata", "code", "failed"),
    [({"target": "many"}, "INVALID_ARGUMENT", False), ({"metric": "forks"}, "UNAVAILABLE", True)],
)
async def test_failed_calls_record_the_status(metadata: dict[str, str], code: str, failed: bool) -> None:
    """The span has the gRPC status. An error of the caller does not fail the span."""
    recorder, call = SpanRecorder(), FakeCallContext()
    harness = ScalerHarness(recorder.tracer)
    harness.planner_api.unavailable_reason = "the planner is unreachable"
    with pytest.raises(Aborted):
        await harness.is_active(call, **metadata)
    span = recorder.spans[f"{SERVICE}/IsActive"]
    status_code = recorder.attributes(f"{SERVICE}/IsActive")["rpc.response.status_code"]
    assert code == call.ended[0].name
    assert code == status_code
    assert failed == (not span.status.is_unset)


async def test_only_the_first_response_of_a_stream_is_traced() -> None:
    """The polls that follow get no spans."""
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
    assert 1 == before.count(f"{SERVICE}/StreamIsActive")
    assert before == recorder.names


async def test_without_tracing_calls_work() -> None:
    """The trace context of the caller is ignored."""
    assert await ScalerHarness(NOOP_TRACER).is_active(FakeCallContext((("traceparent", "nonsense"),)))
