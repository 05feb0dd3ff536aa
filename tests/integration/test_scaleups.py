"""Scale-ups that were announced to real planners, over real sockets."""

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

from planner.hooks import rest
from planner.hooks.fleet import PlannerAway
from planner.hooks.rest import RestFleet
from planner.service import running
from rfork.control.client import PlannerClient
from rfork.settings import PlannerSettings, Settings
from rfork.wire import Plan, ScaleUp, ScaleUpView
from tests.conftest import StartRfork
from tests.gates import Gate
from tests.processes import RedisServer, RforkProcess
from tests.unit.planner.builders import ask, report, whole

READY = r'"event": ?"ready"'
PATIENCE_S = 60.0
APART_S = 0.3
"""Between two forks of one scale-up."""
GATHER_S = "8"
"""The most that there is."""
TOGETHER = re.compile(r'^rfork_planner_plan_forks_bucket\{le="([0-9.]+)"\} ([0-9.]+)$', re.MULTILINE)


def url_of(process: RforkProcess) -> str:
    """Where a planner that is ready listens."""
    return cast(str, json.loads(process.wait_for(rf"^.*{READY}.*$").group())["url"])


def until(holds: Callable[[], bool]) -> None:
    """Ask again until it holds; fails the test where it never does."""
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > give_up:
            pytest.fail(f"did not come to hold within {PATIENCE_S:g} s")
        threading.Event().wait(0.02)


def announce(url: str, replicas: int, model: str = "tiny") -> ScaleUpView:
    """As an autoscaler would."""
    scaleup = ScaleUp(scaleup_id="up", model=model, replicas=replicas)
    answer = httpx.post(
        f"{url}/v1/scaleups", json=scaleup.model_dump(mode="json"), trust_env=False, timeout=PATIENCE_S
    )
    return ScaleUpView.model_validate_json(answer.raise_for_status().content)


def shown(url: str) -> ScaleUpView:
    """The scale-up as one planner tells it."""
    answer = httpx.get(f"{url}/v1/scaleups/up", trust_env=False, timeout=PATIENCE_S)
    return ScaleUpView.model_validate_json(answer.raise_for_status().content)


