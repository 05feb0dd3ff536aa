"""Announced scale-ups on real planners."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import httpx
import pytest
import trustme

from planner.integrations.planner_api import AsyncPlannerClient, PlannerUnavailable
from planner.server import run_in_thread
from rfork.planner_client import client as planner_client
from rfork.planner_client.client import PlannerClient
from rfork.schema import Plan, ScaleUp, ScaleUpInfo
from rfork.settings import InstanceSettings, PlannerSettings
from tests.conftest import StartRfork
from tests.plan_gate import PlanGate
from tests.processes import RedisServer, RforkProcess
from tests.unit.planner.builders import fork_request, report, seed_report

READY = r'"event": ?"ready"'
TIMEOUT_S = 60.0
ARRIVAL_GAP_S = 0.3
"""Seconds between two forks of one scale-up."""
SCALEUP_WAIT_S = "8"
"""The maximum."""
PLAN_FORKS_BUCKET = re.compile(r'^rfork_planner_plan_batch_size_bucket\{le="([0-9.]+)"\} ([0-9.]+)$', re.MULTILINE)


def url_of(process: RforkProcess) -> str:
    """Return the URL of a ready planner."""
    return cast(str, json.loads(process.wait_for(rf"^.*{READY}.*$").group())["url"])


def until(predicate: Callable[[], bool]) -> None:
    """Poll until the predicate is true; fail the test after a timeout."""
    deadline = time.monotonic() + TIMEOUT_S
    while not predicate():
        if time.monotonic() > deadline:
            pytest.fail(f"condition not met within {TIMEOUT_S:g} s")
        threading.Event().wait(0.02)


def announce(url: str, replicas: int, model: str = "tiny") -> ScaleUpInfo:
    """Announce a scale-up, as an autoscaler does."""
    scaleup = ScaleUp(scaleup_id="up", model=model, replicas=replicas)
    response = httpx.post(
        f"{url}/v1/scaleups", json=scaleup.model_dump(mode="json"), trust_env=False, timeout=TIMEOUT_S
    )
    return ScaleUpInfo.model_validate_json(response.raise_for_status().content)


def get_scaleup(url: str) -> ScaleUpInfo:
    """Return the scale-up from one planner."""
    response = httpx.get(f"{url}/v1/scaleups/up", trust_env=False, timeout=TIMEOUT_S)
    return ScaleUpInfo.model_validate_json(response.raise_for_status().content)


def plan_counts(url: str) -> dict[float, int]:
    """Return the number of plans per upper bound of their number of forks."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=TIMEOUT_S).text
    counts = [(float(bound), int(float(count))) for bound, count in PLAN_FORKS_BUCKET.findall(text)]
    before = [0, *(count for _, count in counts)]
    return {bound: count - old for (bound, count), old in zip(counts, before, strict=False) if count > old}


@pytest.mark.parametrize(("announced", "expected"), [(True, {4.0: 1}), (False, {})])
@pytest.mark.slow  # logic: tests/unit/planner/scaleups/test_batching.py
def test_announced_forks_share_one_plan(
    rfork_process: StartRfork, tiny_model: Path, tmp_path: Path, announced: bool, expected: dict[float, int]
) -> None:
    """Three real forks arrive one after the other: one plan for three if announced, otherwise one each."""
    # Without a window, unannounced forks are planned individually on arrival, however close.
    environment = {"RFORK_PLANNER_SCALEUP_WAIT_S": SCALEUP_WAIT_S, "RFORK_PLANNER_BATCH_WINDOW_S": "0"}
    planner = rfork_process("planner", "--port", "0", "--json", until=READY, environment=environment)
    url, own = url_of(planner), {"RFORK_TRANSPORTS": "http", "RFORK_PLANNER_TIMEOUT_S": "50"}
    common = (str(tiny_model), "--name", "tiny", "--planner", url, "--json")
    rfork_process("seed", *common, until=READY, environment=own)
    if announced:
        view = announce(url, 3)
        assert 1 == view.seeds
        assert "they fork from 1 seed" == view.reason
    gates = [PlanGate(tmp_path / f"t{number}") for number in range(3)]
    pulls = [rfork_process("pull", *common, "--sha256", environment=own | gate.environment) for gate in gates]
    for gate, pull in zip(gates, pulls, strict=True):
        gate.wait_reached(pull)
    for gate in gates:
        gate.open()
        threading.Event().wait(ARRIVAL_GAP_S)
    codes = [pull.wait() for pull in pulls]
    digests = {json.loads(pull.stdout.splitlines()[-1])["sha256"] for pull in pulls}
    # A fork that lost a finished relay is planned again individually.
    together = {bound: count for bound, count in plan_counts(url).items() if bound > 1}
    assert [0] * 3 == codes
    assert 1 == len(digests)
    assert expected == together
    if announced:
        assert 3 == get_scaleup(url).arrived_count


