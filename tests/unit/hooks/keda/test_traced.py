"""KEDA's calls as spans."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
import pytest

from planner.hooks.keda.load import Load
from planner.hooks.keda.scaler import SERVICE, Scaler
from planner.hooks.keda.v1 import externalscaler_pb2 as pb
from planner.hooks.probes import Status
from rfork.tracing import OFF, TraceContext, Tracer
from tests.unit.clock import Clock
from tests.unit.hooks.keda.fakes import MODEL, FakeEngines, FakeFleet, engine, instance
from tests.unit.tracing.spans import Kept

CALLER = TraceContext("1" * 32, "2" * 16)
WAITING = {"model": MODEL, "metric": "waiting", "target": "4", "port": "8000"}


class Aborted(Exception):
    """A call was ended with an error."""


@dataclass
class Call:
    """A call's context."""

    metadata: tuple[tuple[str, str | bytes], ...] = (("user-agent", "keda"),)
    ended: list[grpc.StatusCode] = field(default_factory=list)

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return self.metadata

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        self.ended.append(code)
        raise Aborted(details)


class Bench:
    """A scaler, its planner and its engines."""

    def __init__(self, tracer: Tracer) -> None:
        self.clock, self.fleet, self.engines = Clock(), FakeFleet(), FakeEngines()
        self.fleet.listed = (instance("10.0.0.1"), instance("10.0.0.2"))
        self.engines.pages = {"10.0.0.1": engine(3)}
        status = Status("scaler")
        load = Load(self.fleet, self.engines, self.clock, status.registry, tracer)
        self.scaler = Scaler(load, status, tracer)

    async def active(self, call: Call, **metadata: str) -> bool:
        """KEDA asks whether there is anything to do."""
        asked = pb.ScaledObjectRef(name="llama", namespace="serving", scalerMetadata={**WAITING, **metadata})
        return (await self.scaler.IsActive(asked, call)).result  # type: ignore[arg-type]


async def test_a_call_goes_on_with_its_callers_trace() -> None:
    """Within it the looks at planner and engines; told by the names that OpenTelemetry has for calls."""
    kept = Kept()
    assert await Bench(kept.tracer).active(Call((("traceparent", CALLER.traceparent),)))
    name = f"{SERVICE}/IsActive"
    assert {name: "another process's", "GET /v1/instances": name, "ask engines": name} == {
        each: kept.parent(each) for each in kept.spans
    }
    assert {
        "rpc.system.name": "grpc", "rpc.method": name, "rpc.response.status_code": "OK",
        "k8s.namespace.name": "serving", "rfork.scaled_object": "llama", "rfork.model": MODEL,
        "rfork.metric": "waiting", "rfork.value": 3.0, "rfork.active": True,
    } == kept.attributes(name)  # fmt: skip
    assert (2, 1) == tuple(kept.attributes("ask engines")[f"rfork.{key}"] for key in ("engines", "silent"))


async def test_whoever_asks_within_a_second_shares_the_looks() -> None:
    """Which are spans of the first."""
    kept = Kept()
    bench = Bench(kept.tracer)
    await asyncio.gather(*(bench.active(Call()) for _ in range(5)))
    assert {f"{SERVICE}/IsActive": 5, "GET /v1/instances": 1, "ask engines": 1} == {
        name: kept.names.count(name) for name in kept.spans
    }


@pytest.mark.parametrize(
    ("metadata", "code", "failed"),
    [({"target": "many"}, "INVALID_ARGUMENT", False), ({"metric": "forks"}, "UNAVAILABLE", True)],
)
async def test_what_is_not_answered_says_why(metadata: dict[str, str], code: str, failed: bool) -> None:
    """By its code; a mistake of the caller's is no failure of the scaler's."""
    kept, call = Kept(), Call()
    bench = Bench(kept.tracer)
    bench.fleet.away = "the planner is away"
    with pytest.raises(Aborted):
        await bench.active(call, **metadata)
    span = kept.spans[f"{SERVICE}/IsActive"]
    told = kept.attributes(f"{SERVICE}/IsActive")["rpc.response.status_code"]
    assert (code, code, failed) == (call.ended[0].name, told, not span.status.is_unset)


async def test_a_stream_is_its_first_answer() -> None:
    """What it looks at from then on, every two seconds, is none."""
    kept = Kept()
    bench = Bench(kept.tracer)
    asked = pb.ScaledObjectRef(scalerMetadata={**WAITING, "poll": "0.1"})
    states = bench.scaler.StreamIsActive(asked, Call())  # type: ignore[arg-type]
    assert (await anext(states)).result
    before = list(kept.names)
    bench.clock.now += 60
    bench.engines.pages["10.0.0.1"] = engine(0)
    assert not (await anext(states)).result
    await states.aclose()  # type: ignore[attr-defined]
    assert (1, before) == (before.count(f"{SERVICE}/StreamIsActive"), kept.names)


async def test_untraced_it_answers_all_the_same() -> None:
    """And looks at nothing that the caller sent beside."""
    assert await Bench(OFF).active(Call((("traceparent", "nonsense"),)))