def plans_of(url: str) -> dict[float, int]:
    """How many plans were made for so many forks at most, by their upper bound."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE_S).text
    counts = [(float(bound), int(float(count))) for bound, count in TOGETHER.findall(text)]
    before = [0, *(count for _, count in counts)]
    return {bound: count - old for (bound, count), old in zip(counts, before, strict=False) if count > old}


@pytest.mark.parametrize(("announced", "expected"), [(True, {4.0: 1}), (False, {})])
def test_forks_that_were_announced_share_one_plan(
    rfork_process: StartRfork, tiny_model: Path, tmp_path: Path, announced: bool, expected: dict[float, int]
) -> None:
    """Three real forks, the next one asking a while after the last: one plan for three, or one each."""
    # Without a window: those that are not announced are planned as they come, however close.
    environment = {"RFORK_PLANNER_GATHER_S": GATHER_S, "RFORK_PLANNER_BATCH_S": "0"}
    planner = rfork_process("planner", "--port", "0", "--json", until=READY, environment=environment)
    url, own = url_of(planner), {"RFORK_TRANSPORTS": "http", "RFORK_PLANNER_TIMEOUT_S": "50"}
    common = (str(tiny_model), "--name", "tiny", "--planner", url, "--json")
    rfork_process("seed", *common, until=READY, environment=own)
    if announced:
        view = announce(url, 3)
        assert (1, "they fork from 1 seed") == (view.seeds, view.reason)
    gates = [Gate(tmp_path / f"t{number}") for number in range(3)]
    pulls = [rfork_process("pull", *common, "--sha256", environment=own | gate.environment) for gate in gates]
    for gate, pull in zip(gates, pulls, strict=True):
        gate.reached(pull)
    for gate in gates:
        gate.open()
        threading.Event().wait(APART_S)
    codes = [pull.wait() for pull in pulls]
    digests = {json.loads(pull.stdout.splitlines()[-1])["sha256"] for pull in pulls}
    # One that lost a relay which was done is planned again, by itself.
    together = {bound: count for bound, count in plans_of(url).items() if bound > 1}
    assert ([0] * 3, 1, expected) == (codes, len(digests), together)
    if announced:
        assert 3 == shown(url).arrived


@pytest.fixture
def replicas(redis_server: RedisServer, rfork_process: StartRfork) -> tuple[str, str]:
    """The URLs of two planners over one Redis."""
    environment = {
        "RFORK_PLANNER_STORE": redis_server.url,
        "RFORK_PLANNER_SECRET": "s" * 32,
        "RFORK_PLANNER_STORE_TIMEOUT_S": "20",
        "RFORK_PLANNER_FORGET_S": "600",  # nobody sends heartbeats here
        "RFORK_PLANNER_GATHER_S": GATHER_S,
        "RFORK_PLANNER_BATCH_S": "0",
    }
    processes = [rfork_process("planner", "--port", "0", "--json", environment=environment) for _ in range(2)]
    first, second = map(url_of, processes)
    return first, second


def test_replicas_of_the_planner_count_together(replicas: tuple[str, str]) -> None:
    """Told to one, known to both: forks at both wait, and all go when the last has come to either."""
    first, second = (PlannerClient(url, timeout_s=PATIENCE_S) for url in replicas)
    first.report(whole("s", model="tiny"))
    until(lambda: len(second.instances()) == 1)
    announce(replicas[0], 4)
    until(lambda: bool(httpx.get(f"{replicas[1]}/v1/scaleups", trust_env=False, timeout=PATIENCE_S).json()))
    with ThreadPoolExecutor(4) as threads:
        plans: list[Future[Plan]] = []
        for index, planner in enumerate((first, second, first)):
            plans.append(threads.submit(planner.ask, ask(f"t{index}", model="tiny")))
            until(lambda: [shown(url).arrived for url in replicas] == [len(plans)] * 2)
        waiting = [plan.done() for plan in plans]
        plans.append(threads.submit(second.ask, ask("t3", model="tiny")))
        sources = [route.source_id for plan in plans for route in plan.result(PATIENCE_S).routes]
    assert ([False] * 3, [{2.0: 1}, {2.0: 1}], 4) == (
        waiting, [plans_of(url) for url in replicas], len(set(sources)),
    )  # fmt: skip
    for planner in (first, second):
        planner.close()


def test_a_scale_up_that_is_withdrawn_at_one_is_over_at_both(replicas: tuple[str, str]) -> None:
    """Who waits at the other gets its plan."""
    with PlannerClient(replicas[1], timeout_s=PATIENCE_S) as second, ThreadPoolExecutor(1) as threads:
        announce(replicas[0], 2)
        until(
            lambda: bool(httpx.get(f"{replicas[1]}/v1/scaleups", trust_env=False, timeout=PATIENCE_S).json())
        )
        plan = threads.submit(second.ask, ask("a", model="tiny"))
        until(lambda: shown(replicas[0]).arrived == 1)
        waiting = plan.done()
        httpx.delete(f"{replicas[0]}/v1/scaleups/up", trust_env=False, timeout=PATIENCE_S).raise_for_status()
        assert (False, "fork-a", []) == (
            waiting,
            plan.result(PATIENCE_S).fork_id,
            httpx.get(f"{replicas[1]}/v1/scaleups", trust_env=False, timeout=PATIENCE_S).json(),
        )


def test_a_planner_that_joins_later_knows_what_was_announced(
    redis_server: RedisServer, rfork_process: StartRfork
) -> None:
    """And who has come of it."""
    environment = {
        "RFORK_PLANNER_STORE": redis_server.url,
        "RFORK_PLANNER_SECRET": "s" * 32,
        "RFORK_PLANNER_STORE_TIMEOUT_S": "20",
        "RFORK_PLANNER_FORGET_S": "600",  # nobody sends heartbeats here
        "RFORK_PLANNER_GATHER_S": "0",
    }
    first = url_of(rfork_process("planner", "--port", "0", "--json", environment=environment))
    announce(first, 3)
    with PlannerClient(first) as planner:
        planner.ask(ask("a", model="tiny"))
    second = url_of(rfork_process("planner", "--port", "0", "--json", environment=environment))
    views = [shown(url).model_copy(update={"expires_in_s": 0.0}) for url in (first, second)]
    assert (1, views[0]) == (views[0].arrived, views[1])


# -- the hooks' client --------------------------------------------------------------------------------


async def test_hooks_reach_a_planner_behind_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the authority's certificate and one of their own; without the latter they are told so."""
    ours = trustme.CA()
    ours.cert_pem.write_to_path(tmp_path / "ca")
    leaf = ours.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(tmp_path / "key")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "certificate")
    for name in ("ca", "key", "certificate"):
        monkeypatch.setenv(f"RFORK_TLS_{name.upper()}", str(tmp_path / name))
    with running(PlannerSettings.model_validate({"port": 0, "token": "rule"})) as url:
        settings = Settings.model_validate({"planner": url, "token": "rule"})
        known = RestFleet(settings)
        view = await known.announce(ScaleUp(scaleup_id="up", model="m", replicas=2))
        await known.close()
        monkeypatch.delenv("RFORK_TLS_CERTIFICATE")
        monkeypatch.delenv("RFORK_TLS_KEY")
        unknown = RestFleet(settings)
        with pytest.raises(PlannerAway, match=f"planner {url} did not answer GET /v1/scaleups"):
            await unknown.scaleups()
        await unknown.close()
    assert 2 == view.scaleup.replicas


async def test_hooks_go_on_with_a_planner_that_restarted(free_port: int) -> None:
    """The pooled connection is dead by then: nothing is told of it. While nobody listens, that is."""
    settings = PlannerSettings.model_validate({"port": free_port})
    fleet = RestFleet(Settings.model_validate({"planner": f"http://127.0.0.1:{free_port}"}))
    with running(settings):
        before = await fleet.instances()
    with pytest.raises(PlannerAway, match="All connection attempts failed"):
        await fleet.instances()
    with running(settings):
        assert ((), ()) == (before, await fleet.instances())
    await fleet.close()


async def test_all_of_a_fleet_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one page holds, in the order of their ids."""
    monkeypatch.setattr(rest, "PAGE", 20)
    names = [f"i{index:04}" for index in range(50)]
    with running(PlannerSettings.model_validate({"port": 0, "forget_s": 600})) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as web:
            for name in names:
                await web.put(f"/v1/instances/{name}", json=report(name).model_dump(mode="json"))
        fleet = RestFleet(Settings.model_validate({"planner": url, "planner_timeout_s": 30}))
        found = [view.report.instance_id for view in await fleet.instances(model="m")]
        await fleet.close()
    assert names == found


async def test_a_planner_that_says_nothing_holds_no_hook() -> None:
    """It takes the connection, and that is all: PlannerAway within the time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        fleet = RestFleet(Settings.model_validate({"planner": url, "planner_timeout_s": 0.2}))
        with pytest.raises(PlannerAway, match=r"no answer within 0\.2 s"):
            await fleet.models()
        await fleet.close()
