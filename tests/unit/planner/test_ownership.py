"""Ownership of records: only the owner changes an instance's record and its forks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from planner.app import create_app
from planner.auth import ROUTES
from rfork.errors import PlannerRejected
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.ownership import OWNER_HEADER
from rfork.schema import ForkProgress, ForkResult, HolderReport, Placement, WireModel
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import AppTransport
from tests.unit.planner.builders import FakeTime, fork_request, report, seed_report

VICTIM, ATTACKER = "v" * 32, "a" * 32
HOLDER = HolderReport(holder_id="h", placement=Placement(host="node"), memory_bytes=1)
PROGRESS = ForkProgress(verified=(), bytes_read=0, bytes_per_s=0)
FINISH = ForkResult(outcome="failed", seconds=1, bytes_read=0)


class PlannerHarness:
    """A planner with tokens, and clients for it."""

    def __init__(self, tokens: Path, time: FakeTime) -> None:
        self._settings = PlannerSettings.model_validate(
            {"lease_keys": "s" * 32, "batch_window_s": 0, "tokens_file": tokens, "instance_ttl_s": 20}
        )
        self._time = time
        self.restart()

    def restart(self) -> None:
        """Restart the planner without records, with the same lease key."""
        self.app = create_app(self._settings, self._time.clock)

    def caller(self, owner: str = VICTIM, token: str = "work") -> PlannerClient:
        """Return a client with this secret and token."""
        transport = AppTransport(self.app)
        return PlannerClient("http://planner", token=token, owner=owner, transport=transport)


@pytest.fixture
def harness(tmp_path: Path, time: FakeTime) -> PlannerHarness:
    """A planner with the victim's records: a seed, a target that forks from it, and a holder."""
    (tmp_path / "tokens").write_text("instance work\noperator rule\nreader read\n")
    made = PlannerHarness(tmp_path / "tokens", time)
    victim = made.caller()
    victim.report(seed_report("s"))
    victim.request_plan(fork_request("t"))
    victim.report_holder(HOLDER)
    return made


CALLS: dict[str, Callable[[PlannerClient], object]] = {
    "PUT /v1/instances/{instance_id}": lambda caller: caller.report(seed_report("s")),
    "DELETE /v1/instances/{instance_id}": lambda caller: caller.remove("s"),
    "POST /v1/instances/{instance_id}/drain": lambda caller: caller.drain("s", force=False),
    "PUT /v1/holders/{holder_id}": lambda caller: caller.report_holder(HOLDER),
    "DELETE /v1/holders/{holder_id}": lambda caller: caller.remove_holder("h"),
    "POST /v1/forks": lambda caller: caller.request_plan(fork_request("t")),
    "POST /v1/forks/{fork_id}/progress": lambda caller: caller.progress("fork-t", PROGRESS),
    "POST /v1/forks/{fork_id}/finish": lambda caller: caller.finish("fork-t", FINISH),
}
"""Every call that changes a record, by its route."""


@pytest.mark.parametrize("route", CALLS)
def test_an_instance_token_cannot_change_the_record_of_another(harness: PlannerHarness, route: str) -> None:
    """The response is 403 with problem `not-owner`."""
    with pytest.raises(PlannerRejected) as refused:
        CALLS[route](harness.caller(ATTACKER))
    assert "not-owner" == refused.value.problem


@pytest.mark.parametrize("route", [route for route in CALLS if "drain" not in route])
def test_the_owner_changes_its_record(harness: PlannerHarness, route: str) -> None:
    """It sends the secret of its first report."""
    CALLS[route](harness.caller())


def test_every_route_of_an_instance_checks_the_owner() -> None:
    """Routes of the role `instance` change a record, or belong to the protocol of other clients."""
    changing = {
        f"{method} {path}"
        for method, path, role in ROUTES
        if role == "instance" and path.startswith("/v1/") and method != "GET" and "{below" not in path
    }
    assert changing == {route for route in CALLS if not route.startswith("POST /v1/forks/")}


@pytest.mark.parametrize("route", ["PUT /v1/instances/{instance_id}", "PUT /v1/holders/{holder_id}", "POST /v1/forks"])
def test_with_tokens_an_instance_needs_an_owner_to_register(harness: PlannerHarness, route: str) -> None:
    """A record without an owner could be changed by anyone."""
    bodies: dict[str, WireModel] = {"/v1/instances/new": seed_report("new"), "/v1/forks": fork_request("new")}
    method, path = route.replace("{instance_id}", "new").replace("{holder_id}", "new").split()
    body = bodies.get(path) or HOLDER.model_copy(update={"holder_id": "new"})
    headers = {"Authorization": "Bearer work"}
    with httpx.Client(base_url="http://planner", transport=AppTransport(harness.app), headers=headers) as web:
        response = web.request(method, path, json=body.model_dump(mode="json"))
    assert "not-owner" == response.json()["type"].rpartition("/")[2]


