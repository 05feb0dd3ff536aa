"""Queries shared by the tests of both engines: prompts, greedy responses, and the planner's instances."""

from __future__ import annotations

import httpx

from rfork.schema import InstanceReport
from tests.engines.engine_server import EngineServer, wait_until
from tests.engines.planner_process import PlannerProcess

PROMPTS = (
    "The capital of France is", "Water boils at", "Once upon a time", "The largest planet is", "2 + 2 =",
    "def fibonacci(n):", "The sun rises in the", "A fork is a", "Light travels at", "To be or not to be,",
    "The opposite of hot is", "My favourite colour is", "In the beginning", "The first president of",
    "Machine learning is", "SELECT name FROM", "Roses are red,", "The speed of sound", "Paris is known for",
    "Dear Sir or Madam,",
)  # fmt: skip
TOKENS = 16
SLOW_FORK_ENVIRONMENT = {
    "RFORK_TRANSPORTS": "http",
    "RFORK_MIN_SOURCE_BYTES_PER_S": "1000",
    "RFORK_NO_SOURCE_TIMEOUT_S": "1",
    "RFORK_RACE_STORAGE": "0",
}
"""Settings that transfer bytes over a socket, and allow a slow source."""
MIB = 1 << 20


def instances(planner: PlannerProcess) -> list[InstanceReport]:
    """Return the instances that the planner knows."""
    items = httpx.get(f"{planner.url}/v1/instances").json()["items"]
    return [InstanceReport.model_validate(item["report"]) for item in items]


def serving_instances(planner: PlannerProcess) -> list[InstanceReport]:
    """Return the instances that have all of their weights and serve them."""
    return [report for report in instances(planner) if report.state == "serving" and report.weights_id]


def wait_serving(planner: PlannerProcess, count: int) -> None:
    """Wait until `count` instances serve."""
    wait_until(lambda: len(serving_instances(planner)) == count, deadline_s=60, what=f"{count} serving instances")


def weights_ids(planner: PlannerProcess) -> set[str | None]:
    """Return the weights_ids that are served."""
    return {report.weights_id for report in serving_instances(planner)}


def greedy_tokens(server: EngineServer, prompts: tuple[str, ...] = PROMPTS) -> list[tuple[int, ...]]:
    """Return greedy tokens for each prompt."""
    return [server.complete(prompt, TOKENS, ignore_eos=True).tokens for prompt in prompts]
