"""Invalid responses, such as a proxy's, do not end a watch."""

from __future__ import annotations

import contextlib
import json

import httpx2
import pytest

from planner.integrations.kubernetes import api_server
from planner.integrations.kubernetes.api_server import (
    ApiServer,
    ClusterUnavailable,
    Resource,
    ResourceConflict,
    Synced,
    Upserted,
    WatchEvent,
    watch_forever,
)
from planner.integrations.kubernetes.cluster import ObservedNode, parse_node

NODES = Resource("nodes", "/api/v1/nodes", parse_node)
NODE = {"metadata": {"name": "a", "resourceVersion": "7"}}


def server(list_response: httpx2.Response, *events: object) -> ApiServer:
    """Return a server whose lists are `list_response`, and whose first watch delivers these events."""
    lines = [b"".join(json.dumps(event).encode() + b"\n" for event in events)]

    def respond(request: httpx2.Request) -> httpx2.Response:
        if "watch" in request.url.params:
            return httpx2.Response(200, content=lines.pop() if lines else b"")
        return list_response

    return ApiServer(
        httpx2.AsyncClient(base_url="http://k", transport=httpx2.MockTransport(respond)),
    )


async def first_updates(api: ApiServer, number: int) -> list[WatchEvent[ObservedNode]]:
    """Return the first updates."""
    found: list[WatchEvent[ObservedNode]] = []
    async with contextlib.aclosing(watch_forever(api, NODES)) as updates:  # type: ignore[type-var]
        async for each in updates:
            found.append(each)
            if len(found) == number:
                break
    return found


async def test_malformed_events_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Each logs a line, and later events are delivered."""
    odd = [
        {},
        {"type": "ADDED"},
        {"type": "ADDED", "object": "x"},
        {"type": "ADDED", "object": {"metadata": 3}},
    ]
    listed = httpx2.Response(200, json={"metadata": {"resourceVersion": "5"}, "items": ["x", NODE]})
    api = server(listed, *odd, {"type": "ADDED", "object": NODE})
    assert [Synced((ObservedNode("a", {}),)), Upserted(ObservedNode("a", {}))] == await first_updates(api, 2)
    assert 1 + len(odd) == sum("malformed object ignored" in record.message for record in caplog.records)


@pytest.mark.parametrize("error", ["x", None, {"code": "many"}, {"details": "x"}])
async def test_an_error_event_without_a_status_restarts_the_watch(
    error: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch starts again."""
    monkeypatch.setattr(api_server, "BACKOFF_S", 0.0)
    listed = httpx2.Response(200, json={"metadata": {"resourceVersion": "5"}, "items": []})
    assert [Synced(()), Synced(())] == await first_updates(server(listed, {"type": "ERROR", "object": error}), 2)


@pytest.mark.parametrize("details", ["x", [], {"causes": "x"}, {"causes": ["x"]}])
@pytest.mark.parametrize("status", [409, 422, 504])
async def test_an_error_response_without_a_status_raises_a_known_error(details: object, status: int) -> None:
    """Whatever a proxy returns, callers get a documented exception."""
    api = server(httpx2.Response(status, json={"message": "no", "details": details}))
    with pytest.raises((ClusterUnavailable, ResourceConflict), match=f"GET /x: {status} no"):
        await api.call("GET", "/x")
