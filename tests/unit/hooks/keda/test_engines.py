"""How engines are asked for their metrics, without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from planner.hooks.keda.engines import EngineReader, EngineSilent
from rfork.settings import TlsSettings
from tests.unit.hooks.keda.fakes import engine


async def page() -> AsyncIterator[bytes]:
    """As it comes over a socket."""
    yield engine(3).encode()


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_connection_that_was_just_closed_silences_no_engine(dead: int) -> None:
    """It is asked once more, on another; one that is dead again is silent."""
    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        if asked <= dead:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(200, content=page())

    reader = EngineReader(60.0, TlsSettings(), httpx.MockTransport(answer))
    told: object
    try:
        told = (await reader.read("a", scheme="http", port=8000, path="/metrics"))["waiting"]
    except EngineSilent as error:
        told = str(error)
    await reader.close()
    silent = "did not answer http://a:8000/metrics: Server disconnected without sending a response."
    assert (3.0 if dead < 2 else silent, min(dead, 1) + 1) == (told, asked)
