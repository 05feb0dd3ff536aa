"""Sidecars whose servers close an idle connection just as it is used again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rfork.engines.sglang_bridge.engine import StockEngine, WeightInfo
from rfork.engines.sglang_bridge.identity import STOCK_TRANSPORT
from rfork.engines.sglang_bridge.sidecar import InfoClient
from rfork.schema import Lease, Placement, Route
from rfork.settings import TlsSettings
from tests.fake_sglang_server import TENSORS

INFO = WeightInfo("127.0.0.1:15001", TENSORS)


class OneRequestHandler(BaseHTTPRequestHandler):
    """Responds to the first request of a connection with the info of rank 0, and to a second one not at all."""

    protocol_version = "HTTP/1.1"
    used = False

    def do_GET(self) -> None:
        """Respond."""
        if self.used:
            self.close_connection = True
            return
        self.used = True
        body = {"rank": 0, "remote_instance_transfer_engine_info": [INFO.session, INFO.tensors]}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    """host:port of a server with this handler."""
    with ThreadingHTTPServer(("127.0.0.1", 0), OneRequestHandler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        yield f"127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


def test_an_engine_gets_a_new_connection_for_each_request(server: str) -> None:
    """It is healthy, and no seed with readers is deregistered."""
    with StockEngine(f"http://{server}") as engine:
        assert engine.healthy()
        assert INFO == engine.info(0)
        assert INFO == engine.info(0)


def test_another_sidecar_gets_a_new_connection_for_each_request(server: str) -> None:
    """And is not blamed for a closed one."""
    route = Route(
        source_id="sglang:s", address=server, placement=Placement(host="s"), transports=(STOCK_TRANSPORT,),
        generation=0, chunks=((0, 1),), lease=Lease(token="t", expires_in_s=30.0),
    )  # fmt: skip
    client = InfoClient(TlsSettings())
    try:
        assert INFO == client(route, 0)
        assert INFO == client(route, 0)
    finally:
        client.close()
