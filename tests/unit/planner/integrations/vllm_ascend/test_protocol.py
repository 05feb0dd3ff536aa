"""vLLM-Ascend's RFork protocol: statuses, seeds, and the shared registry."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from planner.app import create_app
from planner.core.records import StoreChange
from planner.integrations.vllm_ascend.headers import AscendSeed
from planner.integrations.vllm_ascend.service import AscendLeaseService
from rfork.errors import PlannerRejected
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkRequest
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import AppTransport
from tests.unit.planner.builders import FakeTime, fork_request, make_service, report, seed_report
from tests.unit.planner.integrations.vllm_ascend.seed_client import (
    ADD,
    KEY,
    OTHER,
    SEED,
    SEED_ID,
    acquire_lease,
    add_seed,
    get_seed,
    instance_states,
    put_seed,
    remove_seed,
    renew_lease,
)


def test_get_seed_responds_with_headers_only(web: httpx.Client) -> None:
    """Address and rank of the seed, the lease's id and its time to live; no body."""
    add_seed(web)
    response = get_seed(web)
    lease_headers = {name: response.headers[name] for name in (*SEED, "LEASE_TTL_SEC")}
    assert 200 == response.status_code
    assert b"" == response.content
    assert {**SEED, "LEASE_TTL_SEC": "30"} == lease_headers
    assert 32 == len(response.headers["USER_ID"])


def test_keys_with_different_versions_never_match(web: httpx.Client) -> None:
    """Each client gets the seed of its own version, and none if only another version has one."""
    old, new = (KEY.replace("qwen3", f"qwen3@{version}") for version in ("v1", "v2"))
    add_seed(web, key=old)
    assert 404 == get_seed(web, new).status_code
    add_seed(web, OTHER, key=new)
    assert OTHER["SEED_IP"] == get_seed(web, new).headers["SEED_IP"]
    assert SEED["SEED_IP"] == get_seed(web, old).headers["SEED_IP"]


def test_seed_keys_are_versions(web: httpx.Client, planner: PlannerClient) -> None:
    """The lists show different versions for two keys."""
    add_seed(web, key="qwen3@v1$0")
    add_seed(web, OTHER, key="qwen3@v2$0")
    versions = [view.version or "" for view in planner.instances()]
    assert 2 == len(set(versions))
    assert all(version.startswith("seed-key:") for version in versions)


def test_each_call_returns_each_of_its_statuses(web: httpx.Client) -> None:
    """Each call of the protocol, in an order that produces each of its statuses."""
    never = {**SEED, "USER_ID": "unknown"}
    statuses = [
        get_seed(web).status_code,
        remove_seed(web),
        put_seed(web, never),
        renew_lease(web, never),
        add_seed(web).status_code,
    ]
    leased = acquire_lease(web)
    statuses += [
        renew_lease(web, leased),
        get_seed(web).status_code,
        remove_seed(web),
        put_seed(web, leased),
        put_seed(web, leased),
    ]
    statuses += [renew_lease(web, leased), add_seed(web).status_code, remove_seed(web), remove_seed(web)]
    assert [404, 404, 404, 404, 200, 200, 404, 409, 200, 404, 404, 200, 200, 404] == statuses


def test_responses_have_no_body(web: httpx.Client) -> None:
    """Granted, rejected or malformed: these clients parse no body."""
    responses = [
        add_seed(web),
        get_seed(web),
        get_seed(web),
        get_seed(web, "other"),
        web.get("/get_seed"),
        web.post("/put_seed"),
    ]
    assert [(200, b""), (200, b""), (404, b""), (404, b""), (400, b""), (400, b"")] == [
        (response.status_code, response.content) for response in responses
    ]


