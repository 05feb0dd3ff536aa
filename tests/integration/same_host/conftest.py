"""Fixture: a server with or without a socket file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.same_host.echo_server import EchoServer


@pytest.fixture(params=["without a file", "in a directory"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EchoServer]:
    """A server of either type."""
    made = EchoServer(tmp_path if request.param == "in a directory" else None)
    yield made
    made.server.close()
