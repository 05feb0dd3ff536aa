"""In-process planner: serves the REST interface to a real client and follows a script of the test."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from rfork.planner_client.client import PlannerClient
from rfork.planner_client.lease import derive_key
from rfork.schema import ForkProgress, ForkRequest, ForkResult, InstanceAck, InstanceReport, Plan, ProgressAck
from tests.unit.receiver.fleet import NEVER_S, SECRET, Script


class FakePlanner(httpx.BaseTransport):
    """Scripted planner that records every request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[ForkRequest] = []
        self.reports: list[InstanceReport] = []
        self.progress: list[ForkProgress] = []
        self.finishes: list[tuple[str, ForkResult]] = []
        self.removed: list[str] = []
        self.traceparents: list[tuple[str, str]] = []
        """Path and trace header of each request that carried one."""
        self.on_progress: Callable[[], httpx.Response] | None = None
        self.replan_suggested: str | None = None

    def client(self) -> PlannerClient:
        return PlannerClient("http://planner", transport=self)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        if "traceparent" in request.headers:
            self.traceparents.append((request.url.path, request.headers["traceparent"]))
        match request.method, request.url.path.split("/")[2:]:
            case "PUT", ["instances", name]:
                self.reports.append(InstanceReport.model_validate_json(body))
                return _json_response(InstanceAck(heartbeat_s=NEVER_S, lease_keys=(derive_key(SECRET, name),)))
            case "DELETE", ["instances", name]:
                self.removed.append(name)
                return httpx.Response(204)
            case "POST", ["forks"]:
                self.requests.append(ForkRequest.model_validate_json(body))
                # The script cannot know the fork's id, so it is filled in here.
                plan = self.script(self.requests[-1].faults, self.requests[-1].current_assignments)
                return _json_response(plan.model_copy(update={"fork_id": self.requests[-1].fork_id}))
            case "POST", ["forks", _, "progress"]:
                self.progress.append(ForkProgress.model_validate_json(body))
                ack = ProgressAck(replan_suggested=self.replan_suggested)
                return self.on_progress() if self.on_progress is not None else _json_response(ack)
            case "POST", ["forks", fork_id, "finish"]:
                self.finishes.append((fork_id, ForkResult.model_validate_json(body)))
                return httpx.Response(204)
        return problem_response(404, "not-found")


def problem_response(status: int, problem_type: str) -> httpx.Response:
    return httpx.Response(
        status,
        json={
            "type": f"https://rfork.dev/problems/{problem_type}",
            "title": problem_type,
            "status": status,
            "detail": problem_type,
        },
    )


def _json_response(model: InstanceAck | Plan | ProgressAck) -> httpx.Response:
    return httpx.Response(200, content=model.model_dump_json())
