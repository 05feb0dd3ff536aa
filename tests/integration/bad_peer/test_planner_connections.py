"""Malicious connections to the planner."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.bad_peer.attacked_seed import open_connection, receive_all
from tests.integration.bad_peer.garbage_input import CONNECTIONS, GARBAGE, PARTIAL_REQUESTS
from tests.processes import RforkProcess

READY = r"planner ready at http://127\.0\.0\.1:(\d+)"


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RforkProcess, int]]:
    """A planner and its port."""
    process = RforkProcess(["planner", "--port", "0"], {**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        yield process, int(process.wait_for(READY).group(1))
    finally:
        process.stop()


def healthy(port: int) -> int:
    """Return the planner's response to a health probe."""
    return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30).status_code


@pytest.mark.parametrize("begun", PARTIAL_REQUESTS)
def test_silent_connections_to_the_planner(planner: tuple[RforkProcess, int], begun: str) -> None:
    """Hundreds of connections that are silent, or start a request and stop, lock no client out of the
    planner.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(open_connection(planner[1])).sendall(PARTIAL_REQUESTS[begun])
        assert healthy(planner[1]) == 200


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_to_the_planner(planner: tuple[RforkProcess, int], garbage: str) -> None:
    """A malformed request only ends its own connection."""
    with open_connection(planner[1]) as connection, contextlib.suppress(OSError):
        connection.settimeout(1.0)
        connection.sendall(GARBAGE[garbage])
        connection.shutdown(socket.SHUT_WR)
        receive_all(connection)
    assert healthy(planner[1]) == 200
