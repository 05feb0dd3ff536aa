"""Machine-readable logs of a planner process."""

from __future__ import annotations

import json

import httpx
import pytest

from rfork.planner_client.client import PlannerClient
from tests.conftest import StartRfork
from tests.unit.planner.builders import fork_request, seed_report

READY = r"http://[0-9.:]+"
JSON = {"Content-Type": "application/json"}
STARTS = [
    (("planner", "--port", "0", "--json"), {}),
    (("planner", "--port", "0"), {"RFORK_LOG_JSON": "1"}),
]


@pytest.mark.parametrize(("arguments", "environment"), STARTS)
def test_a_request_that_failed_is_found_by_its_id(
    rfork_process: StartRfork, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    """The caller's request id is in the response's header and in a JSON log line with the response."""
    planner = rfork_process(*arguments, environment=environment, until=READY)
    url = planner.wait_for(READY)[0]
    response = httpx.get(f"{url}/v1/forks/none", headers={"X-Request-Id": "request-7.1"}, trust_env=False)
    planner.wait_for("request-7.1")
    lines = [json.loads(line) for line in planner.stderr.splitlines()]
    found = [line for line in lines if line.get("request_id") == "request-7.1"]
    assert 404 == response.status_code
    assert "application/problem+json" == response.headers["content-type"]
    assert "request-7.1" == response.headers["x-request-id"]
    assert [("request", "info", "GET", "/v1/forks/none", 404)] == [
        (line["event"], line["level"], line["method"], line["path"], line["status"]) for line in found
    ]


def test_every_line_is_json_with_time_level_and_event(rfork_process: StartRfork) -> None:
    """Start, registration, plan, problems and exit in order: nothing else is ever written there."""
    everything = {"RFORK_LOG_LEVEL": "debug"}
    planner = rfork_process("planner", "--port", "0", "--json", environment=everything, until=READY)
    url = planner.wait_for(READY)[0]
    with PlannerClient(url) as client, httpx.Client(base_url=url, trust_env=False) as web:
        client.report(seed_report("s"))
        web.post(
            "/v1/forks",
            content=fork_request("a").model_dump_json(),
            headers={**JSON, "X-Request-Id": "planned-here"},
        )
        web.post("/v1/forks", content=b"{", headers={**JSON, "X-Request-Id": "\x1b[31m"})
        web.get("/%1b%0a{}")
        web.get("/v1/instances/the-last")
    planner.wait_for("the-last")
    planner.stop()
    lines = [json.loads(line) for line in planner.stderr.splitlines()]
    assert [] == [line for line in lines if not {"timestamp", "level", "event"} <= set(line)]
    assert {"planner ready", "instance reported", "fork planned", "request"} <= {line["event"] for line in lines}
    assert ["planned-here"] == [line["request_id"] for line in lines if line["event"] == "fork planned"]


def test_two_requests_without_an_id_get_different_ones(rfork_process: StartRfork) -> None:
    """The planner's own ids distinguish its log lines."""
    planner = rfork_process("planner", "--port", "0", "--json", until=READY)
    url = planner.wait_for(READY)[0]
    request_ids = [httpx.get(f"{url}/nowhere/{number}", trust_env=False).headers["x-request-id"] for number in (1, 2)]
    planner.wait_for("nowhere/2")
    logged = [json.loads(line) for line in planner.stderr.splitlines() if "nowhere" in line]
    assert request_ids == [line["request_id"] for line in logged]
    assert 2 == len(set(request_ids))
