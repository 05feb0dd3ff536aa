"""Planners with TLS, tokens and limits, as used by clients and sources."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import trustme

from planner import http_server
from planner.http_server import ConnectionLimits
from planner.server import run_in_thread
from rfork.errors import LeaseRejected, PlannerRejected, PlannerUnreachable
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.lease import decode_key, verify
from rfork.settings import InstanceSettings, PlannerSettings, TlsSettings
from tests.conftest import StartRfork
from tests.processes import RforkProcess
from tests.unit.planner.builders import fork_request, seed_report

READY = r"planner ready at (\S+)"
RETRY_TIMEOUT_S = 30.0
ROLES = "reader read-1\ninstance work-1\noperator rule\n"
OLD, NEW = "o" * 32, "n" * 32
Files = dict[str, Path]
StartPlanner = Callable[..., tuple[RforkProcess, str]]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """PEM files: an authority, its server and client certificates, and a certificate of another authority."""
    folder = tmp_path_factory.mktemp("tls")
    ours, others = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(folder / "ca")
    for name, leaf in (
        ("server", ours.issue_cert("127.0.0.1")),
        ("client", ours.issue_cert("worker.fleet")),
        ("untrusted", others.issue_cert("worker.fleet")),
    ):
        leaf.private_key_pem.write_to_path(folder / f"{name}-key")
        leaf.cert_chain_pems[0].write_to_path(folder / name)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A tokens file with one token of each role."""
    path = tmp_path / "tokens"
    path.write_text(ROLES)
    return path


@pytest.fixture
def start(rfork_process: StartRfork) -> StartPlanner:
    """Start a planner on a free port with environment variables; return it and its URL."""

    def started(port: int = 0, **environment: str | Path) -> tuple[RforkProcess, str]:
        variables = {f"RFORK_{name}": str(value) for name, value in environment.items()}
        process = rfork_process("planner", "--port", str(port), until=READY, environment=variables)
        return process, process.wait_for(READY)[1]

    return started


def server_tls(files: Files) -> dict[str, Path]:
    """Return the variables of a planner that uses TLS."""
    return {"TLS_CERTIFICATE": files["server"], "TLS_KEY": files["server-key"]}


def heartbeat_result(url: str, token: str | None) -> str:
    """Return the problem type that a heartbeat with this token gets, or `ok`."""
    with PlannerClient(url, token=token) as planner:
        try:
            planner.report(seed_report("s"))
        except PlannerRejected as error:
            return error.problem
    return "ok"


def replace(path: Path, content: str) -> None:
    """Replace a file's content atomically, as the planner requires."""
    successor = path.with_name("successor")
    successor.write_text(content)
    successor.replace(path)


def retry_until(done: Callable[[], bool]) -> None:
    """Call `done`, which sends a request, until it returns true; raise TimeoutError after a while."""
    deadline = time.monotonic() + RETRY_TIMEOUT_S
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError("the planner has not changed")


def test_https_authenticates_the_planner(start: StartPlanner, files: Files) -> None:
    """Clients that trust its authority are served; others, and clients without TLS, are not."""
    _, url = start(**server_tls(files))
    with PlannerClient(url, tls=TlsSettings(ca=files["ca"])) as planner:
        assert "https" == url.partition(":")[0]
        assert [] == planner.models()
    for wrong, tls in ((url, TlsSettings()), (url.replace("https", "http"), None)):
        with PlannerClient(wrong, tls=tls) as planner, pytest.raises(PlannerUnreachable):
            planner.models()


def test_mutual_tls_requires_a_client_certificate(start: StartPlanner, files: Files) -> None:
    """No certificate, or one of another authority, fails the handshake, for health checks too."""
    _, url = start(**server_tls(files), TLS_CA=files["ca"])
    ours = TlsSettings(ca=files["ca"], certificate=files["client"], key=files["client-key"])
    untrusted_tls = TlsSettings(ca=files["ca"], certificate=files["untrusted"], key=files["untrusted-key"])
    with PlannerClient(url, tls=ours) as planner:
        assert planner.ready()
        assert [] == planner.models()
    for tls in (TlsSettings(ca=files["ca"]), untrusted_tls):
        with PlannerClient(url, tls=tls) as planner, pytest.raises(PlannerUnreachable):
            planner.ready()


def test_a_token_is_required_with_mutual_tls_too(start: StartPlanner, files: Files, tokens: Path) -> None:
    """The certificate proves membership of the fleet, the token grants permissions."""
    _, url = start(**server_tls(files), TLS_CA=files["ca"], PLANNER_TOKENS_FILE=tokens)
    context = ssl.create_default_context(cafile=files["ca"])
    context.load_cert_chain(files["client"], files["client-key"])
    with httpx.Client(base_url=url, verify=context, trust_env=False) as web:
        statuses = [
            web.request(method, "/v1/models", headers={"Authorization": f"Bearer {token}"}).status_code
            for method, token in (("GET", "read-1"), ("GET", "wrong"), ("DELETE", "read-1"))
        ]
    assert [200, 401, 403] == statuses


