"""Events are created once, and then incremented without being read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import httpx2
import pytest

from planner.integrations.kubernetes.api_server import ApiServer, ClusterUnavailable, Document
from planner.integrations.kubernetes.cluster import Cluster, EventType, ObjectRef

POD = ObjectRef("Pod", "v1", "team", "llama-0", "uid-1")


class EventServer:
    """Stores Events as an API server does, for clients that may create and patch them."""

    def __init__(self) -> None:
        self.stored: dict[str, Document] = {}
        self.requests: list[str] = []
        self.between_requests: Callable[[], None] = lambda: None
        """Changes by others between two requests."""

    def cluster(self, unix: float = 0.0) -> Cluster:
        """Return the cluster as seen by one replica."""
        client = httpx2.AsyncClient(base_url="http://k", transport=httpx2.MockTransport(self._respond))
        return Cluster(ApiServer(client), unix=lambda: unix)

    def _respond(self, request: httpx2.Request) -> httpx2.Response:
        body, name = json.loads(request.content), request.url.path.rpartition("/")[2]
        self.requests.append(request.method)
        self.between_requests()
        if request.method == "POST":
            name = body["metadata"]["name"]
            if name in self.stored:
                return httpx2.Response(409, json={"reason": "AlreadyExists"})
            self.stored[name] = body
        elif name not in self.stored:
            return httpx2.Response(404, json={"reason": "NotFound"})
        event = self.stored[name]
        metadata = event["metadata"]
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, metadata.get("resourceVersion")):
            return httpx2.Response(409, json={"reason": "Conflict"})
        changed = int(metadata.get("resourceVersion", 0)) + bool(body)
        self.stored[name] = {**event, **body, "metadata": {**metadata, "resourceVersion": str(changed)}}
        return httpx2.Response(200, json=self.stored[name])


async def test_an_equal_event_of_another_replica_is_incremented() -> None:
    """One Event, with the first and the last time, without a GET."""
    events = EventServer()
    for unix in (0.0, 60.0, 3600.0):
        await events.cluster(unix).emit_event(POD, "Normal", "Forked", "15.2 GB")
    (event,) = events.stored.values()
    assert 3 == event["count"]
    assert "1970-01-01T00:00:00Z" == event["firstTimestamp"]
    assert "1970-01-01T01:00:00Z" == event["lastTimestamp"]
    assert {"POST", "PATCH"} == set(events.requests)


@pytest.mark.parametrize(
    ("about", "event_type", "reason", "message"),
    [
        (dataclasses.replace(POD, uid="uid-2"), "Normal", "Forked", "15.2 GB"),
        (POD, "Warning", "Forked", "15.2 GB"),
        (POD, "Normal", "FellBack", "15.2 GB"),
        (POD, "Normal", "Forked", "1 GB"),
    ],
)
async def test_different_events_are_separate(
    about: ObjectRef, event_type: EventType, reason: str, message: str
) -> None:
    """They differ in the Pod's UID, type, reason or message."""
    events = EventServer()
    await events.cluster().emit_event(POD, "Normal", "Forked", "15.2 GB")
    await events.cluster().emit_event(about, event_type, reason, message)
    assert [1, 1] == [event["count"] for event in events.stored.values()]


async def test_a_long_name_is_truncated_to_a_valid_one() -> None:
    """No part of a name is empty or ends in a hyphen, and the name has at most 253 characters."""
    events = EventServer()
    await events.cluster().emit_event(dataclasses.replace(POD, name="a" * 228 + "-.b"), "Normal", "Forked", "")
    (name,) = events.stored
    assert "a" * 228 == name.partition(".")[0]
    assert 228 + 1 + 16 == len(name)


async def test_an_event_that_expires_meanwhile_is_created_again() -> None:
    """It expired between the attempt to create it and the patch."""
    events = EventServer()
    await events.cluster().emit_event(POD, "Normal", "Forked", "")
    request_count = len(events.requests)

    def expire() -> None:
        if len(events.requests) == request_count + 2:
            events.stored.clear()

    events.between_requests = expire
    await events.cluster().emit_event(POD, "Normal", "Forked", "")
    assert ["POST", "PATCH", "POST"] == events.requests[request_count:]
    assert [1] == [event["count"] for event in events.stored.values()]


async def test_concurrent_increments_are_not_lost() -> None:
    """The second writer retries; if conflicts do not end, the cluster counts as unavailable."""
    events = EventServer()
    await events.cluster().emit_event(POD, "Normal", "Forked", "")
    times = 1

    def concurrent_update() -> None:
        nonlocal times
        if events.requests[-2:] == ["PATCH", "PATCH"] and times:
            times -= 1
            (event,) = events.stored.values()
            event["count"] += 1
            event["metadata"]["resourceVersion"] += "0"

    events.between_requests = concurrent_update
    await events.cluster().emit_event(POD, "Normal", "Forked", "")
    assert [3] == [event["count"] for event in events.stored.values()]
    times = 99
    with pytest.raises(ClusterUnavailable, match="concurrent writes by others"):
        await events.cluster().emit_event(POD, "Normal", "Forked", "")
