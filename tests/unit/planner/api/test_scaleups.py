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

SCALEUP: dict[str, Any] = {"scaleup_id": "up", "model": "m", "replicas": 3, "by": "deployment/default/llama"}
NO_SOURCE_REASON = "no instance holds m: they read storage once, or load by themselves"


@pytest.fixture
def app(time: FakeTime) -> FastAPI:
    """A planner that waits for nobody: each request here has an event loop of its own."""
    settings = PlannerSettings.model_validate({"secret": "s" * 32, "batch_s": 0, "gather_s": 0})
    return create_app(settings, time.clock)


def gauges(web: httpx.Client) -> dict[str, float]:
    """What the metrics say of scale-ups."""
    kept = ("scaleups", "expected_replicas", "gathered_batches_total")
    names = tuple(f"rfork_planner_{name}" for name in kept)
    lines = [line.split(" ") for line in web.get("/metrics").text.splitlines()]
    return {line[0]: float(line[1]) for line in lines if line[0].startswith(names)}


def test_a_scale_up_from_its_announcement_to_its_end(web: httpx.Client, planner: PlannerClient) -> None:
    """Announced, counted down, said again, withdrawn."""
    first = web.post("/v1/scaleups", json=SCALEUP).json()
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    second = web.get("/v1/scaleups/up").json()
    again = web.post("/v1/scaleups", json={**SCALEUP, "replicas": 2}).json()
    listed = web.get("/v1/scaleups").json()
    ended = [web.delete("/v1/scaleups/up").status_code, web.delete("/v1/scaleups/up").status_code]
    assert ([0, 1, 0], [NO_SOURCE_REASON, "they fork from 1 seed"]) == (
        [first["arrived"], second["arrived"], again["arrived"]], [first["reason"], second["reason"]],
    )  # fmt: skip
    assert ({**SCALEUP, "version": None, "expires_in_s": 900.0}, [again], [204, 204], []) == (
        first["scaleup"], listed, ended, web.get("/v1/scaleups").json(),
    )  # fmt: skip


def test_none_withdraws(web: httpx.Client) -> None:
    """Of one that is known, and of one that is not."""
    web.post("/v1/scaleups", json=SCALEUP)
    responses = [web.post("/v1/scaleups", json={**SCALEUP, "replicas": 0}) for _ in range(2)]
    assert [(200, "nobody is expected any more")] * 2 == [
        (response.status_code, response.json()["reason"]) for response in responses
    ]
    assert [] == web.get("/v1/scaleups").json()


def test_one_that_is_not_known_is_a_problem(web: httpx.Client) -> None:
    """404 with a word of its own."""
    response = web.get("/v1/scaleups/up")
    assert (404, "unknown-scaleup", "no scale-up up is known") == (
        response.status_code, response.json()["type"].rpartition("/")[2], response.json()["detail"],
    )  # fmt: skip


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
def test_bad_bodies_are_refused(web: httpx.Client, field: str, value: object) -> None:
    """422, which names the field, and nothing is announced."""
    response = web.post("/v1/scaleups", json={**SCALEUP, field: value})
    assert (422, field, []) == (
        response.status_code, response.json()["errors"][0]["field"], web.get("/v1/scaleups").json(),
    )  # fmt: skip


@pytest.mark.parametrize("body", [examples.SCALEUP, examples.FINISHED_SCALEUP])
def test_the_examples_can_be_sent(web: httpx.Client, body: Any) -> None:
    """As the page shows them."""
    response = web.post("/v1/scaleups", json=body.model_dump(mode="json"))
    assert (200, body.model_dump(mode="json")) == (response.status_code, response.json()["scaleup"])


def test_one_that_lasts_no_time_is_answered_all_the_same(web: httpx.Client) -> None:
    """It is over at once."""
    response = web.post("/v1/scaleups", json={**SCALEUP, "expires_in_s": 5e-324})
    assert (200, 0.0) == (response.status_code, response.json()["expires_in_s"])


def test_scale_ups_take_the_right_role(time: FakeTime) -> None:
    """Whoever may fork may not have others wait."""
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
    assert ([401, 200], {
        "post /v1/scaleups": "operator",
        "get /v1/scaleups": "reader",
        "get /v1/scaleups/{scaleup_id}": "reader",
        "delete /v1/scaleups/{scaleup_id}": "operator",
    }) == ([response.status_code for response in responses], roles)  # fmt: skip


def test_metrics_say_who_is_expected(web: httpx.Client, planner: PlannerClient) -> None:
    """Scale-ups, the replicas that have not come, and batches that were gathered."""
    before = gauges(web)
    web.post("/v1/scaleups", json=SCALEUP)
    web.post("/v1/scaleups", json={**SCALEUP, "scaleup_id": "other", "model": "n", "replicas": 1})
    planner.request_plan(fork_request("a"))
    after = gauges(web)
    batches = {f'rfork_planner_gathered_batches_total{{whole="{complete}"}}': 0.0 for complete in ("true", "false")}
    assert [
        {"rfork_planner_scaleups": 0.0, "rfork_planner_expected_replicas": 0.0, **batches},
        {"rfork_planner_scaleups": 2.0, "rfork_planner_expected_replicas": 3.0, **batches},
    ] == [before, after]
