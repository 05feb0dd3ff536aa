from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import trustme

from planner.server import run_in_thread, serve
from rfork.errors import PlannerRejected, PlannerUnreachable, PortInUse, SettingsError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkProgress, ForkResult
from rfork.settings import PlannerSettings, TlsSettings
from tests.conftest import StartRfork
from tests.fork_server import PythonProcess
from tests.unit.planner.builders import fault, fork_request, seed_report

SERVE = """
import sys
from planner.server import serve
from rfork.settings import PlannerSettings
serve(PlannerSettings(port=0), lambda url: print(url, flush=True))
print("exited cleanly", flush=True)
"""
EARLY = """
import os, signal
import planner.server
create_app = planner.server.create_app

def create_app_after_signal(settings, **more):
    os.kill(os.getpid(), signal.SIGTERM)
    return create_app(settings, **more)

planner.server.create_app = create_app_after_signal
"""
"""Startup code of a planner that is stopped before it is ready."""
PROGRESS = ForkProgress(verified=((0, 6),), bytes_read=6 << 20, bytes_per_s=1.0)


def settings(**options: str | int | float) -> PlannerSettings:
    """Settings with any free loopback port and long expiries: nothing sends heartbeats here, and processes
    start slowly.
    """
    return PlannerSettings(**{"port": 0, "instance_ttl_s": 600, "lease_ttl_s": 600, **options})  # type: ignore[arg-type]


def test_a_chain_of_three_from_registration_to_finish() -> None:
    """Over sockets: register, plan, progress, finish, lists."""
    with run_in_thread(settings()) as url, PlannerClient(url) as planner:
        planner.report(seed_report("s"))
        chain = [planner.request_plan(fork_request(name)).routes[0].source_id for name in "abc"]
        renewed = planner.progress("fork-b", PROGRESS).leases
        for name in "abc":
            planner.finish(f"fork-{name}", ForkResult(outcome="forked", seconds=1, bytes_read=12 << 20))
        assert ["s", "a", "b"] == chain
        assert {"a"} == set(renewed)
        assert ["finished"] * 3 == [fork.state for fork in planner.forks()]
        assert planner.ready()


def test_a_restarted_planner_recovers_with_one_heartbeat(free_port: int) -> None:
    """The same client continues; its next request contains everything that the planner needs."""
    with run_in_thread(settings(port=free_port)) as url:
        planner = PlannerClient(url)
        planner.report(seed_report("s"))
        planner.request_plan(fork_request("a"))
    with pytest.raises(PlannerUnreachable, match=f"planner {url} is unreachable"):
        planner.instances()
    with run_in_thread(settings(port=free_port)):
        with pytest.raises(PlannerRejected) as refused:
            planner.progress("fork-a", PROGRESS)
        planner.report(seed_report("s", readers=("fork-a",)))
        again = planner.request_plan(fork_request("a", (0, 6)))
        assert "unknown-fork" == refused.value.problem
        assert [("s", ((6, 12),))] == [(route.source_id, route.chunks) for route in again.routes]
    planner.close()


def test_a_token_is_required() -> None:
    """401 with a problem document without the token, a normal response with it."""
    with run_in_thread(settings(token="secret")) as url:
        response = httpx.get(f"{url}/v1/models", trust_env=False)
        with PlannerClient(url, token="secret") as planner:
            assert 401 == response.status_code
            assert "application/problem+json" == response.headers["content-type"]
            assert [] == planner.models()
        with PlannerClient(url, token="wrong") as planner, pytest.raises(PlannerRejected) as refused:
            planner.models()
        assert "unauthorized" == refused.value.problem


