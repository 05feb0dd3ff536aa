"""Fake of an unmodified SGLang server: its R-Fork endpoints, with tensor addresses set by the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from typing_extensions import Self

Tensors = Mapping[str, tuple[int, int, int]]
TENSORS: Tensors = {"model.embed.weight": (4096, 1024, 2), "model.norm.weight": (8192, 16, 2)}


class FakeSglangEndpoints:
    """Responses of the server, without sockets. Its fields may change at any time.

    `ranks`: session and tensors of each tensor-parallel rank; empty for an engine that serves no weights.
    """

    def __init__(
        self,
        session: str = "127.0.0.1:15001",
        *,
        tensors: Tensors = TENSORS,
        ranks: int = 1,
        healthy: bool = True,
    ) -> None:
        self.healthy = healthy
        self.key: str | None = None
        self.only_legacy_paths = False
        self.ranks = {rank: (f"{session}{rank or ''}", tensors) for rank in range(ranks)}
        self.server: dict[str, str | int | None] = {
            "tp_size": max(1, ranks),
            "pp_size": 1,
            "ep_size": 1,
            "dtype": "auto",
            "quantization": None,
            "speculative_algorithm": None,
        }
        self.model = {"model_path": "/models/m", "served_model_name": "m", "weight_version": "default"}
        self.requested_paths: list[str] = []
        """Requested paths, except `/health`."""

    def respond(self, target: str, authorization: str | None) -> tuple[int, object]:
        """Return status and JSON as SGLang 0.5.23 does for a GET."""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        if path == "/health":
            return (200 if self.healthy else 503), ""
        self.requested_paths.append(path)
        if self.key is not None and authorization != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        old = path.startswith("/get_")
        name = path.removeprefix("/get_").removeprefix("/")
        if not old and self.only_legacy_paths:
            return 404, {"detail": "Not Found"}
        if name == "server_info":
            return 200, self.server
        if name == "model_info":
            return 200, self.model
        if name == "remote_instance_transfer_engine_info":
            rank = int(query["rank"][0])
            if rank in self.ranks:
                return 200, {"rank": rank, "remote_instance_transfer_engine_info": self.ranks[rank]}
            return 400, {"error": {"message": f"Failed to get transfer engine info for rank {rank}"}}
        return 404, {"detail": "Not Found"}


class FakeSglangServer(FakeSglangEndpoints):
    """Serve the endpoints on a free loopback port inside a `with` block."""

    def __init__(
        self,
        session: str = "127.0.0.1:15001",
        *,
        tensors: Tensors = TENSORS,
        ranks: int = 1,
        healthy: bool = True,
    ) -> None:
        super().__init__(session, tensors=tensors, ranks=ranks, healthy=healthy)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def close(self) -> None:
        """Refuse further connections."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = engine.respond(self.path, self.headers.get("Authorization"))
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler
