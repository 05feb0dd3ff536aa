"""Servers that are not rfork's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.processes import RedisServer


@pytest.fixture
def redis_server(free_port: int) -> Iterator[RedisServer]:
    """A redis-server that is up, empty, and killed when the test ends."""
    if shutil.which("redis-server") is None:
        pytest.skip("NO redis-server ON PATH: the store that replicas share is NOT tested")
    server = RedisServer(free_port)
    server.start()
    try:
        yield server
    finally:
        server.kill()
