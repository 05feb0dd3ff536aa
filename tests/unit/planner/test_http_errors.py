"""Errors of the REST interface, and authorization."""

from __future__ import annotations

import httpx
import pytest

from planner.app import create_app
from planner.clock import Clock
from planner.core.records import StoreChange
from planner.middleware import MAX_BODY_BYTES
from planner.store.memory import MemoryStore
from rfork.planner_client.client import PlannerClient
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import AppTransport, http_client
from tests.unit.planner.builders import seed_report

SEED_REPORT = seed_report("s").model_dump(mode="json")


class BrokenStore(MemoryStore):
    """A store that raises an unexpected error."""

    def __init__(self) -> None:
        super().__init__(Clock(), max_finished_forks=1)

    @property
    def ready(self) -> bool:
        return False

    async def commit(self, change: StoreChange) -> None:
        raise RuntimeError("password=hunter2")  # text that callers must not see


PROBLEMS = [
    ("GET", "/nowhere", None, 404, "not-found", "Not Found"),
    ("GET", "/v1/instances/x", None, 404, "unknown-instance", "unknown instance x"),
    ("POST", "/v1/instances/x/drain", None, 404, "unknown-instance", "unknown instance x"),
    ("GET", "/v1/forks/x", None, 404, "unknown-fork", "unknown fork x"),
    ("PATCH", "/v1/models", None, 405, "method-not-allowed", "Method Not Allowed"),
    ("PUT", "/v1/instances/s", {**SEED_REPORT, "chunk_count": -1}, 422, "invalid-request",
     "chunk_count: Input should be greater than or equal to 0"),
    ("PUT", "/v1/instances/s", {**SEED_REPORT, "rank": {"tp": -1}}, 422, "invalid-request",
     "rank.tp: Input should be greater than or equal to 0"),
    ("PUT", "/v1/instances/s", {**SEED_REPORT, "surplus": 1}, 422, "invalid-request",
     "surplus: Extra inputs are not permitted"),
    ("PUT", "/v1/instances/other", SEED_REPORT, 422, "invalid-request",
     "instance_id: the path has other, the body s"),
    ("GET", "/v1/forks?state=odd", None, 422, "invalid-request",
     "state: Input should be 'planning', 'running', 'finished' or 'failed'"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "slug", "detail"), PROBLEMS)
def test_every_error_is_a_problem_document(
    web: httpx.Client, method: str, path: str, body: object, status: int, slug: str, detail: str
) -> None:
    """Each has media type, type, status and the first error (RFC 9457)."""
    response = web.request(method, path, json=body)
    problem = response.json()
    assert status == response.status_code
    assert "application/problem+json" == response.headers["content-type"]
    assert f"https://rfork.dev/problems/{slug}" == problem["type"]
    assert status == problem["status"]
    assert detail == problem["detail"]


def test_all_bad_fields_are_listed_and_no_value_is_repeated(web: httpx.Client) -> None:
    """`errors` names each field; the sent values are not in the response."""
    response = web.put("/v1/instances/s", json={**SEED_REPORT, "layout_id": "private-value", "state": "odd"})
    assert ["layout_id", "state"] == [each["field"] for each in response.json()["errors"]]
    assert "private-value" not in response.text


def test_broken_json_is_a_problem_too(web: httpx.Client) -> None:
    """The position in the body is named instead of a field."""
    response = web.post("/v1/forks", content=b"{", headers={"Content-Type": "application/json"})
    assert 422 == response.status_code
    assert "1: JSON decode error" == response.json()["detail"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(web: httpx.Client, announced: bool) -> None:
    """This holds whether its length is declared or found while reading."""
    body = b" " * (MAX_BODY_BYTES + 1)
    content = body if announced else iter([body])
    response = web.put("/v1/instances/s", content=content, headers={"Content-Type": "application/json"})
    assert 413 == response.status_code
    assert "https://rfork.dev/problems/body-too-large" == response.json()["type"]


def test_an_unexpected_error_reveals_no_details() -> None:
    """The response is 500 with a request id that is in the log."""
    app = create_app(PlannerSettings(), store=BrokenStore())
    response = http_client(app).put("/v1/instances/s", json=SEED_REPORT, headers={"X-Request-Id": "find-me"})
    assert 500 == response.status_code
    assert "internal error; see the planner's log" == response.json()["detail"]
    assert "find-me" == response.headers["x-request-id"]
    assert "hunter2" not in response.text


def test_readiness_follows_the_store() -> None:
    """The planner is alive, but not ready."""
    app = create_app(PlannerSettings(), store=BrokenStore())
    statuses = [http_client(app).get(path).status_code for path in ("/healthz", "/readyz")]
    assert [200, 503] == statuses
    assert not PlannerClient("http://x", transport=AppTransport(app)).ready()


AUTH = [
    ("/v1/models", None, 401),
    ("/v1/models", "Bearer wrong", 401),
    ("/v1/models", "right", 401),
    ("/v1/models", "Bearer right", 200),
    ("/metrics", None, 401),
    ("/openapi.json", None, 401),
    ("/nowhere", None, 401),
    ("/healthz", None, 200),
    ("/readyz", None, 200),
    ("/docs", None, 200),
    ("/ui/swagger/swagger-ui.css", None, 200),
]


@pytest.mark.parametrize(("path", "authorization", "status"), AUTH)
def test_a_token_protects_everything_but_health_checks_and_pages(
    path: str, authorization: str | None, status: int
) -> None:
    """Unknown paths need a token too."""
    app = create_app(PlannerSettings(token="right"))  # type: ignore[arg-type]
    response = http_client(app).get(path, headers={} if authorization is None else {"Authorization": authorization})
    assert status == response.status_code
    assert ("Bearer" if status == 401 else None) == response.headers.get("www-authenticate")


@pytest.mark.parametrize(("sent", "kept"), [("abc.1-2_3", True), ("bad id", False), ("x" * 65, False)])
def test_a_valid_request_id_is_kept(web: httpx.Client, sent: str, kept: bool) -> None:
    """An id that could break a log line is replaced."""
    request_id = web.get("/healthz", headers={"X-Request-Id": sent}).headers["x-request-id"]
    assert kept == (request_id == sent)
