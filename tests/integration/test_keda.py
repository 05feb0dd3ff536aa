from __future__ import annotations

import asyncio
import contextlib
import http.server
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from planner.hooks.keda.scaler import SERVICE, run
from planner.hooks.keda.v1 import externalscaler_pb2 as pb
from planner.hooks.keda.v1.externalscaler_pb2_grpc import ExternalScalerStub
from planner.hooks.probes import Status
from planner.hooks.rest import RestFleet
from planner.service import running
from rfork.errors import PortInUse, SettingsError
from rfork.settings import HookSettings, PlannerSettings, Settings
from rfork.wire import InstanceReport, InstanceView, ScaleUp
from tests.conftest import StartRfork
from tests.processes import RforkProcess
from tests.unit.hooks.keda.fakes import MODEL, SGLANG, VLLM, FakeFleet, engine, instance

if TYPE_CHECKING:
    from planner.hooks.keda.v1.externalscaler_pb2_grpc import ExternalScalerAsyncStub

DEADLINE_S = 30.0
OPERATOR, READER = "o" * 32, "r" * 32
HOSTS = ("127.0.0.1", "127.0.0.2")


@dataclass
class Engines:
    """Two engines' HTTP servers, on one port of two addresses; a page that is a number is a status."""

    port: int
    pages: dict[str, str | int] = field(default_factory=dict)
    looks: int = 0


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Engines that tell what a test has them tell."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known.looks += 1
            page = known.pages.get(self.connection.getsockname()[0], 404)
            body = page.encode() if isinstance(page, str) and self.path == "/metrics" else b"no\n"
            self.send_response(200 if isinstance(page, str) else page)
            if page == 302:
                self.send_header("Location", f"http://{HOSTS[1]}:{known.port}/metrics")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    first = http.server.ThreadingHTTPServer((HOSTS[0], 0), Handler)
    known = Engines(first.server_port)
    servers = [first, http.server.ThreadingHTTPServer((HOSTS[1], known.port), Handler)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    yield known
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Planner:
    """A planner, and what instances and autoscalers tell it."""

    url: str

    def report(self, *views: InstanceView) -> None:
        """Send heartbeats."""
        for view in views:
            self._say("PUT", f"/v1/instances/{view.report.instance_id}", view.report)

    def announce(self, replicas: int) -> None:
        """Announce a scale-up."""
        self._say("POST", "/v1/scaleups", ScaleUp(scaleup_id="u", model=MODEL, replicas=replicas))

    def _say(self, method: str, path: str, body: InstanceReport | ScaleUp) -> None:
        headers = {"Authorization": f"Bearer {OPERATOR}", "Content-Type": "application/json"}
        content = body.model_dump_json()
        answer = httpx.request(method, self.url + path, content=content, headers=headers, trust_env=False)
        answer.raise_for_status()


@pytest.fixture
def planner(tmp_path: Path) -> Iterator[Planner]:
    """A planner that nobody has reported to; the scaler may look, and no more."""
    (tmp_path / "tokens").write_text(f"operator {OPERATOR}\nreader {READER}\n")
    with running(PlannerSettings(port=0, heartbeat_s=60, tokens=tmp_path / "tokens")) as url:
        yield Planner(url)


@dataclass
class Scaler:
    """A scaler that runs in this process, and how KEDA calls it."""

    channel: grpc.aio.Channel
    status: Status
    task: asyncio.Task[None]
    metadata: dict[str, str]

    @property
    def stub(self) -> ExternalScalerAsyncStub:
        return ExternalScalerStub(self.channel)

    def about(self, **changes: str) -> pb.ScaledObjectRef:
        """A ScaledObject's trigger."""
        return pb.ScaledObjectRef(
            name="llama", namespace="default", scalerMetadata={**self.metadata, **changes}
        )

    async def value(self, **changes: str) -> float:
        """What GetMetrics says."""
        answer = await self.stub.GetMetrics(
            pb.GetMetricsRequest(scaledObjectRef=self.about(**changes)), timeout=DEADLINE_S
        )
        return answer.metricValues[0].metricValueFloat

    async def active(self, **changes: str) -> bool:
        """What IsActive says."""
        return (await self.stub.IsActive(self.about(**changes), timeout=DEADLINE_S)).result

    async def until(self, wanted: Callable[[], Awaitable[float | None]], expected: float | str) -> None:
        """Look again until a call answers so: answers are kept for a second."""
        async with asyncio.timeout(DEADLINE_S):
            while await said(wanted) != expected:
                await asyncio.sleep(0.05)


async def state(stream: AsyncIterable[pb.IsActiveResponse]) -> bool:
    """The next state that a stream tells."""
    async with asyncio.timeout(DEADLINE_S):
        return (await anext(aiter(stream))).result


async def said(call: Callable[[], Awaitable[float | None]]) -> float | str | None:
    """A call's answer, or the code of its error."""
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        return error.code().name


@contextlib.asynccontextmanager
async def scaling(
    planner_url: str, metadata: dict[str, str], *, port: int, channel: grpc.aio.Channel | None = None
) -> AsyncIterator[Scaler]:
    """A scaler of that planner, for the time of the block."""
    fleet = RestFleet(Settings(planner=planner_url, token=SecretStr(READER), planner_timeout_s=2.0))
    status = Status("scaler")
    settings = HookSettings(scaler_port=port, engine_timeout_s=0.5)
    task = asyncio.create_task(run(settings, fleet, status))
    channel = channel or grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    try:
        ready = asyncio.create_task(channel.channel_ready())
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            ready.cancel()
            await task
        yield Scaler(channel, status, task, metadata)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await channel.close(None)
        await fleet.close()


@pytest.fixture
def scaler_port() -> int:
    """Another port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def scaler(
    planner: Planner, engines: Engines, scaler_port: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scaler]:
    """A scaler of `planner` and `engines`, asked for what waits, that believes the planner at once."""
    monkeypatch.setattr("planner.hooks.keda.load.SETTLE_S", 0.0)
    metadata = {"model": MODEL, "metric": "waiting", "target": "10", "port": str(engines.port)}
    async with scaling(planner.url, {**metadata, "scalerAddress": "x:9444"}, port=scaler_port) as made:
        yield made


async def test_pull(planner: Planner, engines: Engines, scaler: Scaler) -> None:
    """What KEDA asks at each look: the spec, the value over both engines, and whether there is work."""
    planner.report(*map(instance, HOSTS))
    engines.pages = {HOSTS[0]: VLLM, HOSTS[1]: SGLANG}
    spec = (await scaler.stub.GetMetricSpec(scaler.about(target="0.5"))).metricSpecs
    values = [
        (await scaler.value(metric=metric), await scaler.active(metric=metric))
        for metric in ("waiting", "running", "kv_cache", "forks", "expected")
    ]
    assert (
        [("rfork-waiting-5bc623025e", 1, 0.5)],
        [(25.0, True), (16.0, True), (0.78, True), (0.0, False), (0.0, False)],
    ) == ([(each.metricName, each.targetSize, each.targetSizeFloat) for each in spec], values)


async def test_engines_that_do_not_answer(planner: Planner, engines: Engines, scaler: Scaler) -> None:
    """One of two is left out; of none a value is not known, and KEDA's fallback takes over."""
    planner.report(*map(instance, HOSTS))
    engines.pages = {HOSTS[0]: 503, HOSTS[1]: engine(7)}
    values = [await scaler.value()]
    engines.pages = {HOSTS[0]: 302, HOSTS[1]: 200}  # a redirect to another host is not followed
    await scaler.until(scaler.value, "UNAVAILABLE")
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await scaler.active()
    url = f"http://{HOSTS[0]}:{engines.port}/metrics"
    assert ([7.0], grpc.StatusCode.UNAVAILABLE, True) == (
        values,
        unknown.value.code(),
        f"waiting of org/llama is not known: {HOSTS[0]} answers {url} with HTTP 302"
        in str(unknown.value.details()),
    )


async def test_engines_that_answer_without_end(planner: Planner, engines: Engines, scaler: Scaler) -> None:
    """One that takes the connection and says nothing, and one that never ends, hold nobody up."""
    planner.report(*map(instance, (*HOSTS, "127.0.0.3", "127.0.0.4")))
    engines.pages = dict.fromkeys(HOSTS, engine(4))
    ended = threading.Event()

    def pour(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not ended.is_set():
                connection.sendall(b"vllm:num_requests_waiting 9\n" * 4096)

    with (
        socket.create_server(("127.0.0.3", engines.port)),
        socket.create_server(("127.0.0.4", engines.port)) as pours,
    ):
        accepting = threading.Thread(target=lambda: pour(pours.accept()[0]))
        accepting.start()
        value = await scaler.value()
        ended.set()
        accepting.join()
    silent = scaler.status.registry.get_sample_value("rfork_scaler_engine_looks_total", {"answer": "silent"})
    assert (8.0, 2.0) == (value, silent)


async def test_push(planner: Planner, engines: Engines, scaler: Scaler) -> None:
    """The state at once, then each change of it and nothing else."""
    planner.report(*map(instance, HOSTS))
    engines.pages = dict.fromkeys(HOSTS, engine(1))
    stream = scaler.stub.StreamIsActive(scaler.about(activation="2", poll="0.1"))
    told = [await state(stream)]
    for waiting in (2, 1, 5):
        engines.pages = dict.fromkeys(HOSTS, engine(waiting))
        told.append(await state(stream))
        if waiting == 1:
            stream.cancel()
            stream = scaler.stub.StreamIsActive(scaler.about(activation="2", poll="0.1"))
            told.append(await state(stream))
    assert [False, True, False, False, True] == told


async def test_a_model_at_zero_is_woken(planner: Planner, scaler: Scaler) -> None:
    """`POST /v1/scaleups` makes triggers of engines' metrics active, as it does `expected`."""
    streams = [
        scaler.stub.StreamIsActive(scaler.about(metric=metric, poll="0.1"))
        for metric in ("waiting", "expected")
    ]
    before = [await state(stream) for stream in streams]
    planner.announce(3)
    after = [await state(stream) for stream in streams]
    assert ([False, False], [True, True], 0.0, 3.0) == (
        before, after, await scaler.value(), await scaler.value(metric="expected"),
    )  # fmt: skip


async def test_a_planner_that_dies(
    rfork_process: StartRfork, free_port: int, engines: Engines, scaler_port: int
) -> None:
    """UNAVAILABLE says so, a stream holds; when it is back, engines count before they report to it."""

    def start() -> RforkProcess:
        environment = {"RFORK_PLANNER_HEARTBEAT_S": "60"}
        arguments = ("planner", "--port", str(free_port))
        return rfork_process(*arguments, until="planner ready", environment=environment)

    planner, process = Planner(f"http://127.0.0.1:{free_port}"), start()
    planner.report(*map(instance, HOSTS))
    engines.pages = dict.fromkeys(HOSTS, engine(3))
    metadata = {"model": MODEL, "metric": "waiting", "target": "10", "port": str(engines.port)}
    async with scaling(planner.url, metadata, port=scaler_port) as scaler:
        stream = scaler.stub.StreamIsActive(scaler.about(poll="0.1"))
        told = [await state(stream)]
        process.signal(signal.SIGKILL)
        process.wait()
        await scaler.until(scaler.value, "UNAVAILABLE")
        with pytest.raises(
            grpc.aio.AioRpcError, match=f"planner {planner.url} did not answer GET /v1/instances"
        ):
            await scaler.active()
        await asyncio.to_thread(start)
        await scaler.until(scaler.value, 6.0)
        engines.pages = dict.fromkeys(HOSTS, engine(0))
        told.append(await state(stream))
    assert [True, False] == told


async def test_metadata_that_cannot_be_used(scaler: Scaler) -> None:
    """Each call says what is wrong, as KEDA's log and the ScaledObject's events show it."""
    about = scaler.about(port="http")
    calls = (
        scaler.stub.IsActive(about),
        scaler.stub.GetMetricSpec(about),
        scaler.stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=about, metricName="s0-x")),
        state(scaler.stub.StreamIsActive(about)),
    )
    errors = []
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        errors.append((refused.value.code(), refused.value.details()))
    expected = (grpc.StatusCode.INVALID_ARGUMENT, "`port` is a number from 1 to 65535: not 'http'")
    assert [expected] * 4 == errors


