"""The OpenAPI document of the planner."""

from __future__ import annotations

import json
from typing import Any

import httpx

from planner.app import create_app
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import http_client


def operations_of(web: httpx.Client) -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path and description of each route under /v1."""
    return [
        (method, path, operation)
        for path, methods in web.get("/openapi.json").json()["paths"].items()
        if path.startswith("/v1")
        for method, operation in methods.items()
    ]


def test_every_operation_is_described(web: httpx.Client) -> None:
    """Each has a summary, a description, examples and the request id header."""
    operations = operations_of(web)
    assert 13 <= len(operations)
    for _, path, operation in operations:
        assert operation["summary"], path
        assert operation["description"], path
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        for status, response in operation["responses"].items():
            assert ["X-Request-Id"] == list(response["headers"])[:1], (path, status)
            if status == "200":
                bodies.append(response)
        for body in bodies:
            for media_type, content in body["content"].items():
                assert content.get("examples") or content.get("example"), (path, media_type)
    assert "HTTPValidationError" not in web.get("/openapi.json").text


def test_every_field_is_described(web: httpx.Client) -> None:
    """All fields of requests and responses have descriptions."""
    schemas = web.get("/openapi.json").json()["components"]["schemas"]
    fields = {
        f"{name}.{field}": bool(field_schema.get("description"))
        for name, schema in schemas.items()
        for field, field_schema in schema.get("properties", {}).items()
    }
    assert 170 <= len(fields)
    assert [] == [field for field, described in fields.items() if not described]


READING, SENDING = {"401", "403", "422", "429"}, {"400", "401", "403", "408", "413", "422", "429", "503"}
DOCUMENTED = {
    ("put", "/v1/instances/{instance_id}"): SENDING,
    ("post", "/v1/instances/{instance_id}/drain"): READING | {"404", "409", "503"},
    ("get", "/v1/instances/{instance_id}/exit"): READING,
    ("delete", "/v1/instances/{instance_id}"): READING | {"503"},
    ("get", "/v1/instances"): READING,
    ("get", "/v1/instances/{instance_id}"): READING | {"404"},
    ("post", "/v1/forks"): SENDING | {"409"},
    ("post", "/v1/forks/{fork_id}/progress"): SENDING | {"404", "409"},
    ("post", "/v1/forks/{fork_id}/finish"): SENDING,
    ("get", "/v1/forks"): READING,
    ("get", "/v1/forks/{fork_id}"): READING | {"404"},
    ("get", "/v1/models"): READING,
    ("put", "/v1/holders/{holder_id}"): SENDING,
    ("delete", "/v1/holders/{holder_id}"): READING | {"503"},
    ("get", "/v1/holders"): READING,
    ("get", "/v1/holders/{holder_id}"): READING | {"404"},
}


def test_every_problem_is_documented(web: httpx.Client) -> None:
    """Each problem has its media type, and Retry-After where a retry makes sense."""
    found: dict[tuple[str, str], set[str]] = {}
    for method, path, operation in operations_of(web):
        for status, response in operation["responses"].items():
            if status[0] == "4" or status[0] == "5":
                assert ["application/problem+json"] == list(response["content"]), (path, status)
                assert (status in ("429", "503")) == ("Retry-After" in response["headers"]), (path, status)
                found.setdefault((method, path), set()).add(status)
    assert DOCUMENTED == {route: found.get(route) for route in DOCUMENTED}


def test_the_document_is_openapi_3_1(web: httpx.Client) -> None:
    """Version 3.1 uses plain JSON Schema."""
    assert web.get("/openapi.json").json()["openapi"].startswith("3.1.")


def test_the_openapi_document_describes_the_token() -> None:
    """Generated clients know where to put it, and that health checks need none."""
    app = create_app(PlannerSettings(token="right"))  # type: ignore[arg-type]
    document = http_client(app).get("/openapi.json", headers={"Authorization": "Bearer right"}).json()
    scheme = document["components"]["securitySchemes"]["token"]
    assert "http" == scheme["type"]
    assert "bearer" == scheme["scheme"]
    assert [{"token": []}] == document["security"]
    assert [] == document["paths"]["/healthz"]["get"]["security"]


def test_every_reference_of_the_openapi_document_resolves(web: httpx.Client) -> None:
    """Client generators fail at a dangling reference."""
    document = web.get("/openapi.json").json()
    names = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert set() == names - set(document["components"]["schemas"])


def test_the_examples_of_the_openapi_document_work_in_order(web: httpx.Client) -> None:
    """Register, plan, replan, progress and finish succeed as documented."""
    paths = web.get("/openapi.json").json()["paths"]
    statuses = []
    for method, path, url in (
        ("put", "/v1/instances/{instance_id}", "/v1/instances/seed-1"),
        ("post", "/v1/forks", "/v1/forks"),
        ("post", "/v1/forks/{fork_id}/progress", "/v1/forks/fork-1/progress"),
        ("post", "/v1/forks/{fork_id}/finish", "/v1/forks/fork-1/finish"),
    ):
        for example in paths[path][method]["requestBody"]["content"]["application/json"]["examples"].values():
            statuses.append(web.request(method, url, json=example["value"]).status_code)
    assert [200, 200, 200, 200, 200, 204] == statuses
