"""Scale-ups over the REST interface, without sockets."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from planner.api import examples
from planner.app import create_app
from rfork.planner_client.client import PlannerClient
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import AppTransport
from tests.unit.planner.builders import FakeTime, fork_request, seed_report

SCALEUP: dict[str, Any] = {"scaleup_id": "up", "model": "m", "replicas": 3, "announced_by": "deployment/default/llama"}
NO_SOURCE_REASON = "no instance has m: one replica reads storage for all, or each loads by its engine's loader"


@pytest.fixture
def app(time: FakeTime) -> FastAPI:
    """A planner without batching: each request here has its own event loop."""
    settings = PlannerSettings.model_validate({"lease_keys": "s" * 32, "batch_window_s": 0, "scaleup_wait_s": 0})
    return create_app(settings, time.clock)


def gauges(web: httpx.Client) -> dict[str, float]:
    """Return the scale-up metrics."""
    kept = ("scaleups", "expected_replicas", "scaleup_batches_total")
    names = tuple(f"rfork_planner_{name}" for name in kept)
    lines = [line.split(" ") for line in web.get("/metrics").text.splitlines()]
    return {line[0]: float(line[1]) for line in lines if line[0].startswith(names)}


def test_a_scale_up_is_announced_counted_down_and_withdrawn(web: httpx.Client, planner: PlannerClient) -> None:
    """A second announcement starts the count again; withdrawing twice is harmless."""
    announced = web.post("/v1/scaleups", json=SCALEUP).json()
    assert {**SCALEUP, "version": None, "expires_in_s": 900.0, "hosts": []} == announced["scaleup"]
    assert 0 == announced["arrived_count"]
    assert NO_SOURCE_REASON == announced["reason"]
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    counted_down = web.get("/v1/scaleups/up").json()
    assert 1 == counted_down["arrived_count"]
    assert "they fork from 1 seed" == counted_down["reason"]
    announced_again = web.post("/v1/scaleups", json={**SCALEUP, "replicas": 2}).json()
    assert 0 == announced_again["arrived_count"]
    assert [announced_again] == web.get("/v1/scaleups").json()
    assert [204, 204] == [web.delete("/v1/scaleups/up").status_code for _ in range(2)]
    assert [] == web.get("/v1/scaleups").json()


def test_zero_replicas_withdraw_a_scale_up(web: httpx.Client) -> None:
    """This works for a known and for an unknown scale-up."""
    web.post("/v1/scaleups", json=SCALEUP)
    responses = [web.post("/v1/scaleups", json={**SCALEUP, "replicas": 0}) for _ in range(2)]
    assert [(200, "no replicas are expected any more")] * 2 == [
        (response.status_code, response.json()["reason"]) for response in responses
    ]
    assert [] == web.get("/v1/scaleups").json()


def test_an_unknown_scale_up_is_a_problem(web: httpx.Client) -> None:
    """The response is 404 with problem `unknown-scaleup`."""
    response = web.get("/v1/scaleups/up")
    assert 404 == response.status_code
    assert "unknown-scaleup" == response.json()["type"].rpartition("/")[2]
    assert "unknown scale-up up" == response.json()["detail"]


WRONG = [
    ("replicas", -1),
    ("replicas", 100_001),
    ("expires_in_s", 0),
    ("expires_in_s", 86_401),
    ("scaleup_id", "a/b"),
    ("model", ""),
    ("more", 1),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_invalid_scale_ups_are_rejected(web: httpx.Client, field: str, value: object) -> None:
    """The response is 422 and names the field; nothing is announced."""
    response = web.post("/v1/scaleups", json={**SCALEUP, field: value})
    assert 422 == response.status_code
    assert field == response.json()["errors"][0]["field"]
    assert [] == web.get("/v1/scaleups").json()


@pytest.mark.parametrize("body", [examples.SCALEUP, examples.FINISHED_SCALEUP])
def test_the_documented_examples_are_accepted(web: httpx.Client, body: Any) -> None:
    """They are sent as the OpenAPI page shows them."""
    response = web.post("/v1/scaleups", json=body.model_dump(mode="json"))
    assert 200 == response.status_code
    assert body.model_dump(mode="json") == response.json()["scaleup"]


def test_a_scale_up_may_expire_immediately(web: httpx.Client) -> None:
    """Its remaining time is 0."""
    response = web.post("/v1/scaleups", json={**SCALEUP, "expires_in_s": 5e-324})
    assert 200 == response.status_code
    assert 0.0 == response.json()["expires_in_s"]


def test_scale_ups_require_the_operator_role(time: FakeTime) -> None:
    """A role that may fork may not make others wait."""
    settings = PlannerSettings.model_validate({"token": "rule"})
    web = httpx.Client(base_url="http://planner", transport=AppTransport(create_app(settings, time.clock)))
    rule = {"Authorization": "Bearer rule"}
    responses = [web.post("/v1/scaleups", json=SCALEUP), web.post("/v1/scaleups", json=SCALEUP, headers=rule)]
    document = web.get("/openapi.json", headers=rule).json()["paths"]
    roles = {
        f"{method} {path}": operation["x-rfork-role"]
        for path, methods in document.items()
        for method, operation in methods.items()
        if path.startswith("/v1/scaleups")
    }
    assert [401, 200] == [response.status_code for response in responses]
    assert {
        "post /v1/scaleups": "operator",
        "get /v1/scaleups": "reader",
        "get /v1/scaleups/{scaleup_id}": "reader",
        "delete /v1/scaleups/{scaleup_id}": "operator",
    } == roles


def test_metrics_count_expected_replicas(web: httpx.Client, planner: PlannerClient) -> None:
    """Scale-ups, missing replicas and closed batches are exported."""
    before = gauges(web)
    web.post("/v1/scaleups", json=SCALEUP)
    web.post("/v1/scaleups", json={**SCALEUP, "scaleup_id": "other", "model": "n", "replicas": 1})
    planner.request_plan(fork_request("a"))
    after = gauges(web)
    batches = {f'rfork_planner_scaleup_batches_total{{complete="{complete}"}}': 0.0 for complete in ("true", "false")}
    assert {"rfork_planner_scaleups": 0.0, "rfork_planner_expected_replicas": 0.0, **batches} == before
    assert {"rfork_planner_scaleups": 2.0, "rfork_planner_expected_replicas": 3.0, **batches} == after
