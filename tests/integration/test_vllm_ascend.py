"""vLLM-Ascend's RFork planner protocol over sockets, as used by its clients."""

from __future__ import annotations

import http.client
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from planner.server import run_in_thread
from rfork.planner_client.client import PlannerClient
from rfork.settings import PlannerSettings
from tests.processes import RedisServer
from tests.unit.planner.builders import fork_request, seed_report

KEY = "qwen3$bf16$kv_both$0$1"
LEASE = ("SEED_IP", "SEED_PORT", "SEED_RANK", "USER_ID")
HttpResponse = tuple[int, dict[str, str], bytes]


def seed(number: int) -> dict[str, str]:
    """Return the address of this seed."""
    return {"SEED_IP": f"10.0.0.{number}", "SEED_PORT": "40123", "SEED_RANK": "1"}


def send_request(url: str, method: str, path: str, headers: dict[str, str]) -> HttpResponse:
    """Send one request as an HTTP/1.1 client does, and return status, headers in upper case, and body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return (
            response.status,
            {name.upper(): value for name, value in response.getheaders()},
            response.read(),
        )
    finally:
        connection.close()


def register_seed(url: str, number: int, references: str = "0") -> int:
    """Register a seed and return the status."""
    headers = {"SEED_KEY": KEY, **seed(number), "SEED_REFCNT": references}
    return send_request(url, "POST", "/add_seed", headers)[0]


def request_lease(url: str) -> HttpResponse:
    """Request a seed."""
    return send_request(url, "GET", "/get_seed", {"SEED_KEY": KEY})


def post_lease(url: str, path: str, lease_headers: dict[str, str]) -> int:
    """Release or renew a lease returned by `request_lease`, and return the status."""
    return send_request(url, "POST", path, {name: lease_headers[name] for name in LEASE})[0]


def settings(**options: str | int) -> PlannerSettings:
    """Settings with any free loopback port."""
    return PlannerSettings(**{"port": 0, **options})  # type: ignore[arg-type]


def test_one_seed_from_first_heartbeat_to_removal() -> None:
    """The client's life cycle: no seed; the first one seeds; the next one leases, renews and releases; it
    leaves.
    """
    with run_in_thread(settings()) as url:
        empty_response = request_lease(url)
        added = register_seed(url, 7)
        status, lease_headers, body = request_lease(url)
        after = [
            post_lease(url, "/renew_seed_lease", lease_headers),
            post_lease(url, "/put_seed", lease_headers),
            post_lease(url, "/put_seed", lease_headers),
        ]
        removed = send_request(url, "POST", "/remove_seed", {"SEED_KEY": KEY, **seed(7)})
        assert 404 == empty_response[0]
        assert b"" == empty_response[2]
        assert 200 == added
        assert 200 == status
        assert b"" == body
        assert [200, 200, 404] == after
        assert 200 == removed[0]
        assert b"" == removed[2]
        assert seed(7) == {name: lease_headers[name] for name in LEASE[:3]}
        assert 30.0 == float(lease_headers["LEASE_TTL_SEC"])
        assert "0" == lease_headers["CONTENT-LENGTH"]


def test_concurrent_clients_share_no_seed() -> None:
    """Twelve concurrent requests for three seeds: three get one each, the others fall back immediately."""
    with run_in_thread(settings()) as url, ThreadPoolExecutor(12) as clients:
        for number in (1, 2, 3):
            register_seed(url, number)
        responses = list(clients.map(lambda _: request_lease(url), range(12)))
        leased = [lease_headers["SEED_IP"] for status, lease_headers, _ in responses if status == 200]
        assert {200: 3, 404: 9} == Counter(status for status, _, _ in responses)
        assert ["10.0.0.1", "10.0.0.2", "10.0.0.3"] == sorted(leased)


def test_a_restarted_planner_continues_after_the_next_heartbeat(free_port: int) -> None:
    """Earlier leases are refused, which these clients accept; new ones are issued."""
    with run_in_thread(settings(port=free_port)) as url:
        register_seed(url, 7)
        lease_headers = request_lease(url)[1]
    with run_in_thread(settings(port=free_port)) as url:
        before = [
            post_lease(url, "/renew_seed_lease", lease_headers),
            post_lease(url, "/put_seed", lease_headers),
            request_lease(url)[0],
        ]
        register_seed(url, 7)
        assert [404, 404, 404] == before
        assert 200 == request_lease(url)[0]


def test_both_types_of_clients_share_a_planner() -> None:
    """Each gets its own type of seed; one list shows all."""
    with run_in_thread(settings()) as url, PlannerClient(url) as planner:
        register_seed(url, 7)
        planner.report(seed_report("native", model=KEY))
        routes = planner.request_plan(fork_request("target", model=KEY)).routes
        _, lease_headers, _ = request_lease(url)
        listed = {view.report.instance_id for view in planner.instances()}
        assert ["native"] == [route.source_id for route in routes]
        assert "10.0.0.7" == lease_headers["SEED_IP"]
        assert {"ascend:10.0.0.7:40123:1", "native"} <= listed


def test_a_malformed_request_is_refused() -> None:
    """400 without a body that would echo the request."""
    with run_in_thread(settings()) as url:
        headers = {"SEED_KEY": KEY, **seed(7), "SEED_PORT": "4o123", "SEED_REFCNT": "0"}
        status, response_headers, body = send_request(url, "POST", "/add_seed", headers)
        assert 400 == status
        assert "SEED_PORT is not a number from 1 to 65535" == response_headers["RFORK_REASON"]
        assert b"" == body


def wait_until_known(url: str, *, forks: int, ended: int) -> None:
    """Wait until this replica knows `forks` forks, `ended` of them finished; raise TimeoutError otherwise."""
    deadline = time.monotonic() + 20
    with PlannerClient(url) as planner:
        while len(states := [fork.state for fork in planner.forks()]) < forks or (states.count("finished") < ended):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} knows of {states}")


def test_two_planners_on_one_redis_assign_no_seed_twice(redis_server: RedisServer) -> None:
    """Six clients request three seeds from each of two replicas concurrently; a lease of one can be released
    at the other.
    """
    shared = settings(store=redis_server.url, lease_keys="s" * 32)
    with run_in_thread(shared) as left, run_in_thread(shared) as right, ThreadPoolExecutor(12) as clients:
        for number in (1, 2, 3):
            register_seed(left, number)
        responses = list(clients.map(request_lease, [left, right] * 6))
        leased_headers = [response_headers for status, response_headers, _ in responses if status == 200]
        wait_until_known(right, forks=12, ended=9)
        returned = [post_lease(right, "/put_seed", each) for each in leased_headers]
        wait_until_known(left, forks=12, ended=12)
        assert ["10.0.0.1", "10.0.0.2", "10.0.0.3"] == sorted(each["SEED_IP"] for each in leased_headers)
        assert 9 == [status for status, _, _ in responses].count(404)
        assert [200, 200, 200] == returned
        assert 404 == post_lease(left, "/put_seed", leased_headers[0])
        assert 200 == request_lease(left)[0]