async def test_hundreds_of_streams_share_their_looks(
    planner: Planner, engines: Engines, scaler: Scaler
) -> None:
    """Each is told of the change; the engines are asked as if it were one."""
    planner.report(instance(HOSTS[0]))
    engines.pages = {HOSTS[0]: engine(0)}
    streams = [scaler.stub.StreamIsActive(scaler.about(poll="0.2")) for _ in range(300)]
    before = await asyncio.gather(*(state(stream) for stream in streams))
    looks, open_streams = engines.looks, scaler.status.registry.get_sample_value("rfork_scaler_streams")
    engines.pages = {HOSTS[0]: engine(1)}
    after = await asyncio.gather(*(state(stream) for stream in streams))
    assert ({False}, {True}, 300.0, True) == (
        set(before), set(after), open_streams, max(looks, engines.looks - looks) < 30,
    )  # fmt: skip
    for stream in streams:
        stream.cancel()
    await scaler.until(lambda: gone(scaler.status), 0.0)


async def gone(status: Status) -> float | None:
    """How many streams there still are."""
    return status.registry.get_sample_value("rfork_scaler_streams")


async def test_the_end(scaler: Scaler) -> None:
    """Readiness and health say it, and streams end in order, so that KEDA opens them anew at once."""
    health = health_pb2_grpc.HealthStub(scaler.channel)
    healthy = [
        (await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in ("", SERVICE)
    ]
    stream = scaler.stub.StreamIsActive(scaler.about(metric="forks"))
    told, before = [await state(stream)], scaler.status.why_not
    scaler.task.cancel()
    told += [each.result async for each in stream]
    assert ([1, 1], [False], grpc.StatusCode.OK, None, "it is ending") == (
        healthy, told, await stream.code(), before, scaler.status.why_not,
    )  # fmt: skip


async def test_an_address_that_cannot_be_listened_on(scaler: Scaler, scaler_port: int) -> None:
    """A port that is taken, and an address of another machine."""
    fleet = RestFleet(Settings(planner="http://127.0.0.1:1"))
    with pytest.raises(PortInUse, match=f"127.0.0.1:{scaler_port}: the address is in use"):
        await run(HookSettings(scaler_port=scaler_port), fleet, Status("scaler"))
    with pytest.raises(SettingsError, match=r"cannot listen on 192\.0\.2\.1"):
        await run(HookSettings(bind="192.0.2.1", scaler_port=0), fleet, Status("scaler"))
    await fleet.close()


def show(authority: trustme.CA, folder: Path) -> bytes:
    """Write a new certificate of the scaler's; returns it."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    (folder / "tls.key").write_bytes(issued.private_key_pem.bytes())
    (folder / "tls.crt").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    return issued.cert_chain_pems[0].bytes()


async def test_tls_that_is_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scaler_port: int) -> None:
    """With RFORK_TLS_* KEDA has to show a certificate; the scaler's own is renewed without a restart."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    for name, file in (("CERTIFICATE", "tls.crt"), ("KEY", "tls.key"), ("CA", "ca.crt")):
        monkeypatch.setenv(f"RFORK_TLS_{name}", str(tmp_path / file))
    with pytest.raises(SettingsError, match="the scaler's TLS files"):
        await run(HookSettings(scaler_port=0), FakeFleet(), Status("scaler"))
    first = show(authority, tmp_path)
    keda = authority.issue_cert("keda")
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), keda.private_key_pem.bytes(), keda.cert_chain_pems[0].bytes()
    )
    where = f"127.0.0.1:{scaler_port}"
    channel = grpc.aio.secure_channel(where, credentials)
    metadata = {"model": MODEL, "metric": "waiting", "target": "10", "port": "8000"}
    async with scaling("http://127.0.0.1:1", metadata, port=scaler_port, channel=channel) as scaler:
        assert 10.0 == (await scaler.stub.GetMetricSpec(scaler.about())).metricSpecs[0].targetSizeFloat
        shown = [await shown_by(scaler_port, tmp_path, authority)]
        second = show(authority, tmp_path)
        shown.append(await shown_by(scaler_port, tmp_path, authority))
        (tmp_path / "tls.crt").write_text("half a renew")
        shown.append(await shown_by(scaler_port, tmp_path, authority))
        assert [first, second, second] == shown
        stranger = grpc.aio.secure_channel(where, grpc.ssl_channel_credentials(authority.cert_pem.bytes()))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ExternalScalerStub(stranger).GetMetricSpec(scaler.about())
        assert grpc.StatusCode.UNAVAILABLE == refused.value.code()
        await stranger.close(None)


