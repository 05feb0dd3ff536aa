"""The protocol of vLLM-Ascend's RFork: its table, seeds, and one registry for all."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from planner.app import create_app
from planner.integrations.vllm_ascend.headers import AscendSeed
from planner.integrations.vllm_ascend.service import AscendLeaseService
from planner.store.base import StoreChange
from rfork.errors import PlannerRejected
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkRequest
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import AppTransport
from tests.unit.planner.builders import FakeTime, fork_request, make_registry, report, seed_report
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


def test_get_seed_answers_in_headers_alone(web: httpx.Client) -> None:
    """Address and rank of the seed, the lease's name and its time to live; no body."""
    add_seed(web)
    response = get_seed(web)
    lease_headers = {name: response.headers[name] for name in (*SEED, "LEASE_TTL_SEC")}
    assert (200, b"", {**SEED, "LEASE_TTL_SEC": "30"}, 32) == (
        response.status_code, response.content, lease_headers, len(response.headers["USER_ID"]),
    )  # fmt: skip


def test_keys_that_differ_only_in_a_version_never_meet(web: httpx.Client) -> None:
    """Each client gets the seed of its own version, and none where only the other version has one."""
    old, new = (KEY.replace("qwen3", f"qwen3@{version}") for version in ("v1", "v2"))
    add_seed(web, key=old)
    assert 404 == get_seed(web, new).status_code
    add_seed(web, OTHER, key=new)
    assert OTHER["SEED_IP"] == get_seed(web, new).headers["SEED_IP"]
    assert SEED["SEED_IP"] == get_seed(web, old).headers["SEED_IP"]


def test_seed_keys_are_versions(web: httpx.Client, planner: PlannerClient) -> None:
    """The lists show that two keys stand for different weights."""
    add_seed(web, key="qwen3@v1$0")
    add_seed(web, OTHER, key="qwen3@v2$0")
    versions = [view.version or "" for view in planner.instances()]
    assert 2 == len(set(versions))
    assert all(version.startswith("seed-key:") for version in versions)


def test_the_statuses_of_one_seeds_life(web: httpx.Client) -> None:
    """Each call of the table, in an order that meets each of its answers."""
    never = {**SEED, "USER_ID": "nobody"}
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