@pytest.fixture
def replicas(redis_server: RedisServer, rfork_process: StartRfork) -> tuple[str, str]:
    """The URLs of two planners on one Redis."""
    environment = {
        "RFORK_PLANNER_STORE": redis_server.url,
        "RFORK_PLANNER_LEASE_KEYS": "s" * 32,
        "RFORK_PLANNER_STORE_TIMEOUT_S": "20",
        "RFORK_PLANNER_INSTANCE_TTL_S": "600",  # nothing sends heartbeats here
        "RFORK_PLANNER_SCALEUP_WAIT_S": SCALEUP_WAIT_S,
        "RFORK_PLANNER_BATCH_WINDOW_S": "0",
    }
    processes = [rfork_process("planner", "--port", "0", "--json", environment=environment) for _ in range(2)]
    first, second = map(url_of, processes)
    return first, second


@pytest.mark.slow  # logic: tests/unit/planner/store/test_replica.py
def test_planner_replicas_count_arrivals_together(replicas: tuple[str, str]) -> None:
    """A scale-up announced to one is known to both: forks wait at both, and are planned when the last one
    arrives at either.
    """
    first, second = (PlannerClient(url, timeout_s=TIMEOUT_S) for url in replicas)
    first.report(seed_report("s", model="tiny"))
    until(lambda: len(second.instances()) == 1)
    announce(replicas[0], 4)
    until(lambda: bool(httpx.get(f"{replicas[1]}/v1/scaleups", trust_env=False, timeout=TIMEOUT_S).json()))
    with ThreadPoolExecutor(4) as threads:
        plans: list[Future[Plan]] = []
        for index, planner in enumerate((first, second, first)):
            plans.append(threads.submit(planner.request_plan, fork_request(f"t{index}", model="tiny")))
            until(lambda: [get_scaleup(url).arrived_count for url in replicas] == [len(plans)] * 2)
        waiting = [plan.done() for plan in plans]
        plans.append(threads.submit(second.request_plan, fork_request("t3", model="tiny")))
        sources = [route.source_id for plan in plans for route in plan.result(TIMEOUT_S).routes]
    assert [False] * 3 == waiting
    assert [{2.0: 1}, {2.0: 1}] == [plan_counts(url) for url in replicas]
    assert 4 == len(set(sources))
    for planner in (first, second):
        planner.close()


@pytest.mark.slow  # logic: tests/unit/planner/store/test_replica.py
def test_a_scale_up_withdrawn_at_one_replica_ends_at_both(replicas: tuple[str, str]) -> None:
    """A fork that waits at the other replica gets its plan."""
    with PlannerClient(replicas[1], timeout_s=TIMEOUT_S) as second, ThreadPoolExecutor(1) as threads:
        announce(replicas[0], 2)
        until(lambda: bool(httpx.get(f"{replicas[1]}/v1/scaleups", trust_env=False, timeout=TIMEOUT_S).json()))
        plan = threads.submit(second.request_plan, fork_request("a", model="tiny"))
        until(lambda: get_scaleup(replicas[0]).arrived_count == 1)
        waiting = plan.done()
        httpx.delete(f"{replicas[0]}/v1/scaleups/up", trust_env=False, timeout=TIMEOUT_S).raise_for_status()
        assert not waiting
        assert "fork-a" == plan.result(TIMEOUT_S).fork_id
        assert [] == httpx.get(f"{replicas[1]}/v1/scaleups", trust_env=False, timeout=TIMEOUT_S).json()


