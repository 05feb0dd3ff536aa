"""The planner's spans in a fork's trace."""

from __future__ import annotations

import asyncio

import httpx

from planner.app import create_app
from rfork.schema import ForkResult
from rfork.settings import PlannerSettings
from rfork.tracing import TraceContext
from tests.unit.planner.builders import FakeTime, fork_request, seed_report
from tests.unit.tracing.span_recorder import SpanRecorder

JSON = {"Content-Type": "application/json"}
CALLERS = [TraceContext(f"{number}" * 32, f"{number}" * 16) for number in (1, 2, 3)]


async def request_forks(recorder: SpanRecorder, *callers: TraceContext | None, batch_s: float) -> list[int]:
    """Return the statuses of concurrent fork requests, each in its caller's trace."""
    settings = PlannerSettings(batch_window_s=batch_s)
    app = create_app(settings, FakeTime().clock, tracer=recorder.tracer)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://planner", headers=JSON) as web:
        await web.put("/v1/instances/s", content=seed_report("s").model_dump_json())
        responses = await asyncio.gather(
            *(
                web.post(
                    "/v1/forks",
                    content=fork_request(f"t{number}").model_dump_json(),
                    headers={} if caller is None else {"traceparent": caller.traceparent},
                )
                for number, caller in enumerate(callers)
            )
        )
        finish = ForkResult(outcome="forked", seconds=1, bytes_read=1)
        await web.post("/v1/forks/fork-t0/finish", content=finish.model_dump_json())
        await web.get("/v1/forks")
    return [response.status_code for response in responses]


async def test_a_request_continues_the_trace_of_its_caller() -> None:
    """Waiting and planning are child spans; queries and heartbeats have no spans."""
    recorder = SpanRecorder()
    assert [200] == await request_forks(recorder, CALLERS[0], batch_s=0.0)
    assert {
        "POST /v1/forks": "another process's",
        "wait for plan": "POST /v1/forks",
        "make plan": "wait for plan",
        "POST /v1/forks/{fork_id}/finish": None,
    } == {name: recorder.parent(name) for name in recorder.spans}
    plan, request = recorder.attributes("make plan"), recorder.attributes("POST /v1/forks")
    assert CALLERS[0].trace_id == f"{recorder.spans['make plan'].context.trace_id:032x}"
    assert 200 == request["http.response.status_code"]
    assert "m" == plan["rfork.model"]
    assert 1 == plan["rfork.batch_size"]
    assert 1 == plan["rfork.group_size"]
    assert 1 == plan["rfork.routes"]
    finish = recorder.attributes("POST /v1/forks/{fork_id}/finish")
    assert "fork-t0" == finish["rfork.fork"]
    assert 204 == finish["http.response.status_code"]


async def test_a_plan_of_several_forks_links_to_the_other_traces() -> None:
    """It belongs to the first trace; each fork waits in its own."""
    recorder = SpanRecorder()
    assert [200] * 3 == await request_forks(recorder, *CALLERS, batch_s=0.5)
    (plan,) = recorder.all_named("make plan")
    waits = recorder.all_named("wait for plan")
    own = f"{plan.context.trace_id:032x}"
    linked = [f"{link.context.trace_id:032x}" for link in plan.links]
    assert 3 == len(waits)
    assert {caller.trace_id for caller in CALLERS} == {own, *linked}
    assert 3 == (plan.attributes or {})["rfork.batch_size"]


async def test_an_invalid_request_has_a_span_too() -> None:
    """It has the status; an invalid trace parent is ignored."""
    recorder = SpanRecorder()
    app = create_app(PlannerSettings(), FakeTime().clock, tracer=recorder.tracer)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://planner", headers=JSON) as web:
        await web.post("/v1/forks", content="{", headers={"traceparent": "00-nonsense"})
    request = recorder.attributes("POST /v1/forks")
    assert 422 == request["http.response.status_code"]
    assert recorder.parent("POST /v1/forks") is None