def test_each_role_has_its_permissions(start: StartPlanner, tokens: Path) -> None:
    """From the tokens file, in addition to the settings' token, which grants everything."""
    _, url = start(PLANNER_TOKENS_FILE=tokens, PLANNER_TOKEN="all")
    with PlannerClient(url) as unauthenticated_client:
        assert unauthenticated_client.ready()
        assert "unauthorized" == heartbeat_result(url, None)
    assert ["unauthorized", "forbidden", "ok", "ok", "ok"] == [
        heartbeat_result(url, token) for token in ("wrong", "read-1", "work-1", "rule", "all")
    ]
    drains: dict[str, list[int]] = {}
    with PlannerClient(url, token="work-1") as planner:
        planner.report(seed_report("t"))  # so that the other is not the last seed, which needs force to drain
    for query in ("", "?force=true"):
        for token in ("read-1", "work-1", "rule", "all"):
            drain = httpx.post(
                f"{url}/v1/instances/s/drain{query}", headers={"Authorization": f"Bearer {token}"},
                trust_env=False,
            )  # fmt: skip
            drains.setdefault(query, []).append(drain.status_code)
    assert {"": [403, 403, 200, 200], "?force=true": [403, 403, 200, 200]} == drains


@pytest.mark.parametrize(("environment", "expected"), [({}, "draining"), ({"RFORK_OWNER_SECRET": "x" * 32}, "serving")])
@pytest.mark.slow  # logic: tests/unit/planner/test_ownership.py
def test_only_a_servers_own_processes_drain_it(
    start: StartPlanner,
    tokens: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rfork_process: StartRfork,
    environment: dict[str, str],
    expected: str,
) -> None:
    """A preStop hook finds the secret shared by the server's processes; another caller has a different one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, url = start(PLANNER_TOKENS_FILE=tokens)
    server = InstanceSettings.model_validate({"planner": url, "token": "work-1", "replica": "pod-x"})
    with PlannerClient.of(server) as planner:
        for name in ("pod-x-main-0", "other"):
            planner.report(seed_report(name))
        shared = {"TMPDIR": str(tmp_path), "RFORK_REPLICA": "pod-x", "RFORK_TOKEN": "work-1"}
        command = ("drain", "--own", "--wait", "5", "--planner", url)
        rfork_process(*command, environment=shared | environment).wait()
        assert expected == planner.instance("pod-x-main-0").report.state


@pytest.mark.slow  # logic: tests/unit/planner/test_auth.py
def test_tokens_rotate_while_the_planner_runs(start: StartPlanner, tokens: Path) -> None:
    """A new token is accepted, a removed one is not; an invalid file changes nothing and is logged."""
    process, url = start(PLANNER_TOKENS_FILE=tokens)
    before = [heartbeat_result(url, token) for token in ("work-1", "work-2")]
    replace(tokens, ROLES.replace("work-1", "work-2"))
    retry_until(lambda: heartbeat_result(url, "work-2") == "ok")
    after = [heartbeat_result(url, token) for token in ("work-1", "work-2")]
    replace(tokens, "instance\n")
    retry_until(lambda: heartbeat_result(url, "work-2") != "ok" or f"{tokens}:1" in process.stderr)
    broken = [heartbeat_result(url, token) for token in ("work-1", "work-2")]
    assert ["ok", "unauthorized"] == before
    assert ["unauthorized", "ok"] == after
    assert ["unauthorized", "ok"] == broken
    assert f"{tokens}:1" in process.stderr
    assert "work-2" not in process.stderr + process.stdout


@pytest.mark.slow  # logic: tests/unit/planner/test_stream_authorization.py
def test_streams_end_with_their_token(start: StartPlanner, tokens: Path) -> None:
    """The page's stream and an event reader end within seconds; neither can reconnect."""
    _, url = start(PLANNER_TOKENS_FILE=tokens)
    old = {"Authorization": "Bearer read-1"}
    with httpx.Client(base_url=url, headers=old, timeout=RETRY_TIMEOUT_S) as web:
        with web.stream("GET", "/ui/feed") as feed, web.stream("GET", "/v1/events") as events:
            lines = feed.iter_lines(), events.iter_lines()
            first = [next(each) for each in lines]
            replace(tokens, ROLES.replace("read-1", "read-2"))
            ended = [list(each)[-1:] != [] for each in lines]
        again = [web.get(path).status_code for path in ("/ui/feed", "/v1/events")]
    assert ["event: begin", "retry: 2000"] == first
    assert [True, True] == ended
    assert [401, 401] == again


def test_a_malformed_tokens_file_fails_the_start(rfork_process: StartRfork, tokens: Path) -> None:
    """One line names the file and the line, without the token."""
    tokens.write_text("reader read-1\nhidden-secret instance\n")
    process = rfork_process("planner", "--port", "0", environment={"RFORK_PLANNER_TOKENS_FILE": str(tokens)})
    code = process.wait()
    log_text = " ".join(process.stderr.split())
    assert 2 == code
    assert f"{tokens}:2" in log_text.replace(" ", "")
    assert "hidden" not in log_text


