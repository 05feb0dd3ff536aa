"""Routes that parse and answer JSON without FastAPI's general path."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel

from planner.api.json_route import JsonRoute
from tests.unit.planner.app_transport import AppTransport
from tests.unit.planner.builders import seed_report


class Item(BaseModel):
    """A body and a response."""

    name: str
    size: int = 1


def client(route_class: type[JsonRoute] | None) -> httpx.Client:
    """Return a client of an application with one route."""
    router = APIRouter() if route_class is None else APIRouter(route_class=route_class)

    @router.put("/items/{number}")
    async def put(number: int, item: Item) -> Item:
        return item.model_copy(update={"size": number})

    app = FastAPI()
    app.router.routes.extend(router.routes)  # as the planner does
    return httpx.Client(base_url="http://items", transport=AppTransport(app))


REQUESTS: dict[str, tuple[str, bytes, Mapping[str, str]]] = {
    "valid": ("/items/7", b'{"name":"\xc3\xa9"}', {"content-type": "application/json"}),
    "with a charset": ("/items/7", b'{"name":"a"}', {"content-type": "application/json; charset=utf-8"}),
    "other type of content": ("/items/7", b'{"name":"a"}', {"content-type": "text/plain"}),
    "no type of content": ("/items/7", b'{"name":"a"}', {}),
    "empty": ("/items/7", b"", {"content-type": "application/json"}),
    "no JSON": ("/items/7", b"{", {"content-type": "application/json"}),
    "missing field": ("/items/7", b"{}", {"content-type": "application/json"}),
    "invalid path": ("/items/x", b'{"name":"a"}', {"content-type": "application/json"}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_it_answers_as_fastapi_does(name: str) -> None:
    """Status, type and body are those of FastAPI's own route."""
    path, body, headers = REQUESTS[name]
    ours, theirs = (client(route_class).put(path, content=body, headers=headers) for route_class in (JsonRoute, None))
    assert theirs.status_code == ours.status_code
    assert theirs.headers["content-type"] == ours.headers["content-type"]
    assert theirs.json() == ours.json()


def test_a_request_without_json_content_registers_nothing(web: httpx.Client) -> None:
    """A page of another origin can send text without permission: it must not register an instance."""
    body = seed_report("s").model_dump_json()
    response = web.put("/v1/instances/s", content=body, headers={"content-type": "text/plain"})
    assert 422 == response.status_code
    assert 404 == web.get("/v1/instances/s").status_code