def test_every_answer_is_without_a_body(web: httpx.Client) -> None:
    """Granted, refused or malformed: these clients parse no body."""
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
     "SEED_KEY is not at most 500 printable characters of ASCII"),
    ("GET", "/get_seed", {"SEED_KEY": "caf\xe9"},
     "SEED_KEY is not at most 500 printable characters of ASCII"),
    ("GET", "/get_seed", {"SEED_KEY": "a\x07b"},
     "SEED_KEY is not at most 500 printable characters of ASCII"),
    ("POST", "/add_seed", {**ADD, "SEED_IP": "seed.example"}, "SEED_IP is no IP address"),
    ("POST", "/add_seed", {**ADD, "SEED_IP": "10.0.0.7; x"}, "SEED_IP is no IP address"),
    ("POST", "/add_seed", {**ADD, "SEED_IP": "fe80::1%eth0"},
     "SEED_IP has a scope, which means nothing on another machine"),
    ("POST", "/add_seed", {**ADD, "SEED_PORT": "0"}, "SEED_PORT is no number from 1 to 65535"),
    ("POST", "/add_seed", {**ADD, "SEED_PORT": "65536"}, "SEED_PORT is no number from 1 to 65535"),
    ("POST", "/add_seed", {**ADD, "SEED_PORT": "+80"}, "SEED_PORT is no number from 1 to 65535"),
    ("POST", "/add_seed", {**ADD, "SEED_RANK": "-1"}, "SEED_RANK is no number from 0 to 999999"),
    ("POST", "/add_seed", {**ADD, "SEED_RANK": "\xb2"}, "SEED_RANK is no number from 0 to 999999"),
    ("POST", "/add_seed", {**ADD, "SEED_REFCNT": "9" * 5000}, "SEED_REFCNT is no number from 0 to 999999"),
    ("POST", "/add_seed", {**SEED, "SEED_KEY": KEY}, "SEED_REFCNT is missing"),
    ("POST", "/put_seed", SEED, "USER_ID is missing"),
    ("POST", "/put_seed", {**SEED, "USER_ID": "a b"}, "USER_ID is none that a planner gives"),
    ("POST", "/renew_seed_lease", {"USER_ID": "u"}, "SEED_IP is missing"),
    ("POST", "/remove_seed", SEED, "SEED_KEY is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "headers", "reason"), BAD)
def test_a_header_that_cannot_be_used_is_named(
    web: httpx.Client, method: str, path: str, headers: dict[str, str], reason: str
) -> None:
    """400, never 422; the reason stands in a header and repeats no value."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    response = web.request(method, path, headers=raw)
    assert (400, reason) == (response.status_code, response.headers["RFORK_REASON"])


def test_a_header_that_comes_twice_is_refused(web: httpx.Client) -> None:
    """A proxy and the planner could each believe another one."""
    response = web.request("GET", "/get_seed", headers=[("SEED_KEY", "a"), ("SEED_KEY", "b")])
    assert (400, "SEED_KEY is given more than once") == (
        response.status_code,
        response.headers["RFORK_REASON"],
    )


# -- seeds ----------------------------------------------------------------------------------------


def test_a_seed_lives_from_heartbeat_to_heartbeat(web: httpx.Client, planner: PlannerClient, time: FakeTime) -> None:
    """One each 30 s is enough, and one may get lost; after 75 s of silence it is forgotten."""
    add_seed(web)
    time.now += 74
    alive = get_seed(web).status_code
    time.now += 31
    assert (200, 404, {}) == (alive, get_seed(web).status_code, instance_states(planner))


def test_a_planner_that_restarted_knows_a_seed_again_by_its_heartbeat(web: httpx.Client) -> None:
    """Leases from before are gone; a reader that the seed counts keeps its slot."""
    add_seed(web)
    leased = acquire_lease(web)
    again = httpx.Client(base_url="http://planner", transport=AppTransport(create_app(PlannerSettings())))
    lost = [renew_lease(again, leased), put_seed(again, leased), get_seed(again).status_code]
    add_seed(again, references="1")
    while_counted = get_seed(again).status_code
    add_seed(again, references="0")
    assert ([404, 404, 404], 404, 200) == (lost, while_counted, get_seed(again).status_code)


def test_readers_that_the_seed_counts_are_not_counted_twice(web: httpx.Client) -> None:
    """Of `SEED_REFCNT`, those with a lease of this planner are known already."""
    add_seed(web)
    leased = acquire_lease(web)
    add_seed(web, references="1")
    put_seed(web, leased)
    assert 200 == get_seed(web).status_code


def test_a_seed_that_is_removed_while_leased_goes_with_the_last_lease(
    web: httpx.Client, planner: PlannerClient
) -> None:
    """409 at first; its own heartbeats do not bring it back, its reader finishes, nobody else gets it."""
    add_seed(web)
    leased = acquire_lease(web)
    refused = remove_seed(web)
    add_seed(web)
    states = [instance_states(planner)[SEED_ID], renew_lease(web, leased), put_seed(web, leased)]
    assert (409, ["draining", 200, 200], 404, {}) == (
        refused,
        states,
        get_seed(web).status_code,
        instance_states(planner),
    )


def test_a_seed_that_wanted_to_leave_may_come_back(web: httpx.Client, time: FakeTime) -> None:
    """Once the lease that kept it has lapsed, a heartbeat registers it anew."""
    add_seed(web)
    acquire_lease(web)
    remove_seed(web)
    time.now += 31
    add_seed(web)
    assert 200 == get_seed(web).status_code


def test_only_who_knows_the_key_removes_a_seed(web: httpx.Client) -> None:
    """The key is part of what is asked for."""
    add_seed(web)
    assert (404, 200) == (remove_seed(web, key="other"), get_seed(web).status_code)


def test_a_seed_may_change_its_key(web: httpx.Client) -> None:
    """A process that came up on the same port seeds something else."""
    add_seed(web)
    add_seed(web, key="new")
    assert (404, 200) == (get_seed(web).status_code, get_seed(web, "new").status_code)


# -- one registry for all -------------------------------------------------------------------------


def test_seeds_and_leases_are_listed_with_all_others(web: httpx.Client, planner: PlannerClient) -> None:
    """An instance with its address; a fork that runs from it, and how it ended."""
    add_seed(web)
    leased = acquire_lease(web)
    get_seed(web)
    report = next(view.report for view in planner.instances() if view.report.instance_id == SEED_ID)
    fork = next(fork for fork in planner.forks() if fork.fork_id == leased["USER_ID"])
    put_seed(web, leased)
    ended = [fork.finish.outcome for fork in planner.forks() if fork.finish is not None]
    assert ("10.0.0.7:4000", f"ascend:{KEY}", "serving", [SEED_ID], "running") == (
        report.address, report.model, report.state, [share.source_id for share in fork.plan], fork.state,
    )  # fmt: skip
    assert (["fallback", "forked"], {SEED_ID: "serving"}) == (sorted(ended), instance_states(planner))


def test_leases_show_in_the_metrics(web: httpx.Client) -> None:
    """They count like those of rfork's own forks."""
    add_seed(web)
    acquire_lease(web)
    lines = web.get("/metrics").text.splitlines()
    assert {"rfork_planner_active_leases 1.0", 'rfork_planner_instances{state="serving"} 1.0'} <= set(lines)


def test_an_operator_drains_such_a_seed(web: httpx.Client) -> None:
    """The next client gets the other one; its heartbeats do not undo it."""
    add_seed(web)
    add_seed(web, OTHER)
    web.post(f"/v1/instances/{SEED_ID}/drain")
    add_seed(web)
    assert ("10.0.0.8", 404) == (acquire_lease(web)["SEED_IP"], get_seed(web).status_code)


def test_rforks_own_forks_and_these_never_meet(web: httpx.Client, planner: PlannerClient) -> None:
    """Not even where a model is named like a key."""
    add_seed(web)
    planner.report(seed_report("native", model=KEY))
    plan = planner.request_plan(fork_request("target", model=KEY))
    assert (["native"], "10.0.0.7", 404) == (
        [route.source_id for route in plan.routes], acquire_lease(web)["SEED_IP"], get_seed(web).status_code,
    )  # fmt: skip


@pytest.mark.parametrize(("field", "name", "model"), [("model", "s", f"ascend:{KEY}"), ("instance_id", SEED_ID, "m")])
def test_names_of_this_protocol_are_refused_elsewhere(
    planner: PlannerClient, field: str, name: str, model: str
) -> None:
    """Neither a report nor a request may pass for a seed: who leases it goes by the form of its name."""
    refusals = []
    with pytest.raises(PlannerRejected) as refused:
        planner.report(seed_report(name, model=model))
    refusals.append(refused.value)
    with pytest.raises(PlannerRejected) as refused:
        planner.request_plan(ForkRequest(fork_id="f", instance=report(name, model=model)))
    refusals.append(refused.value)
    assert [(422, "invalid-request", True)] * 2 == [
        (each.status, each.problem, f"{field}: names that begin with ascend:" in str(each)) for each in refusals
    ]


async def test_a_seed_with_a_name_of_another_form_is_not_leased(time: FakeTime) -> None:
    """Whatever a store holds: 404, and the lease that was begun has ended."""
    registry = make_registry(time)
    service = AscendLeaseService(registry)
    await service.add(KEY, AscendSeed("10.0.0.7", 4000, 1), 0)
    known = registry.state.instances()[0]
    strange = known.report.model_copy(update={"instance_id": "strange"})
    await registry.store.commit(StoreChange(instances=(replace(known, report=strange),), removed=(SEED_ID,)))
    response = await service.lease(KEY, "10.0.0.9")
    assert (404, [], ["strange"]) == (
        response.status_code, registry.state.live_forks(),
        [each.report.instance_id for each in registry.state.instances()],
    )  # fmt: skip


def test_such_a_seed_is_not_even_compared_with(web: httpx.Client, planner: PlannerClient) -> None:
    """It has no manifest to show to one who asks for a model of that name."""
    add_seed(web)
    plan = planner.request_plan(fork_request("target", model=KEY))
    assert ((), None) == (plan.routes, plan.mismatched_source)


def test_a_token_is_asked_for_here_too() -> None:
    """These clients send none: a proxy has to add it, with the role of an instance."""
    app = create_app(PlannerSettings(token="right"))  # type: ignore[arg-type]
    web = httpx.Client(base_url="http://planner", transport=AppTransport(app))
    refused = add_seed(web).status_code
    web.headers["Authorization"] = "Bearer right"
    assert (401, 200, 200) == (refused, add_seed(web).status_code, get_seed(web).status_code)


OWN_STATUSES = [
    ("get", "/get_seed", ["SEED_KEY"], {"200", "400", "401", "403", "404"}),
    ("post", "/add_seed", ["SEED_KEY", *SEED, "SEED_REFCNT"], {"200", "400", "401", "403"}),
    ("post", "/put_seed", [*SEED, "USER_ID"], {"200", "400", "401", "403", "404"}),
    ("post", "/renew_seed_lease", [*SEED, "USER_ID"], {"200", "400", "401", "403", "404"}),
    ("post", "/remove_seed", ["SEED_KEY", *SEED], {"200", "400", "401", "403", "404", "409"}),
]


@pytest.mark.parametrize(("method", "path", "headers", "statuses"), OWN_STATUSES)
def test_the_protocol_is_described(
    web: httpx.Client, method: str, path: str, headers: list[str], statuses: set[str]
) -> None:
    """Each route of the OpenAPI document names its headers and its statuses, and 422 is none of them."""
    operation = web.get("/openapi.json").json()["paths"][path][method]
    documented = set(operation["responses"])
    assert (headers, set(), False) == (
        [each["name"] for each in operation["parameters"]], statuses - documented, "422" in documented,
    )  # fmt: skip
