"""Planner processes that share one Redis: two replicas behind one address."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rfork.errors import PlannerRejected
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkProgress, ForkRequest, ForkResult, Plan, StorageCandidate
from tests.conftest import StartRfork
from tests.processes import RedisServer, RforkProcess
from tests.unit.planner.builders import CHUNKS, fork_request, report, seed_report

READY = r"planner ready at (\S+)"
TIMEOUT_S = 30.0
PROGRESS = ForkProgress(verified=((0, 6),), bytes_read=6 << 20, bytes_per_s=1e6)
FORKED = ForkResult(outcome="forked", seconds=1, bytes_read=CHUNKS << 20)


class PlannerReplica:
    """One planner process, and a client of it."""

    def __init__(self, process: RforkProcess) -> None:
        self.process = process
        self.url = process.wait_for(READY)[1]
        self.planner = PlannerClient(self.url, timeout_s=20)


@pytest.fixture
def replicas(redis_server: RedisServer, rfork_process: StartRfork) -> Iterator[tuple[PlannerReplica, PlannerReplica]]:
    """Two planners on one Redis."""
    environment = {
        "RFORK_PLANNER_STORE": redis_server.url,
        "RFORK_PLANNER_LEASE_KEYS": "s" * 32,
        "RFORK_PLANNER_STORE_TIMEOUT_S": "20",
        "RFORK_PLANNER_INSTANCE_TTL_S": "600",  # nothing sends heartbeats here
        "RFORK_PLANNER_LEASE_TTL_S": "600",
        "RFORK_PLANNER_BATCH_WINDOW_S": "0",  # each request is planned separately, for maximum concurrency
    }
    processes = [rfork_process("planner", "--port", "0", environment=environment) for _ in range(2)]
    first, second = (PlannerReplica(process) for process in processes)
    yield first, second
    for replica in (first, second):
        replica.planner.close()


def until(predicate: Callable[[], bool]) -> None:
    """Poll until the predicate is true; fail the test after a timeout."""
    deadline = time.monotonic() + TIMEOUT_S
    while not predicate():
        if time.monotonic() > deadline:
            pytest.fail(f"condition not met within {TIMEOUT_S:g} s")
        threading.Event().wait(0.02)


def request_plans(replicas: tuple[PlannerReplica, PlannerReplica], requests: list[ForkRequest]) -> list[Plan]:
    """Send all requests concurrently, alternating between the replicas."""
    start = threading.Barrier(len(requests))

    def one(index: int) -> Plan:
        start.wait(TIMEOUT_S)
        return replicas[index % 2].planner.request_plan(requests[index])

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(one, range(len(requests))))


def readers(planner: PlannerClient) -> Counter[str]:
    """Return the number of running forks per source, as listed by one replica."""
    forks = [fork for fork in planner.forks() if fork.finish is None]
    return Counter(
        source_id for fork in forks for source_id in {share.source_id for share in fork.plan} - {fork.instance_id}
    )


@pytest.mark.slow  # logic: tests/simulation and tests/unit/planner/store/test_redis.py
def test_no_slot_is_assigned_twice(replicas: tuple[PlannerReplica, PlannerReplica]) -> None:
    """Rounds of concurrent requests to both replicas, with forks ending in between: no source exceeds its
    capacity.
    """
    seeds = [f"s{index}" for index in range(4)]
    for index, name in enumerate(seeds):
        replicas[index % 2].planner.report(seed_report(name, max_readers=2))
    until(lambda: all(len(replica.planner.instances()) == 4 for replica in replicas))
    max_readers: Counter[str] = Counter()
    for turn in "abcd":
        plans = request_plans(replicas, [fork_request(f"{turn}{index}", max_readers=2) for index in range(12)])
        until(lambda: readers(replicas[0].planner) == readers(replicas[1].planner))
        max_readers |= readers(replicas[0].planner)
        for index, plan in enumerate(plans[:6]):
            replicas[(index + 1) % 2].planner.finish(plan.fork_id, FORKED)
    assert [] == [name for name, count in max_readers.items() if count > 2]
    assert set(seeds) <= set(max_readers)


@pytest.mark.slow  # logic: tests/simulation
def test_one_reader_is_elected_for_a_cold_group(replicas: tuple[PlannerReplica, PlannerReplica]) -> None:
    """Sixteen instances without a source send requests to both replicas: one loads from storage, the others
    wait for it.
    """
    offer = (StorageCandidate(kind="loader"),)
    for turn in range(8):
        requests = [fork_request(f"t{turn}-{index}", storage=offer, model=f"cold-{turn}") for index in range(16)]
        plans = request_plans(replicas, requests)
        assert [((0, CHUNKS),)] == [read.chunks for plan in plans for read in plan.storage]


def test_the_other_replica_continues_after_one_is_killed(replicas: tuple[PlannerReplica, PlannerReplica]) -> None:
    """After SIGKILL the other one knows its instances, forks and leases, and continues to plan."""
    first, second = replicas
    first_keys = first.planner.report(seed_report("s")).lease_keys
    before = first.planner.request_plan(fork_request("t"))
    first.process.signal(signal.SIGKILL)
    first.process.wait()
    after = second.planner.request_plan(fork_request("t"))
    renewed = second.planner.progress("fork-t", PROGRESS)
    follower = second.planner.request_plan(fork_request("u"))
    assert "s" == before.routes[0].source_id
    assert "s" == after.routes[0].source_id
    assert {"s"} == set(renewed.leases)
    assert "t" == follower.routes[0].source_id
    assert first_keys == second.planner.report(seed_report("s", readers=("fork-t",))).lease_keys


@pytest.mark.slow  # logic: tests/unit/planner/store/test_replica.py
def test_planners_recover_from_a_redis_restart(
    replicas: tuple[PlannerReplica, PlannerReplica], redis_server: RedisServer
) -> None:
    """One clear error while Redis is down; everything works after it is back and one heartbeat."""
    first, second = replicas
    first.planner.report(seed_report("s"))
    first.planner.request_plan(fork_request("t"))
    redis_server.kill()
    until(lambda: not first.planner.ready() and not second.planner.ready())
    body = fork_request("u").model_dump(mode="json")
    response = httpx.post(f"{first.url}/v1/forks", json=body, trust_env=False, timeout=20)
    problem = response.json()
    assert 503 == response.status_code
    assert "store-unavailable" == problem["type"].rpartition("/")[2]
    assert int(response.headers["retry-after"]) > 0
    assert 1 == len(problem["detail"].splitlines())
    assert problem["detail"].startswith(f"the store at 127.0.0.1:{redis_server.port} is unavailable: ")
    leases = set(first.planner.progress("fork-t", PROGRESS).leases)  # running forks continue
    redis_server.start()
    until(lambda: first.planner.ready() and second.planner.ready())
    with pytest.raises(PlannerRejected) as refused:
        second.planner.progress("fork-t", PROGRESS)
    second.planner.report(seed_report("s"))
    second.planner.report(report("t", (0, 6)))
    until(lambda: len(first.planner.instances()) == 2)
    again = first.planner.request_plan(fork_request("t", (0, 6)))
    assert {"s"} == leases
    assert "unknown-fork" == refused.value.problem
    assert [("s", ((6, CHUNKS),))] == [(route.source_id, route.chunks) for route in again.routes]


def test_a_planner_waits_for_its_redis(redis_server: RedisServer, rfork_process: StartRfork) -> None:
    """Started before Redis, it is not ready, logs one clear line, and serves as soon as Redis is up."""
    redis_server.kill()
    url = redis_server.url.replace("redis://", "redis://default:hush@")
    environment = {"RFORK_PLANNER_STORE": url, "RFORK_PLANNER_LEASE_KEYS": "s" * 32}
    replica = PlannerReplica(rfork_process("planner", "--port", "0", environment=environment))
    with replica.planner as planner:
        refused = planner.ready()
        replica.process.wait_for(rf"the store at 127\.0\.0\.1:{redis_server.port} is unavailable: ")
        redis_server.start("--requirepass", "hush")
        until(planner.ready)
        planner.report(seed_report("s"))
        routes = planner.request_plan(fork_request("t")).routes
    log_text = replica.process.stdout + replica.process.stderr
    assert not refused
    assert ["s"] == [route.source_id for route in routes]
    assert [] == [word for word in ("hush", "Traceback") if word in log_text]
