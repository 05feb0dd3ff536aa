"""A server of either kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.unix_socket.echo_server import EchoServer


@pytest.fixture(params=["without a file", "in a folder"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EchoServer]:
    """A server of either kind."""
    made = EchoServer(tmp_path if request.param == "in a folder" else None)
    yield made
    made.server.close()
