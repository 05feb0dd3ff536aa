"""Requests of vLLM-Ascend's RFork client to its planner."""

from __future__ import annotations

import httpx

from rfork.planner_client.client import PlannerClient

KEY = "qwen3$bf16$kv_both$0$1"
SEED = {"SEED_IP": "10.0.0.7", "SEED_PORT": "4000", "SEED_RANK": "1"}
OTHER = {"SEED_IP": "10.0.0.8", "SEED_PORT": "4000", "SEED_RANK": "1"}
SEED_ID = "ascend:10.0.0.7:4000:1"
ADD = {**SEED, "SEED_KEY": KEY, "SEED_REFCNT": "0"}


def add_seed(
    web: httpx.Client, seed: dict[str, str] = SEED, *, key: str = KEY, references: str = "0"
) -> httpx.Response:
    """Register a seed, or send its heartbeat."""
    return web.post("/add_seed", headers={**seed, "SEED_KEY": key, "SEED_REFCNT": references})


def get_seed(web: httpx.Client, key: str = KEY) -> httpx.Response:
    """Request a seed."""
    return web.get("/get_seed", headers={"SEED_KEY": key})


def acquire_lease(web: httpx.Client, key: str = KEY) -> dict[str, str]:
    """Return the headers that identify a lease, as the client sends them back."""
    response = get_seed(web, key)
    assert 200 == response.status_code
    return {name: response.headers[name] for name in ("SEED_IP", "SEED_PORT", "SEED_RANK", "USER_ID")}


def put_seed(web: httpx.Client, lease_headers: dict[str, str]) -> int:
    """Release a lease and return the status."""
    return web.post("/put_seed", headers=lease_headers).status_code


def renew_lease(web: httpx.Client, lease_headers: dict[str, str]) -> int:
    """Renew a lease and return the status."""
    return web.post("/renew_seed_lease", headers=lease_headers).status_code


def remove_seed(web: httpx.Client, seed: dict[str, str] = SEED, key: str = KEY) -> int:
    """Remove a seed and return the status."""
    return web.post("/remove_seed", headers={**seed, "SEED_KEY": key}).status_code


def instance_states(planner: PlannerClient) -> dict[str, str]:
    """Return the states of the listed instances by id."""
    return {view.report.instance_id: view.report.state for view in planner.instances()}
