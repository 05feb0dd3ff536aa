"""Fixtures: two engines, a planner, and a scaler that reads them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from planner.server import run_in_thread
from rfork.settings import PlannerSettings
from tests.integration.keda.scaler_harness import (
    HOSTS,
    OPERATOR,
    READER,
    EngineServers,
    ReportingPlanner,
    RunningScaler,
    running_scaler,
)
from tests.ports import free_port
from tests.unit.planner.integrations.keda.fakes import MODEL


@pytest.fixture
def engines() -> Iterator[EngineServers]:
    """Engines that report the values a test sets."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake_engines.request_count += 1
            page = fake_engines.pages.get(self.connection.getsockname()[0], 404)
            body = page.encode() if isinstance(page, str) and self.path == "/metrics" else b"no\n"
            self.send_response(200 if isinstance(page, str) else page)
            if page == 302:
                self.send_header("Location", f"http://{HOSTS[1]}:{fake_engines.port}/metrics")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    first = http.server.ThreadingHTTPServer((HOSTS[0], 0), Handler)
    fake_engines = EngineServers(first.server_port)
    servers = [first, http.server.ThreadingHTTPServer((HOSTS[1], fake_engines.port), Handler)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    yield fake_engines
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def planner(tmp_path: Path) -> Iterator[ReportingPlanner]:
    """A planner without reports; the scaler has read access only."""
    (tmp_path / "tokens").write_text(f"operator {OPERATOR}\nreader {READER}\n")
    with run_in_thread(
        PlannerSettings(port=0, heartbeat_interval_s=60, instance_ttl_s=600, tokens_file=tmp_path / "tokens")
    ) as url:
        yield ReportingPlanner(url)


@pytest.fixture
def scaler_port() -> int:
    """Another port that is free."""
    return free_port()


@pytest.fixture
async def scaler(
    planner: ReportingPlanner, engines: EngineServers, scaler_port: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningScaler]:
    """A scaler of `planner` and `engines` for waiting requests that trusts the planner immediately."""
    monkeypatch.setattr("planner.integrations.keda.metric_source.WARMUP_S", 0.0)
    metadata = {"model": MODEL, "metric": "waiting", "target": "10", "port": str(engines.port)}
    async with running_scaler(planner.url, {**metadata, "scalerAddress": "x:9444"}, port=scaler_port) as made:
        yield made