BAD = [
    ("GET", "/get_seed", {}, "SEED_KEY is missing"),
    ("GET", "/get_seed", {"SEED_KEY": ""}, "SEED_KEY is missing"),
    ("GET", "/get_seed", {"SEED_KEY": "k" * 501},
     "SEED_KEY must be at most 500 printable ASCII characters"),
    ("GET", "/get_seed", {"SEED_KEY": "caf\xe9"},
     "SEED_KEY must be at most 500 printable ASCII characters"),
    ("GET", "/get_seed", {"SEED_KEY": "a\x07b"},
     "SEED_KEY must be at most 500 printable ASCII characters"),
    ("POST", "/add_seed", {**ADD, "SEED_IP": "seed.example"}, "SEED_IP is not an IP address"),
    ("POST", "/add_seed", {**ADD, "SEED_IP": "10.0.0.7; x"}, "SEED_IP is not an IP address"),
    ("POST", "/add_seed", {**ADD, "SEED_IP": "fe80::1%eth0"},
     "SEED_IP has a scope, which is meaningless on another machine"),
    ("POST", "/add_seed", {**ADD, "SEED_PORT": "0"}, "SEED_PORT is not a number from 1 to 65535"),
    ("POST", "/add_seed", {**ADD, "SEED_PORT": "65536"}, "SEED_PORT is not a number from 1 to 65535"),
    ("POST", "/add_seed", {**ADD, "SEED_PORT": "+80"}, "SEED_PORT is not a number from 1 to 65535"),
    ("POST", "/add_seed", {**ADD, "SEED_RANK": "-1"}, "SEED_RANK is not a number from 0 to 999999"),
    ("POST", "/add_seed", {**ADD, "SEED_RANK": "\xb2"}, "SEED_RANK is not a number from 0 to 999999"),
    ("POST", "/add_seed", {**ADD, "SEED_REFCNT": "9" * 5000}, "SEED_REFCNT is not a number from 0 to 999999"),
    ("POST", "/add_seed", {**SEED, "SEED_KEY": KEY}, "SEED_REFCNT is missing"),
    ("POST", "/put_seed", SEED, "USER_ID is missing"),
    ("POST", "/put_seed", {**SEED, "USER_ID": "a b"}, "USER_ID was not issued by a planner"),
    ("POST", "/renew_seed_lease", {"USER_ID": "u"}, "SEED_IP is missing"),
    ("POST", "/remove_seed", SEED, "SEED_KEY is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "headers", "reason"), BAD)
def test_an_invalid_header_is_named(
    web: httpx.Client, method: str, path: str, headers: dict[str, str], reason: str
) -> None:
    """Status 400, never 422; the reason is in a header and does not contain the value."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    response = web.request(method, path, headers=raw)
    assert 400 == response.status_code
    assert reason == response.headers["RFORK_REASON"]


def test_a_duplicate_header_is_rejected(web: httpx.Client) -> None:
    """A proxy and the planner might use different ones."""
    response = web.request("GET", "/get_seed", headers=[("SEED_KEY", "a"), ("SEED_KEY", "b")])
    assert 400 == response.status_code
    assert "SEED_KEY occurs more than once" == response.headers["RFORK_REASON"]


# -- seeds ----------------------------------------------------------------------------------------


def test_a_seed_expires_without_heartbeats(web: httpx.Client, planner: PlannerClient, time: FakeTime) -> None:
    """One heartbeat per 30 s is enough, and one may be lost; after 75 s of silence it is removed."""
    add_seed(web)
    time.now += 74
    alive = get_seed(web).status_code
    time.now += 31
    assert 200 == alive
    assert 404 == get_seed(web).status_code
    assert {} == instance_states(planner)


def test_a_restarted_planner_learns_of_a_seed_from_its_heartbeat(web: httpx.Client) -> None:
    """Earlier leases are lost; a reader that the seed reports keeps its slot."""
    add_seed(web)
    leased = acquire_lease(web)
    again = httpx.Client(base_url="http://planner", transport=AppTransport(create_app(PlannerSettings())))
    lost = [renew_lease(again, leased), put_seed(again, leased), get_seed(again).status_code]
    add_seed(again, references="1")
    while_counted = get_seed(again).status_code
    add_seed(again, references="0")
    assert [404, 404, 404] == lost
    assert 404 == while_counted
    assert 200 == get_seed(again).status_code


def test_reported_readers_are_not_counted_twice(web: httpx.Client) -> None:
    """Readers in `SEED_REFCNT` with a lease of this planner are already counted."""
    add_seed(web)
    leased = acquire_lease(web)
    add_seed(web, references="1")
    put_seed(web, leased)
    assert 200 == get_seed(web).status_code


def test_a_leased_seed_is_removed_with_its_last_lease(web: httpx.Client, planner: PlannerClient) -> None:
    """409 at first; its heartbeats do not cancel the removal, its reader finishes, and no new reader gets it."""
    add_seed(web)
    leased = acquire_lease(web)
    refused = remove_seed(web)
    add_seed(web)
    states = [instance_states(planner)[SEED_ID], renew_lease(web, leased), put_seed(web, leased)]
    assert 409 == refused
    assert ["draining", 200, 200] == states
    assert 404 == get_seed(web).status_code
    assert {} == instance_states(planner)


def test_a_seed_that_was_to_be_removed_may_come_back(web: httpx.Client, time: FakeTime) -> None:
    """Once its lease has expired, a heartbeat registers it again."""
    add_seed(web)
    acquire_lease(web)
    remove_seed(web)
    time.now += 31
    add_seed(web)
    assert 200 == get_seed(web).status_code


def test_removing_a_seed_requires_its_key(web: httpx.Client) -> None:
    """The key is part of the request."""
    add_seed(web)
    assert 404 == remove_seed(web, key="other")
    assert 200 == get_seed(web).status_code


def test_a_seed_may_change_its_key(web: httpx.Client) -> None:
    """Another process on the same port serves another model."""
    add_seed(web)
    add_seed(web, key="new")
    assert 404 == get_seed(web).status_code
    assert 200 == get_seed(web, "new").status_code


# -- shared registry ------------------------------------------------------------------------------


def test_seeds_and_leases_are_in_the_lists(web: httpx.Client, planner: PlannerClient) -> None:
    """An instance with its address; a fork that reads from it, and its result."""
    add_seed(web)
    leased = acquire_lease(web)
    get_seed(web)
    report = next(view.report for view in planner.instances() if view.report.instance_id == SEED_ID)
    fork = next(fork for fork in planner.forks() if fork.fork_id == leased["USER_ID"])
    put_seed(web, leased)
    ended = [fork.finish.outcome for fork in planner.forks() if fork.finish is not None]
    assert "10.0.0.7:4000" == report.address
    assert f"ascend:{KEY}" == report.model
    assert "serving" == report.state
    assert [SEED_ID] == [share.source_id for share in fork.plan]
    assert "running" == fork.state
    assert ["fallback", "forked"] == sorted(ended)
    assert {SEED_ID: "serving"} == instance_states(planner)


def test_leases_are_in_the_metrics(web: httpx.Client) -> None:
    """They count like rfork's own forks."""
    add_seed(web)
    acquire_lease(web)
    lines = web.get("/metrics").text.splitlines()
    assert {"rfork_planner_active_leases 1.0", 'rfork_planner_instances{state="serving"} 1.0'} <= set(lines)


def test_an_operator_can_drain_a_seed(web: httpx.Client) -> None:
    """The next client gets another seed; heartbeats do not undo the drain."""
    add_seed(web)
    add_seed(web, OTHER)
    web.post(f"/v1/instances/{SEED_ID}/drain")
    add_seed(web)
    assert "10.0.0.8" == acquire_lease(web)["SEED_IP"]
    assert 404 == get_seed(web).status_code


def test_rforks_own_forks_and_ascend_leases_never_mix(web: httpx.Client, planner: PlannerClient) -> None:
    """Not even for a model named like a key."""
    add_seed(web)
    planner.report(seed_report("native", model=KEY))
    plan = planner.request_plan(fork_request("target", model=KEY))
    assert ["native"] == [route.source_id for route in plan.routes]
    assert "10.0.0.7" == acquire_lease(web)["SEED_IP"]
    assert 404 == get_seed(web).status_code


@pytest.mark.parametrize(("field", "name", "model"), [("model", "s", f"ascend:{KEY}"), ("instance_id", SEED_ID, "m")])
def test_names_of_this_protocol_are_rejected_elsewhere(
    planner: PlannerClient, field: str, name: str, model: str
) -> None:
    """A report or request must not look like a seed, because leases identify seeds by their names."""
    refusals = []
    with pytest.raises(PlannerRejected) as refused:
        planner.report(seed_report(name, model=model))
    refusals.append(refused.value)
    with pytest.raises(PlannerRejected) as refused:
        planner.request_plan(ForkRequest(fork_id="f", instance=report(name, model=model)))
    refusals.append(refused.value)
    assert [(422, "invalid-request", True)] * 2 == [
        (each.status, each.problem, f"{field}: names that start with ascend:" in str(each)) for each in refusals
    ]


async def test_a_seed_with_another_name_format_is_not_leased(time: FakeTime) -> None:
    """Whatever the store contains: 404, and the new lease has ended."""
    registry = make_service(time)
    service = AscendLeaseService(registry)
    await service.add(KEY, AscendSeed("10.0.0.7", 4000, 1), 0)
    known = registry.state.instances()[0]
    strange = known.report.model_copy(update={"instance_id": "strange"})
    await registry.store.commit(StoreChange(instances=(replace(known, report=strange),), removed=(SEED_ID,)))
    response = await service.lease(KEY, "10.0.0.9")
    assert 404 == response.status_code
    assert [] == registry.state.live_forks()
    assert ["strange"] == [each.report.instance_id for each in registry.state.instances()]


def test_ascend_seeds_are_not_compared_with_rforks(web: httpx.Client, planner: PlannerClient) -> None:
    """They have no manifest to compare with a request for a model of that name."""
    add_seed(web)
    plan = planner.request_plan(fork_request("target", model=KEY))
    assert () == plan.routes
    assert plan.mismatched_source is None


def test_a_token_is_required_here_too() -> None:
    """These clients send none: a proxy must add one with the role of an instance."""
    app = create_app(PlannerSettings(token="right"))  # type: ignore[arg-type]
    web = httpx.Client(base_url="http://planner", transport=AppTransport(app))
    refused = add_seed(web).status_code
    web.headers["Authorization"] = "Bearer right"
    assert 401 == refused
    assert 200 == add_seed(web).status_code
    assert 200 == get_seed(web).status_code


OWN_STATUSES = [
    ("get", "/get_seed", ["SEED_KEY"], {"200", "400", "401", "403", "404"}),
    ("post", "/add_seed", ["SEED_KEY", *SEED, "SEED_REFCNT"], {"200", "400", "401", "403"}),
    ("post", "/put_seed", [*SEED, "USER_ID"], {"200", "400", "401", "403", "404"}),
    ("post", "/renew_seed_lease", [*SEED, "USER_ID"], {"200", "400", "401", "403", "404"}),
    ("post", "/remove_seed", ["SEED_KEY", *SEED], {"200", "400", "401", "403", "404", "409"}),
]


@pytest.mark.parametrize(("method", "path", "headers", "statuses"), OWN_STATUSES)
def test_the_protocol_is_in_the_openapi_document(
    web: httpx.Client, method: str, path: str, headers: list[str], statuses: set[str]
) -> None:
    """Each route documents its headers and statuses, without 422."""
    operation = web.get("/openapi.json").json()["paths"][path][method]
    documented = set(operation["responses"])
    assert headers == [each["name"] for each in operation["parameters"]]
    assert set() == statuses - documented
    assert "422" not in documented