async def shown_by(port: int, folder: Path, authority: trustme.CA) -> bytes:
    """The certificate that the scaler shows to a new connection, as PEM."""
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    authority.issue_cert("keda").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ssl.DER_cert_to_PEM_cert(der).encode()


async def test_as_a_process(
    planner: Planner, engines: Engines, rfork_process: StartRfork, scaler_port: int
) -> None:
    """`rfork hook scaler` answers KEDA, and ends in order."""
    planner.report(*map(instance, HOSTS))
    engines.pages = dict.fromkeys(HOSTS, engine(2))
    process = rfork_process(
        "hook", "scaler", until="scaler is up",
        environment={
            "RFORK_PLANNER": planner.url, "RFORK_TOKEN": READER, "RFORK_HOOK_HEALTH_PORT": "0",
            "RFORK_HOOK_SCALER_PORT": str(scaler_port),
        },
    )  # fmt: skip
    metadata = {"model": MODEL, "metric": "waiting", "target": "10", "port": str(engines.port)}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{scaler_port}") as channel:
        about = pb.ScaledObjectRef(name="llama", namespace="default", scalerMetadata=metadata)
        answer = await ExternalScalerStub(channel).GetMetrics(pb.GetMetricsRequest(scaledObjectRef=about))
    process.signal(signal.SIGTERM)
    assert ([("rfork-waiting-5bc623025e", 4, 4.0)], 0) == (
        [(each.metricName, each.metricValue, each.metricValueFloat) for each in answer.metricValues],
        await asyncio.to_thread(process.wait),
    )