@pytest.mark.slow  # logic: tests/unit/planner/store/test_replica.py
def test_a_planner_that_joins_later_knows_announced_scale_ups(
    redis_server: RedisServer, rfork_process: StartRfork
) -> None:
    """Including the arrivals so far."""
    environment = {
        "RFORK_PLANNER_STORE": redis_server.url,
        "RFORK_PLANNER_LEASE_KEYS": "s" * 32,
        "RFORK_PLANNER_STORE_TIMEOUT_S": "20",
        "RFORK_PLANNER_INSTANCE_TTL_S": "600",  # nothing sends heartbeats here
        "RFORK_PLANNER_SCALEUP_WAIT_S": "0",
    }
    first = url_of(rfork_process("planner", "--port", "0", "--json", environment=environment))
    announce(first, 3)
    with PlannerClient(first) as planner:
        planner.request_plan(fork_request("a", model="tiny"))
    second = url_of(rfork_process("planner", "--port", "0", "--json", environment=environment))
    views = [get_scaleup(url).model_copy(update={"expires_in_s": 0.0}) for url in (first, second)]
    assert 1 == views[0].arrived_count
    assert views[0] == views[1]


# -- the integrations' client -------------------------------------------------------------------------


async def test_integrations_reach_a_planner_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the authority's certificate and a client certificate; without the latter the request fails."""
    ours = trustme.CA()
    ours.cert_pem.write_to_path(tmp_path / "ca")
    leaf = ours.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(tmp_path / "key")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "certificate")
    for name in ("ca", "key", "certificate"):
        monkeypatch.setenv(f"RFORK_TLS_{name.upper()}", str(tmp_path / name))
    with run_in_thread(PlannerSettings.model_validate({"port": 0, "token": "rule"})) as url:
        settings = InstanceSettings.model_validate({"planner": url, "token": "rule"})
        known = AsyncPlannerClient(settings)
        view = await known.announce(ScaleUp(scaleup_id="up", model="m", replicas=2))
        await known.close()
        monkeypatch.delenv("RFORK_TLS_CERTIFICATE")
        monkeypatch.delenv("RFORK_TLS_KEY")
        unknown = AsyncPlannerClient(settings)
        with pytest.raises(PlannerUnavailable, match=f"GET /v1/scaleups: planner {url} is unreachable"):
            await unknown.scaleups()
        await unknown.close()
    assert 2 == view.scaleup.replicas


@pytest.mark.slow  # logic: tests/unit/planner/integrations/test_planner_client.py
async def test_integrations_reconnect_to_a_restarted_planner(free_port: int) -> None:
    """The dead pooled connection causes no error; while nothing listens, requests fail."""
    settings = PlannerSettings.model_validate({"port": free_port})
    fleet = AsyncPlannerClient(InstanceSettings.model_validate({"planner": f"http://127.0.0.1:{free_port}"}))
    with run_in_thread(settings):
        before = await fleet.instances()
    with pytest.raises(PlannerUnavailable, match="Connection refused"):
        await fleet.instances()
    with run_in_thread(settings):
        assert () == before
        assert () == await fleet.instances()
    await fleet.close()


async def test_all_pages_of_a_fleet_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one page, in the order of ids."""
    monkeypatch.setattr(planner_client, "PAGE", 20)
    names = [f"i{index:04}" for index in range(50)]
    with run_in_thread(PlannerSettings.model_validate({"port": 0, "instance_ttl_s": 600})) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=TIMEOUT_S) as web:
            for name in names:
                await web.put(f"/v1/instances/{name}", json=report(name).model_dump(mode="json"))
        fleet = AsyncPlannerClient(InstanceSettings.model_validate({"planner": url, "planner_timeout_s": 30}))
        found = [view.report.instance_id for view in await fleet.instances(model="m")]
        await fleet.close()
    assert names == found


async def test_a_silent_planner_does_not_block_an_integration() -> None:
    """A planner that accepts connections but never responds raises PlannerUnavailable at the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        fleet = AsyncPlannerClient(InstanceSettings.model_validate({"planner": url, "planner_timeout_s": 0.2}))
        with pytest.raises(PlannerUnavailable, match=r"no response within 0\.2 s"):
            await fleet.models()
        await fleet.close()
