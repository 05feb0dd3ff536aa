"""Sidecars of stock SGLang engines over sockets: a real planner, and stand-ins for engines."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from planner.server import run_in_thread
from rfork.engines.sglang_bridge.identity import STOCK_PREFIX, STOCK_TRANSPORT
from rfork.engines.sglang_bridge.sidecar import Sidecar
from rfork.errors import SettingsError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo, InstanceReport
from rfork.settings import InstanceSettings, PlannerSettings, SidecarSettings
from tests.conftest import StartRfork
from tests.fake_sglang_server import TENSORS, FakeSglangServer
from tests.unit.planner.builders import fork_request, seed_report

LEGACY_PATH = "/get_remote_instance_transfer_engine_info"
CURRENT_PATH = "/remote_instance_transfer_engine_info"
MODEL = "m"
DEADLINE_S = 60.0
TTL_S = 6.0
"""Of leases, and of instances without heartbeats."""
SEED_ENGINE = """
import ctypes, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
data = bytes(range(256)) * 4096
memory = ctypes.create_string_buffer(data, len(data))
address = ctypes.addressof(memory)
assert engine.register_memory(address, len(data)) == 0
print(engine.get_rpc_port(), address, len(data), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def planner() -> Iterator[str]:
    """URL of a planner with short heartbeat intervals."""
    with run_in_thread(
        PlannerSettings(port=0, heartbeat_interval_s=0.2, instance_ttl_s=TTL_S, lease_ttl_s=TTL_S)
    ) as url:
        yield url


def seed_of(engine: FakeSglangServer, planner: str, *, model: str | None = MODEL, **settings: object) -> Sidecar:
    """Return the sidecar of an engine that is published as MODEL."""
    own = SidecarSettings(engine_url=engine.url)
    return Sidecar(_settings(planner, model=model, **settings), own, poll_interval_s=0.1)


def client_of(
    planner: str,
    *,
    engine: FakeSglangServer | None = None,
    model: str = MODEL,
    wait_s: float = 0.0,
    no_source_timeout_s: float = 0.0,
    **settings: object,
) -> Sidecar:
    """Return the sidecar of a client of MODEL."""
    url = engine.url if engine is not None else None
    own = SidecarSettings(engine_url=url, source_model=model, port=0)
    chosen = _settings(planner, no_source_timeout_s=no_source_timeout_s, **settings)
    return Sidecar(chosen, own, poll_interval_s=0.1, seed_wait_timeout_s=wait_s)


def _settings(planner: str, **more: object) -> InstanceSettings:
    return InstanceSettings(planner=planner, drain_timeout_s=0.0, **more)  # type: ignore[arg-type]  # tests name its fields


def request_weight_info(sidecar: Sidecar, rank: int = 0, path: str = LEGACY_PATH) -> httpx.Response:
    """Send the request of a stock client."""
    return httpx.get(f"http://{sidecar.client_address}{path}", params={"rank": rank}, timeout=DEADLINE_S)


def until(condition: Callable[[], bool], description: str) -> None:
    """Return once the condition is true; raise TimeoutError after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(description)
        time.sleep(0.02)


def published(planner: str, count: int) -> list[InstanceReport]:
    """Wait until the planner knows `count` stock seeds, and return their reports."""
    found: list[InstanceReport] = []

    def enough() -> bool:
        found[:] = [view.report for view in client.instances(state="serving")]
        return len([report for report in found if STOCK_TRANSPORT in report.transports]) == count

    with PlannerClient(planner) as client:
        until(enough, f"{count} stock seeds")
    return [report for report in found if STOCK_TRANSPORT in report.transports]


def forks(planner: str) -> list[ForkInfo]:
    """Return all forks that the planner lists."""
    with PlannerClient(planner) as client:
        return client.forks()


def session_of(response: httpx.Response) -> str:
    """Return the session in a response."""
    return str(response.json()["remote_instance_transfer_engine_info"][0])


def info_of(engine: FakeSglangServer, rank: int = 0) -> object:
    """Return the engine's own response, in JSON types."""
    return json.loads(json.dumps(engine.respond(f"{CURRENT_PATH}?rank={rank}", None)[1]))


@pytest.mark.parametrize("path", [LEGACY_PATH, CURRENT_PATH])
def test_a_stock_client_gets_the_published_seed(planner: str, path: str) -> None:
    """Byte for byte the seed's own response, under either name of the endpoint."""
    with FakeSglangServer() as engine, seed_of(engine, planner), client_of(planner) as sidecar:
        published(planner, 1)
        response = request_weight_info(sidecar, path=path)
        assert 200 == response.status_code
        assert info_of(engine) == response.json()


def test_each_rank_gets_its_own_info(planner: str) -> None:
    """Two ranks, two instances; a rank that is not served is refused with an error message."""
    with FakeSglangServer(ranks=2) as engine, seed_of(engine, planner), client_of(planner) as sidecar:
        reports = published(planner, 2)
        responses = [request_weight_info(sidecar, rank) for rank in (0, 1, 2)]
        assert [200, 200, 404] == [response.status_code for response in responses]
        assert [info_of(engine, 0), info_of(engine, 1)] == [response.json() for response in responses[:2]]
        refusal = "no SGLang seed of model m serves rank 2: only ranks [0, 1] are served"
        assert {"error": {"message": refusal}} == responses[2].json()
        assert ["main-tp0of2-pp0of1-ep0of1", "main-tp1of2-pp0of1-ep0of1"] == sorted(
            report.rank.key for report in reports
        )


@pytest.mark.slow  # logic: tests/unit/engines/test_sglang_bridge_leases.py
def test_a_lease_lasts_until_the_clients_engine_is_healthy(planner: str) -> None:
    """The fork runs while the client loads, is renewed past its lifetime, and finishes as unverified."""
    with (
        FakeSglangServer() as seed, seed_of(seed, planner), FakeSglangServer(ranks=0, healthy=False) as loading,
        client_of(planner, engine=loading) as sidecar,
    ):  # fmt: skip
        published(planner, 1)
        request_weight_info(sidecar)
        began = time.monotonic()
        until(lambda: time.monotonic() - began > TTL_S + 1, "longer than the lease's lifetime")
        assert ["running"] == [fork.state for fork in forks(planner)]
        loading.healthy = True
        until(lambda: forks(planner)[0].state == "finished", "the lease released")
        finish = forks(planner)[0].finish
        assert finish is not None
        assert "forked" == finish.outcome
        assert 2080 == finish.bytes_read
        assert {} == finish.sources
        assert "not verified" in finish.reasons[0]
        with PlannerClient(planner) as client:
            until(lambda: len(client.instances()) == 1, "the client's instance removed")
            left = client.instances()[0].report.instance_id
        assert seed.ranks[0][0] == left.removeprefix(STOCK_PREFIX).rsplit(":", 2)[0]


@pytest.mark.slow  # logic: tests/unit/engines/test_sglang_bridge_leases.py
def test_slots_are_bounded_and_a_client_waits_for_one(planner: str) -> None:
    """Two seeds with one slot each: two clients get one each; the third is refused, or waits if configured."""
    with contextlib.ExitStack() as stack:
        for session in ("127.0.0.1:15001", "127.0.0.1:15002"):
            engine = stack.enter_context(FakeSglangServer(session))
            stack.enter_context(seed_of(engine, planner, max_readers=1))
        clients = [stack.enter_context(client_of(planner)) for _ in range(3)]
        published(planner, 2)
        responses = [request_weight_info(client) for client in clients]
        assert [200, 200, 503] == [response.status_code for response in responses]
        assert {"127.0.0.1:15001", "127.0.0.1:15002"} == {session_of(response) for response in responses[:2]}
        assert "no seed has a free reader slot" in responses[2].json()["error"]["message"]
        waiting_client = stack.enter_context(client_of(planner, wait_s=DEADLINE_S))
        clients[0].close(0.0)
        assert session_of(responses[0]) == session_of(request_weight_info(waiting_client))


def test_a_client_that_retries_gets_another_seed(planner: str) -> None:
    """Its first read failed: that seed's slot is released, and the seed is used again if it is the last one."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(FakeSglangServer(f"127.0.0.1:1500{number}")) for number in (1, 2)]
        for engine in engines:
            stack.enter_context(seed_of(engine, planner))
        client = stack.enter_context(client_of(planner))
        published(planner, 2)
        first, second = session_of(request_weight_info(client)), session_of(request_weight_info(client))
        assert {engine.ranks[0][0] for engine in engines} == {first, second}
        next(engine for engine in engines if engine.ranks[0][0] == first).healthy = False
        published(planner, 1)
        assert second == session_of(request_weight_info(client))


def test_an_unhealthy_engine_is_no_seed(planner: str) -> None:
    """An unhealthy engine is withdrawn; once healthy again, it is offered again."""
    with FakeSglangServer() as engine, seed_of(engine, planner), client_of(planner) as sidecar:
        published(planner, 1)
        engine.healthy = False
        published(planner, 0)
        assert 404 == request_weight_info(sidecar).status_code
        engine.healthy = True
        published(planner, 1)
        assert 200 == request_weight_info(sidecar).status_code


def test_memory_of_a_restarted_engine_is_not_served(planner: str) -> None:
    """Even between two polls: the seed's own sidecar detects the restart on a client's request, and serves
    the new memory.
    """
    with FakeSglangServer() as engine:
        own = SidecarSettings(engine_url=engine.url)
        client = client_of(planner, wait_s=DEADLINE_S, no_source_timeout_s=DEADLINE_S)
        with Sidecar(_settings(planner, model=MODEL), own, poll_interval_s=3600), client as sidecar:
            before = published(planner, 1)
            moved = {name: (address + 64, count, size) for name, (address, count, size) in TENSORS.items()}
            engine.ranks = {0: ("127.0.0.1:15009", moved)}
            assert info_of(engine) == request_weight_info(sidecar).json()
            assert before[0].instance_id != published(planner, 1)[0].instance_id


@pytest.mark.slow  # logic: tests/unit/engines/test_sglang_bridge_leases.py
def test_an_update_of_the_seeds_weights_ends_the_leases(planner: str) -> None:
    """The generation and the weights change, and the client's sidecar reports that its weights may be torn."""
    with FakeSglangServer() as engine, seed_of(engine, planner), client_of(planner) as sidecar:
        before = published(planner, 1)[0]
        request_weight_info(sidecar)
        engine.model = {**engine.model, "weight_version": "2"}
        why = ("the seed left or changed its weights while they may have been read",)
        until(lambda: [fork.finish.reasons for fork in forks(planner) if fork.finish] == [why], str(why))
        after = published(planner, 1)[0]
        assert before.instance_id == after.instance_id
        assert 1 == after.generation
        assert before.weights_id != after.weights_id
        assert "failed" == forks(planner)[0].state


@pytest.mark.slow  # logic: tests/unit/engines/test_sglang_bridge_leases.py
def test_a_restarted_planner_relearns_leases(free_port: int) -> None:
    """The seed's heartbeat and the client's renewal restore both: the one slot stays occupied."""
    settings = PlannerSettings(port=free_port, heartbeat_interval_s=0.2, lease_ttl_s=TTL_S)
    with contextlib.ExitStack() as stack:
        with run_in_thread(settings) as url:
            engine = stack.enter_context(FakeSglangServer())
            stack.enter_context(seed_of(engine, url, max_readers=1))
            reader, late = stack.enter_context(client_of(url)), stack.enter_context(client_of(url))
            published(url, 1)
            assert 200 == request_weight_info(reader).status_code
        with run_in_thread(settings) as url:
            published(url, 1)
            until(lambda: [fork.state for fork in forks(url)] == ["running"], "the fork is known again")
            assert 503 == request_weight_info(late).status_code


def test_rfork_forks_and_stock_forks_are_separate(planner: str) -> None:
    """Under one model name each sees only its own type."""
    with FakeSglangServer() as engine, seed_of(engine, planner), PlannerClient(planner) as client:
        stock = published(planner, 1)[0]
        native = client.request_plan(fork_request("native-target", model=MODEL))
        with_stock_layout = client.request_plan(
            fork_request("native-target-2", model=stock.model, layout_id=stock.layout_id)
        )
        assert () == native.routes
        assert () == with_stock_layout.routes
    with client_of(planner) as sidecar, PlannerClient(planner) as client:
        client.report(seed_report("native-seed", model=MODEL))
        client.report(seed_report("native-seed-2", model=STOCK_PREFIX + MODEL))
        assert 404 == request_weight_info(sidecar).status_code


def test_two_layouts_of_one_name_are_refused(planner: str) -> None:
    """The client's layout is unknown, and float16 would pass for bfloat16: no seed is assigned."""
    with (
        FakeSglangServer() as float16_engine,
        FakeSglangServer("127.0.0.1:15002") as bfloat16_engine,
        contextlib.ExitStack() as stack,
    ):
        float16_engine.server, bfloat16_engine.server = (
            {**float16_engine.server, "dtype": "float16"},
            {**bfloat16_engine.server, "dtype": "bfloat16"},
        )
        for engine in (float16_engine, bfloat16_engine):
            stack.enter_context(seed_of(engine, planner))
        client = stack.enter_context(client_of(planner))
        published(planner, 2)
        response = request_weight_info(client)
        assert 503 == response.status_code
        assert "in 2 layouts" in response.json()["error"]["message"]


def test_memory_addresses_require_a_lease(planner: str) -> None:
    """Without one, with another seed's, or with a forged one: 403, and no address."""
    with FakeSglangServer() as engine, seed_of(engine, planner) as sidecar, PlannerClient(planner) as client:
        seed = published(planner, 1)[0]
        client.report(seed_report("other"))
        foreign = client.request_plan(fork_request("target")).routes[0].lease.token
        url = f"http://{sidecar.seed_address}/v1/stock-seeds/{seed.instance_id}"
        tokens = ["none", foreign, "x.y.z"]
        responses = [httpx.get(url, headers={"Authorization": f"Bearer {token}"}) for token in tokens]
        assert [403, 403, 403] == [response.status_code for response in responses]
        assert not any("15001" in response.text for response in responses)
        missing_seed = httpx.get(f"http://{sidecar.seed_address}/v1/stock-seeds/{STOCK_PREFIX}none")
        assert 410 == missing_seed.status_code


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("pp_size", 2, "2 pipeline stages"), ("speculative_algorithm", "EAGLE", "a draft model (EAGLE)")],
)
@pytest.mark.slow  # logic: tests/unit/engines/test_sglang_bridge.py
def test_an_engine_with_conflicting_ranks_is_not_published(
    planner: str, rfork_process: StartRfork, field: str, value: str | int, reason: str
) -> None:
    """Its info may be that of another stage, or of the draft model."""
    with FakeSglangServer() as engine:
        engine.server = {**engine.server, field: value}
        command = ("sidecar", "--engine", engine.url, "--planner", planner)
        process = rfork_process(*command, until="sidecar ready")
        line = process.wait_for("engine not published").string
        assert reason in line
        assert [] == published(planner, 0)


