"""Fixture: third-party servers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.processes import RedisServer
from tests.s3_stores import s3_store as s3_store
from tests.seaweed import s3 as s3
from tests.seaweed import seaweed_server as seaweed_server
from tests.seaweed import use_identity as use_identity


@pytest.fixture
def redis_server(free_port: int) -> Iterator[RedisServer]:
    """A running, empty redis-server that is killed after the test."""
    if shutil.which("redis-server") is None:
        pytest.skip("NO redis-server ON PATH: the store that replicas share is NOT tested")
    server = RedisServer(free_port)
    server.start()
    try:
        yield server
    finally:
        server.kill()