@pytest.mark.slow  # logic: tests/unit/planner/test_leases.py
def test_leases_outlive_a_change_of_the_secret(start: StartPlanner, free_port: int) -> None:
    """A lease signed with the old key stays valid at a source while the restarted planner has both keys, and
    not later.
    """
    keys: list[list[bytes]] = []
    leases: list[str] = []
    for secret in (OLD, f"{NEW},{OLD}", NEW):
        process, url = start(free_port, PLANNER_LEASE_KEYS=secret)
        with PlannerClient(url) as planner:
            keys.append([decode_key(key) for key in planner.report(seed_report("s")).lease_keys])
            leases.append(planner.request_plan(fork_request("a")).routes[0].lease.token)
        process.stop()
    first, second, _ = leases
    assert [1, 2, 1] == [len(each) for each in keys]
    assert ["fork-a"] * 4 == [
        verify(token, by, source_id="s").fork_id
        for token, by in ((first, keys[0]), (first, keys[1]), (second, keys[1]), (second, keys[2]))
    ]
    for token, by in ((first, keys[2]), (second, keys[0])):
        with pytest.raises(LeaseRejected, match="forged"):
            verify(token, by, source_id="s")


def test_body_and_request_limits_are_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body above the limit gets 413, and a second request within the period of `max_requests_per_s` gets
    429.
    """
    monkeypatch.setattr("planner.app.MAX_BODY_BYTES", 100)
    chosen = PlannerSettings(port=0, max_requests_per_s=0.01)
    with run_in_thread(chosen) as url, httpx.Client(base_url=url, trust_env=False) as web:
        responses = [
            web.put("/v1/instances/s", content=b" " * 101),
            web.get("/v1/models"),
            web.get("/healthz"),
        ]
    assert [413, 429, 200] == [each.status_code for each in responses]
    assert 90 < int(responses[1].headers["retry-after"]) <= 100


def test_a_tokens_file_protects_the_planner(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A planner bound beyond loopback with a tokens file logs no warning, and refuses requests without a
    token.
    """
    with run_in_thread(PlannerSettings(port=0, bind="0.0.0.0", tokens_file=tokens)) as url:
        status = httpx.get(f"{url.replace('0.0.0.0', '127.0.0.1')}/v1/models", trust_env=False).status_code
    assert 401 == status
    assert [] == [each for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("encoding", ["Content-Length: 200000", "Transfer-Encoding: chunked"])
def test_a_refused_body_ends_its_connection(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response arrives while most of the body is still being sent, followed by the end of the stream."""
    monkeypatch.setattr("planner.app.MAX_BODY_BYTES", 100)
    with run_in_thread(PlannerSettings(port=0)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=RETRY_TIMEOUT_S) as connection:
            piece = b"ff\r\n" + b" " * 255 + b"\r\n" if "chunked" in encoding else b" " * 255
            connection.sendall(
                f"PUT /v1/instances/s HTTP/1.1\r\nHost: localhost\r\n{encoding}\r\n\r\n".encode() + piece
            )
            response = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"HTTP/1.1 413" == response[:12]
    assert b"body-too-large" in response


def half_open(url: str, count: int, stack: ExitStack) -> list[socket.socket]:
    """Open `count` connections, each with an incomplete request head."""
    host, _, port = url.removeprefix("http://").partition(":")
    opened = []
    for _ in range(count):
        connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=RETRY_TIMEOUT_S))
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
        opened.append(connection)
    return opened


def test_half_open_requests_block_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of them is closed to free a connection."""
    monkeypatch.setattr(ConnectionLimits, "from_descriptor_limit", classmethod(lambda cls, max_descriptors: cls(8, 4)))
    with run_in_thread(PlannerSettings(port=0)) as url, ExitStack() as stack:
        oldest, *_ = half_open(url, 20, stack)
        with PlannerClient(url) as planner:
            assert planner.ready()
        with contextlib.suppress(ConnectionResetError):
            assert b"" == oldest.recv(1)


def test_a_request_with_an_endless_head_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a connection that was used before."""
    monkeypatch.setattr(http_server, "HEAD_S", 0.2)
    monkeypatch.setattr(http_server, "CHECK_S", 0.05)
    with run_in_thread(PlannerSettings(port=0)) as url, ExitStack() as stack:
        (connection,) = half_open(url, 1, stack)
        connection.sendall(b"Host: localhost\r\n\r\n")
        response = b""
        while not response.endswith(b"[]"):
            response += connection.recv(4096)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"" == connection.recv(1)


@pytest.mark.slow  # logic: tests/unit/planner/test_http_server.py
def test_the_planner_logs_missing_descriptors_once(start: StartPlanner) -> None:
    """It continues to serve: idle connections are closed."""
    process, url = start()
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (48, 48))
    with ExitStack() as stack:
        half_open(url, 100, stack)
        with PlannerClient(url, timeout_s=RETRY_TIMEOUT_S) as planner:
            assert planner.ready()
    process.stop()
    assert 1 == process.stderr.count("cannot accept connections")
    assert "Traceback" not in process.stderr
