"""Baseline server of `benchmarks.planner_load`: FastAPI routes that do nothing.

It runs in a separate process, with the planner's uvicorn settings and none of its middleware:

- ``GET /bare`` and ``POST /bare`` return a constant dict and read no body. The second is "the bare
  route" of the figures.
- ``POST /models`` parses a `ForkRequest` and returns a constant `ReadPlan` of one route: the cost of the
  planner's own models without planning.
"""

from __future__ import annotations

import json
from typing import Final

import uvicorn
from fastapi import FastAPI

from planner.http_server import SHUTDOWN_S
from planner.server import bind, url_of
from rfork.schema import ForkRequest, Lease, Placement, Plan, Route
from rfork.settings import PlannerSettings, load

PLAN: Final = Plan(
    fork_id="fork-00000-1",
    weights_id="9f86d081884c7d659a2feaa0c55ad015",
    routes=(
        Route(
            source_id="llama-70b-00000-rank-0",
            address="10.0.0.1:41234",
            placement=Placement(host="node-00000", rack="rack-000", zone="zone-0"),
            transports=("transfer_engine", "http"),
            generation=0,
            chunks=((0, 64),),
            lease=Lease(token="e30." + "x" * 400, expires_in_s=30.0),
        ),
    ),
    reason="reads all 64 chunks from a seed in the same rack",
)


def create_app() -> FastAPI:
    """Return an application with the three routes."""
    app = FastAPI(title="bare")

    @app.get("/bare")
    async def bare_get() -> dict[str, bool]:
        return {"ok": True}

    @app.post("/bare")
    async def bare_post() -> dict[str, bool]:
        return {"ok": True}

    @app.post("/models")
    async def models(request: ForkRequest) -> Plan:
        return PLAN

    return app


def serve() -> None:
    """Serve until a signal; prints the port in the line that ``rfork planner --json`` prints."""
    settings = load(PlannerSettings, port=0)
    # The planner's type of socket. asyncio sets TCP_NODELAY only if the protocol is named; without it each
    # response (head and body are two writes) waits 40 ms for an acknowledgement.
    with bind(settings) as listener:
        config = uvicorn.Config(
            create_app(), workers=1, log_config=None, access_log=False, timeout_graceful_shutdown=SHUTDOWN_S
        )
        print(json.dumps({"event": "ready", "url": url_of(settings, listener)}), flush=True)
        uvicorn.Server(config).run(sockets=[listener])
