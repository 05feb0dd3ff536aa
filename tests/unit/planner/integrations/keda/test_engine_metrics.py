"""Requests for an engine's metrics, without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from planner.integrations.keda.engine_metrics import EngineMetricsClient, EngineUnreachable
from rfork.settings import TlsSettings
from tests.unit.planner.integrations.keda.fakes import engine


async def page() -> AsyncIterator[bytes]:
    """Return a page as received from the network."""
    yield engine(3).encode()


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_closed_connection_is_retried_once(dead: int) -> None:
    """If the second connection is closed too, the engine counts as unreachable."""
    request_count = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal request_count
        request_count += 1
        if request_count <= dead:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(200, content=page())

    reader = EngineMetricsClient(60.0, TlsSettings(), httpx.MockTransport(handler))
    result: object
    try:
        result = (await reader.read("a", scheme="http", port=8000, path="/metrics"))["waiting"]
    except EngineUnreachable as error:
        result = str(error)
    await reader.close()
    silent = "did not respond at http://a:8000/metrics: Server disconnected without sending a response."
    assert (3.0 if dead < 2 else silent) == result
    assert min(dead, 1) + 1 == request_count
