"""vLLM-Ascend's RFork planner protocol over real sockets, as its clients speak it."""

from __future__ import annotations

import http.client
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from planner.service import running
from rfork.control.client import PlannerClient
from rfork.settings import PlannerSettings
from tests.processes import RedisServer
from tests.unit.planner.builders import ask, whole

KEY = "qwen3$bf16$kv_both$0$1"
LEASE = ("SEED_IP", "SEED_PORT", "SEED_RANK", "USER_ID")
Answer = tuple[int, dict[str, str], bytes]


def seed(number: int) -> dict[str, str]:
    """Where the seed of this number is served."""
    return {"SEED_IP": f"10.0.0.{number}", "SEED_PORT": "40123", "SEED_RANK": "1"}


def call(url: str, method: str, path: str, headers: dict[str, str]) -> Answer:
    """One request as an HTTP/1.1 client writes it: status, headers in upper case, body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.upper(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def add(url: str, number: int, references: str = "0") -> int:
    """Register the seed of this number; the status."""
    headers = {"SEED_KEY": KEY, **seed(number), "SEED_REFCNT": references}
    return call(url, "POST", "/add_seed", headers)[0]


def get(url: str) -> Answer:
    """Ask for a seed."""
    return call(url, "GET", "/get_seed", {"SEED_KEY": KEY})


def post(url: str, path: str, held: dict[str, str]) -> int:
    """Give back or renew a lease that `get` answered with; the status."""
    return call(url, "POST", path, {name: held[name] for name in LEASE})[0]


def settings(**options: str | int) -> PlannerSettings:
    """Any free port of the loopback interface."""
    return PlannerSettings(**{"port": 0, **options})  # type: ignore[arg-type]


def test_one_seed_from_its_first_heartbeat_to_its_removal() -> None:
    """As their client goes: nobody seeds; the first seeds; the next leases, renews, gives back; it leaves."""
    with running(settings()) as url:
        nobody = get(url)
        added = add(url, 7)
        status, held, body = get(url)
        after = [
            post(url, "/renew_seed_lease", held),
            post(url, "/put_seed", held),
            post(url, "/put_seed", held),
        ]
        removed = call(url, "POST", "/remove_seed", {"SEED_KEY": KEY, **seed(7)})
        assert (404, b"", 200, 200, b"", [200, 200, 404], 200, b"") == (
            nobody[0], nobody[2], added, status, body, after, removed[0], removed[2],
        )  # fmt: skip
        assert (seed(7), 30.0, "0") == (
            {name: held[name] for name in LEASE[:3]}, float(held["LEASE_TTL_SEC"]), held["CONTENT-LENGTH"],
        )  # fmt: skip


def test_many_clients_at_once_share_no_seed() -> None:
    """Twelve ask for three seeds in one moment: three get one each, the others fall back at once."""
    with running(settings()) as url, ThreadPoolExecutor(12) as clients:
        for number in (1, 2, 3):
            add(url, number)
        answers = list(clients.map(lambda _: get(url), range(12)))
        leased = [held["SEED_IP"] for status, held, _ in answers if status == 200]
        assert ({200: 3, 404: 9}, ["10.0.0.1", "10.0.0.2", "10.0.0.3"]) == (
            Counter(status for status, _, _ in answers), sorted(leased),
        )  # fmt: skip


def test_a_planner_that_restarted_goes_on_with_the_next_heartbeat(free_port: int) -> None:
    """Leases from before are refused, which these clients take; new ones are given again."""
    with running(settings(port=free_port)) as url:
        add(url, 7)
        held = get(url)[1]
    with running(settings(port=free_port)) as url:
        before = [post(url, "/renew_seed_lease", held), post(url, "/put_seed", held), get(url)[0]]
        add(url, 7)
        assert ([404, 404, 404], 200) == (before, get(url)[0])


def test_both_kinds_of_clients_share_a_planner() -> None:
    """Each gets its own kind of seed; one list shows all."""
    with running(settings()) as url, PlannerClient(url) as planner:
        add(url, 7)
        planner.report(whole("native", model=KEY))
        routes = planner.ask(ask("target", model=KEY)).routes
        _, held, _ = get(url)
        listed = {view.report.instance_id for view in planner.instances()}
        assert (["native"], "10.0.0.7", True) == (
            [route.source_id for route in routes], held["SEED_IP"],
            {"ascend:10.0.0.7:40123:1", "native"} <= listed,
        )  # fmt: skip


def test_a_malformed_request_is_refused_over_the_wire() -> None:
    """400 without a body; nothing of it is echoed."""
    with running(settings()) as url:
        headers = {"SEED_KEY": KEY, **seed(7), "SEED_PORT": "4o123", "SEED_REFCNT": "0"}
        status, told, body = call(url, "POST", "/add_seed", headers)
        assert (400, "SEED_PORT is no number from 1 to 65535", b"") == (status, told["RFORK_REASON"], body)


def wait_until_known(url: str, *, forks: int, ended: int) -> None:
    """Until this replica knows of so many forks, so many of them finished; TimeoutError where it does not."""
    give_up = time.monotonic() + 20
    with PlannerClient(url) as planner:
        while len(states := [fork.state for fork in planner.forks()]) < forks or (
            states.count("finished") < ended
        ):
            if time.monotonic() > give_up:
                raise TimeoutError(f"{url} knows of {states}")


def test_two_planners_over_one_redis_give_no_seed_twice(redis_server: RedisServer) -> None:
    """Six clients ask each of two replicas for three seeds at once; what one leased the other takes back."""
    shared = settings(store=redis_server.url, secret="s" * 32)
    with running(shared) as left, running(shared) as right, ThreadPoolExecutor(12) as clients:
        for number in (1, 2, 3):
            add(left, number)
        answers = list(clients.map(get, [left, right] * 6))
        held = [told for status, told, _ in answers if status == 200]
        wait_until_known(right, forks=12, ended=9)
        returned = [post(right, "/put_seed", each) for each in held]
        wait_until_known(left, forks=12, ended=12)
        assert (["10.0.0.1", "10.0.0.2", "10.0.0.3"], 9, [200, 200, 200], 404, 200) == (
            sorted(each["SEED_IP"] for each in held),
            [status for status, _, _ in answers].count(404),
            returned,
            post(left, "/put_seed", held[0]),
            get(left)[0],
        )