def test_a_port_in_use_is_one_clear_line() -> None:
    """Both ways to start it name the address and the variable."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}") as error:
            serve(settings(port=port))
        assert "RFORK_PLANNER_PORT" in error.value.hint


@pytest.mark.parametrize("bind", ["192.0.2.1", "no-such-host.invalid"])
def test_a_foreign_address_is_a_settings_error(bind: str) -> None:
    """Raised before anything starts."""
    with pytest.raises(SettingsError, match=f"cannot listen on {bind}"):
        serve(settings(bind=bind))


def test_an_open_planner_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Beyond loopback without a token: a warning; with a token, or on loopback: none."""
    for options in ({"bind": "0.0.0.0"}, {"bind": "0.0.0.0", "token": "t"}, {}):
        with run_in_thread(settings(**options)):
            pass
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert 1 == len(warnings)
    assert "planner is open" in warnings[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(number: signal.Signals) -> None:
    """Exit code 0, nothing but its own log on stderr; the chosen port is printed."""
    with PythonProcess([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            with PlannerClient(url) as planner:
                assert planner.ready()
                process.send_signal(number)
                assert "exited cleanly\n" == process.stdout.read()
                assert 0 == process.wait(30)
        finally:
            process.kill()


def test_a_signal_during_start_ends_it_cleanly() -> None:
    """It exits cleanly without reporting that it is ready."""
    result = subprocess.run(
        [sys.executable, "-c", EARLY + SERVE], capture_output=True, text=True, check=True, timeout=120
    )
    assert "exited cleanly\n" == result.stdout


def test_the_planner_does_not_import_torch() -> None:
    """A fresh interpreter that builds the complete application does not import it."""
    code = "import sys, planner.server; print(sorted({'torch', 'grpc', 'rfork.receiver'} & set(sys.modules)))"
    assert "[]\n" == subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout  # fmt: skip


def test_tls_with_client_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a `ca`, only clients with a certificate of that authority are served."""
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    ca, certificate, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    monkeypatch.setenv("RFORK_TLS_CA", str(ca))
    monkeypatch.setenv("RFORK_TLS_CERTIFICATE", str(certificate))
    monkeypatch.setenv("RFORK_TLS_KEY", str(key))
    with run_in_thread(settings()) as url:
        with PlannerClient(url, tls=TlsSettings()) as planner:
            assert "https" == url.partition(":")[0]
            assert [] == planner.models()
        without_certificate = ssl.create_default_context(cafile=ca)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/healthz", verify=without_certificate, trust_env=False)
    monkeypatch.setenv("RFORK_TLS_KEY", str(ca))
    with pytest.raises(SettingsError, match="TLS files"):
        serve(settings())


def test_events_follow_a_fork_from_plan_to_finish() -> None:
    """Over a socket: first the running forks, then each change in order."""
    with run_in_thread(settings()) as url, PlannerClient(url) as planner:
        planner.report(seed_report("s"))
        planner.request_plan(fork_request("a"))
        with planner.events(model="m") as events:
            seen = [next(events)]
            planner.progress("fork-a", PROGRESS)
            seen.append(next(events))
            planner.finish("fork-a", ForkResult(outcome="forked", seconds=1, bytes_read=12 << 20))
            seen.append(next(events))
    assert [("planned", "running"), ("progress", "running"), ("ended", "finished")] == [
        (event.kind, event.fork.state) for event in seen
    ]
    assert PROGRESS == seen[1].fork.progress


def test_a_stopping_planner_ends_its_streams() -> None:
    """Readers see the end of the stream, not a broken connection, and the planner does not wait for them."""
    with run_in_thread(settings()) as url:
        planner = PlannerClient(url)
        planner.report(seed_report("s"))
        planner.request_plan(fork_request("a"))
        events = planner.events()
        assert "fork-a" == next(events).fork.fork_id
    assert [] == list(events)
    planner.close()


def test_a_signal_ends_a_planner_with_open_streams() -> None:
    """Exit code 0, even with an open stream."""
    with PythonProcess([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            with PlannerClient(url) as planner, planner.events() as events:
                process.send_signal(signal.SIGTERM)
                assert [] == list(events)
                assert "exited cleanly\n" == process.stdout.read()
                assert 0 == process.wait(30)
        finally:
            process.kill()


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_stream_is_closed_from_another_thread(all_of_it: bool) -> None:
    """Closing the stream or the complete client wakes a thread that waits for its next event."""
    with run_in_thread(settings()) as url, PlannerClient(url) as planner:
        planner.report(seed_report("s"))
        planner.request_plan(fork_request("a"))
        events, began, seen = planner.events(), threading.Event(), []

        def read() -> None:
            for event in events:
                seen.append(event.kind)
                began.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert began.wait(30)
        (planner if all_of_it else events).close()
        reader.join(30)
        assert not reader.is_alive()
        assert ["planned"] == seen


@pytest.mark.slow  # logic: tests/unit/planner_client/test_drain.py
def test_drain_waits_for_an_instances_readers(rfork_process: StartRfork) -> None:
    """`rfork drain` ends after the last reader: exit code 0, and the response as JSON."""
    with run_in_thread(settings()) as url, PlannerClient(url) as planner:
        for name in "st":
            planner.report(seed_report(name))
        source = planner.request_plan(fork_request("a")).routes[0].source_id
        draining = rfork_process(
            "drain", source, "--planner", url, "--wait", "60", "--json", until="forks that read from it: 1"
        )
        planner.finish("fork-a", ForkResult(outcome="forked", seconds=1, bytes_read=12 << 20))
        code = draining.wait()
        assert 0 == code
        assert (source, True, 0) == tuple(
            json.loads(draining.stdout)[name] for name in ("instance_id", "can_exit", "readers")
        )
        assert "draining" == planner.instance(source).report.state


@pytest.mark.slow  # logic: tests/unit/planner_client/test_drain.py
def test_drain_reports_why_it_failed(rfork_process: StartRfork) -> None:
    """The last seed: exit code 5 unless forced; remaining readers: exit code 4; an unknown instance: can
    exit.
    """
    with run_in_thread(settings(heartbeat_interval_s=0.5)) as url, PlannerClient(url) as planner:
        planner.report(seed_report("s"))
        planner.request_plan(fork_request("a"))
        runs = [
            rfork_process("drain", name, "--planner", url, "--wait", *more)
            for name, more in (("s", ("0",)), ("s", ("0", "--force")), ("unknown", ("60",)))
        ]
        assert [5, 4, 0] == [run.wait() for run in runs]
        assert "is the last seed of version v1 of these weights" in runs[0].stderr
        assert "--force" in runs[0].stderr
        assert "instance s is drained and cannot exit after 0 s" in runs[1].stderr


@pytest.mark.slow  # logic: tests/unit/planner_client/test_drain.py
def test_a_server_drains_its_own_instances(rfork_process: StartRfork) -> None:
    """`rfork drain --own`: all instances of RFORK_REPLICA, even the last, and no other; without a name: exit
    code 2.
    """
    ranks = ("pod-main-tp0", "pod-b-main-tp0")
    with run_in_thread(settings()) as url, PlannerClient(url) as planner:
        for name in ranks:
            planner.report(seed_report(name))
        seen = []
        for environment in ({}, {"RFORK_REPLICA": "pod-b"}, {"RFORK_REPLICA": "pod"}):
            command = ("drain", "--own", "--wait", "60", "--planner", url)
            code = rfork_process(*command, environment=environment).wait()
            seen.append((code, *(planner.instance(name).report.state for name in ranks)))
        assert [(2, "serving", "serving"), (0, "serving", "draining"), (0, "draining", "draining")] == seen


@pytest.mark.slow  # logic: tests/unit/planner_client/test_heartbeat.py
def test_a_server_waits_for_its_planner_to_restart(rfork_process: StartRfork, free_port: int) -> None:
    """It needs the planner to list its ranks, and waits for it no longer than for readers."""
    command = ("drain", "--own", "--planner", f"http://127.0.0.1:{free_port}", "--wait")
    environment = {"RFORK_REPLICA": "pod"}
    assert 0 != rfork_process(*command, "0", environment=environment).wait()
    waiting = rfork_process(*command, "60", environment=environment, until=r"waiting: planner \S+ is\s+unreachable")
    with run_in_thread(settings(port=free_port)):
        assert 0 == waiting.wait()
        assert "replica pod can exit: the planner knows no instance of it" == waiting.stdout.strip()


@pytest.mark.slow  # logic: tests/unit/planner_client/test_drain.py
def test_a_server_waits_for_readers_that_it_cannot_refuse(rfork_process: StartRfork, tmp_path: Path) -> None:
    """With an instance's token the last seed is not drained, but waits until it has no readers."""
    (tmp_path / "tokens").write_text("instance instance\n")
    with (
        run_in_thread(settings(token="operator", tokens_file=str(tmp_path / "tokens"))) as url,
        PlannerClient(url, token="operator") as planner,
    ):
        planner.report(seed_report("pod-main-tp0"))
        planner.request_plan(fork_request("a"))
        command = ("drain", "--own", "--planner", url, "--json", "--wait")
        environment = {"RFORK_REPLICA": "pod", "RFORK_TOKEN": "instance"}
        not_waiting = rfork_process(*command, "0", environment=environment)
        code = not_waiting.wait()
        (left,) = json.loads(not_waiting.stdout.splitlines()[0])["instances"]
        waited = rfork_process(*command, "60", environment=environment, until="waiting: forks that read from it: 1")
        planner.finish("fork-a", ForkResult(outcome="fallback", seconds=1, bytes_read=0))
        seen = (waited.wait(), planner.instance("pod-main-tp0").report.state)
        (ended,) = json.loads(waited.stdout)["instances"]
    assert 4 == code
    assert not left["can_exit"]
    assert (0, "serving") == seen
    assert ended["can_exit"]
    assert ["this token may not drain it"] * 2 == [
        "this token may not drain it" for each in (left, ended) if "this token may not drain it" in each["reason"]
    ]


def test_status_explains_quarantines_and_plans(rfork_process: StartRfork) -> None:
    """It shows the reason of a quarantine, the reason of a plan, and the bytes by source."""
    with run_in_thread(settings()) as url, PlannerClient(url) as planner:
        planner.report(seed_report("bad", max_readers=9))
        for name in "ca":
            planner.request_plan(fork_request(name, max_readers=0))
            planner.request_plan(fork_request(name, faults=(fault("bad", "SourceCorrupt"),)))
        planner.finish("fork-a", ForkResult(outcome="forked", seconds=1, bytes_read=5, sources={"x": 5 * 10**6}))
        planner.report(seed_report("good", max_readers=9))
        planner.request_plan(fork_request("b"))
        status = rfork_process("status", "--planner", url)
        assert 0 == status.wait()
    for text in ("quarantined: ", "from seed good", "5.00 MB"):
        assert text in status.stdout