def test_plain_tcp_must_be_enabled(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in rfork's own transfer_engine transport: any client that reaches the port can read and write."""
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    with pytest.raises(SettingsError, match="MOONCAKE_PROTOCOL is tcp"):
        client_of(planner)
    client_of(planner, allow_unauthenticated_tcp=True).close(0.0)


def test_sidecars_use_mutual_tls_and_stock_clients_plain_http(
    planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One set of files for both sides; a client without a certificate fails in the handshake."""
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca")
    leaf.private_key_pem.write_to_path(tmp_path / "key")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "certificate")
    for name in ("ca", "key", "certificate"):
        monkeypatch.setenv(f"RFORK_TLS_{name.upper()}", str(tmp_path / name))
    with FakeSglangServer() as engine, seed_of(engine, planner) as seed, client_of(planner) as sidecar:
        published(planner, 1)
        assert info_of(engine) == request_weight_info(sidecar).json()
        context = ssl.create_default_context(cafile=tmp_path / "ca")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://{seed.seed_address}/v1/stock-seeds/x", verify=context)


def test_the_command_publishes_serves_and_deregisters(planner: str, rfork_process: StartRfork) -> None:
    """Two processes: one next to a seed, one next to a client; SIGTERM deregisters the seed."""
    with FakeSglangServer() as engine, FakeSglangServer(ranks=0, healthy=False) as loading:
        seed = rfork_process("sidecar", "--engine", engine.url, "--planner", planner, until="sidecar ready")
        command = ("sidecar", "--client-of-model", MODEL, "--engine", loading.url, "--port", "0", "--json")
        environment = {"RFORK_NO_SOURCE_TIMEOUT_S": "0.2"}
        client = rfork_process(*command, "--planner", planner, until='"event": "ready"', environment=environment)
        address = json.loads(client.wait_for('"event": "ready"').string)["clients"]
        published(planner, 1)
        response = httpx.get(f"http://{address}{LEGACY_PATH}", params={"rank": 0}, timeout=DEADLINE_S)
        assert info_of(engine) == response.json()
        client.wait_for("seed assigned to SGLang client")
        loading.healthy = True
        client.wait_for("lease released")
        seed.signal(signal.SIGTERM)
        assert 0 == seed.wait()
        assert [] == published(planner, 0)
        refused = httpx.get(f"http://{address}{LEGACY_PATH}", params={"rank": 0}, timeout=DEADLINE_S)
        assert 404 == refused.status_code
        client.wait_for("SGLang client refused")


def test_real_memory_is_read_with_the_served_info(planner: str) -> None:
    """Mooncake's own engine serves in another process, and another one reads here the memory that the
    sidecar's response describes.
    """
    library = pytest.importorskip("mooncake.engine", exc_type=ImportError)
    source = subprocess.Popen(
        [sys.executable, "-c", SEED_ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert source.stdout is not None
        port, address, size = (int(field) for field in source.stdout.readline().split())
        half = size // 2
        tensors = {"first": (address, half // 4, 4), "second": (address + half, half // 2, 2)}
        with (
            FakeSglangServer(f"127.0.0.1:{port}", tensors=tensors) as engine, seed_of(engine, planner),
            client_of(planner) as sidecar,
        ):  # fmt: skip
            published(planner, 1)
            session, info = request_weight_info(sidecar).json()["remote_instance_transfer_engine_info"]
        reader = library.TransferEngine()
        assert 0 == reader.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        memory = ctypes.create_string_buffer(size)
        assert 0 == reader.register_memory(ctypes.addressof(memory), size)
        here = [ctypes.addressof(memory), ctypes.addressof(memory) + half]
        there = [info[name][0] for name in ("first", "second")]
        lengths = [info[name][1] * info[name][2] for name in ("first", "second")]
        assert 0 == reader.batch_transfer_sync_read(session, here, there, lengths)
        assert bytes(range(256)) * 4096 == memory.raw
    finally:
        source.kill()
        source.communicate()