@pytest.mark.parametrize("secret", ["short", "ü" * 40, "x" * 257])
def test_a_weak_secret_is_rejected(web: httpx.Client, secret: str) -> None:
    """At least 32 visible characters are required."""
    response = web.delete("/v1/instances/s", headers=[(OWNER_HEADER.encode(), secret.encode("latin-1"))])
    assert 422 == response.status_code


@pytest.mark.parametrize("call", ["drain", "remove"])
def test_an_operator_drains_and_removes_any_instance(harness: PlannerHarness, call: str) -> None:
    """The operator's token suffices."""
    operator = harness.caller(ATTACKER, token="rule")
    operator.drain("s", force=True) if call == "drain" else operator.remove("s")


@pytest.mark.parametrize("route", [route for route in CALLS if "drain" not in route and "DELETE" not in route])
def test_an_operator_cannot_report_for_another(harness: PlannerHarness, route: str) -> None:
    """Lease keys belong to the owner only."""
    with pytest.raises(PlannerRejected) as refused:
        CALLS[route](harness.caller(ATTACKER, token="rule"))
    assert "not-owner" == refused.value.problem


def test_after_a_restart_the_owner_registers_again(harness: PlannerHarness) -> None:
    """Its lease keys stay the same."""
    before = harness.caller().report(seed_report("s")).lease_keys
    harness.restart()
    assert before == harness.caller().report(seed_report("s")).lease_keys


def test_after_a_restart_another_caller_gets_different_lease_keys(harness: PlannerHarness) -> None:
    """It may register before the owner; keys derived from its own secret are useless at the owner."""
    before = harness.caller().report(seed_report("s")).lease_keys
    harness.restart()
    assert set(before).isdisjoint(harness.caller(ATTACKER).report(seed_report("s")).lease_keys)


def test_a_forgotten_id_can_be_reused(harness: PlannerHarness, time: FakeTime) -> None:
    """A restarted server with the same id waits no longer than the TTL."""
    time.now += 21
    harness.caller(ATTACKER).report(seed_report("s"))


def test_a_record_keeps_its_owner_when_a_plan_is_requested(harness: PlannerHarness) -> None:
    """The plan's own change of the record must not remove the owner."""
    harness.caller().report(report("t"))
    with pytest.raises(PlannerRejected) as refused:
        harness.caller(ATTACKER).report(report("t"))
    assert "not-owner" == refused.value.problem


def test_without_tokens_an_owned_record_is_protected_too(app: FastAPI) -> None:
    """Two servers that share an id by mistake get an error."""
    PlannerClient("http://p", owner=VICTIM, transport=AppTransport(app)).report(seed_report("s"))
    with pytest.raises(PlannerRejected) as refused:
        PlannerClient("http://p", owner=ATTACKER, transport=AppTransport(app)).report(seed_report("s"))
    assert "not-owner" == refused.value.problem


def test_without_tokens_the_secret_is_optional(web: httpx.Client) -> None:
    """This is for a first try with curl."""
    statuses = [web.put("/v1/instances/s", json=seed_report("s").model_dump(mode="json")).status_code for _ in range(2)]
    assert [200, 200] == statuses


def test_without_tokens_any_caller_may_drain(app: FastAPI) -> None:
    """Every caller is an operator then."""
    PlannerClient("http://p", owner=VICTIM, transport=AppTransport(app)).report(seed_report("s"))
    PlannerClient("http://p", owner=ATTACKER, transport=AppTransport(app)).drain("s", force=True)


def test_the_rejection_has_a_hint(harness: PlannerHarness) -> None:
    """The hint names the setting."""
    with pytest.raises(PlannerRejected) as refused:
        harness.caller(ATTACKER).remove("s")
    assert "RFORK_OWNER_SECRET" in refused.value.hint


def test_lists_do_not_show_owners(harness: PlannerHarness) -> None:
    """A reader sees reports, not owners."""
    reader = harness.caller(token="read")
    assert "owner" not in reader.instance("s").model_dump_json() + reader.fork("fork-t").model_dump_json()
