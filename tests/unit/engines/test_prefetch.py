"""The launcher's prefetch: which weights it requests, and from which holder."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import httpx
import pytest

from rfork.artifacts import ArtifactReport
from rfork.engine_command import EngineName, ModelArguments, model_arguments
from rfork.engines.prefetch import Prefetch, selector_of
from rfork.planner_client.client import PlannerClient
from rfork.schema import ImageSelector
from rfork.settings import InstanceSettings

SETTINGS = InstanceSettings(planner="http://planner", node_name="node-1", replica="server-1", version="v2")
ARGUMENTS = ["org/model", "--port", "8000"]


@pytest.mark.parametrize(
    ("engine", "arguments", "expected"),
    [
        ("vllm", ["org/model", "--port", "1"], ModelArguments("org/model")),
        ("vllm", ["--port", "1", "--model", "org/model"], ModelArguments("org/model")),
        ("vllm", ["org/other", "--model=org/model"], ModelArguments("org/model")),
        ("vllm", ["org/model", "--revision", "v1"], ModelArguments("org/model", "v1")),
        ("vllm", ["org/model", "--served-model-name", "chat"], ModelArguments("org/model")),
        ("vllm", ["--config", "server.yaml"], None),
        ("vllm", [], None),
        ("sglang", ["--model-path", "org/model"], ModelArguments("org/model")),
        ("sglang", ["--model_path=org/model"], ModelArguments("org/model")),
        ("sglang", ["--model", "org/model", "--revision=v1"], ModelArguments("org/model", "v1")),
        ("sglang", ["--model-path", "m", "--served-model-name", "chat"], ModelArguments("m", None, "chat")),
        ("sglang", ["--model-path", "m", "--served-model-name", "m"], ModelArguments("m")),
        ("sglang", ["org/model"], None),
    ],
)
def test_the_model_in_the_arguments(engine: EngineName, arguments: list[str], expected: ModelArguments | None) -> None:
    """Path or hub id, revision, and the name under which SGLang's instances meet."""
    assert expected == model_arguments(engine, arguments)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ImageSelector(model="org/model", version="v2")),
        ({"model": "llama"}, ImageSelector(model="llama", version="v2")),
        ({"version": None}, ImageSelector(model="org/model", version=None)),
    ],
)
def test_the_selected_weights(changes: dict[str, object], expected: ImageSelector) -> None:
    """The name and the version that the engine's instances will report."""
    assert expected == selector_of("vllm", ARGUMENTS, SETTINGS.model_copy(update=changes))


class FakePlanner:
    """Planner with the holders of one host; records the calls that change something."""

    def __init__(self, *, follows_host: bool | None, status: int = 200) -> None:
        """`follows_host`: that of the host's only holder; None: there is none."""
        self.calls: list[tuple[str, object]] = []
        self.requested = threading.Event()
        self._follows_host = follows_host
        self._status = status

    def connect(self, settings: InstanceSettings) -> PlannerClient:
        return PlannerClient("http://planner", transport=httpx.MockTransport(self._respond))

    def _respond(self, request: httpx.Request) -> httpx.Response:
        if self._status != 200:
            return httpx.Response(self._status)
        if request.method == "GET":
            report = {"holder_id": "h", "placement": {"host": "node-1"}, "memory_bytes": 1}
            item = {"report": report | {"follows_host": self._follows_host}, "age_s": 0}
            items = [] if self._follows_host is None else [item]
            return httpx.Response(200, json={"items": items, "next": None})
        self.calls.append((request.method, json.loads(request.content) if request.content else None))
        self.requested.set()
        if request.method == "DELETE":
            return httpx.Response(204)
        return httpx.Response(200, json={"heartbeat_s": 5, "wanted": []})


class Processes:
    """Starts processes that do nothing instead of a holder and `rfork cache pull`, and records the commands."""

    def __init__(self, pull: str = "print()") -> None:
        """`pull`: Python program that replaces `rfork cache pull`."""
        self.pulls: list[tuple[Sequence[str], Mapping[str, str]]] = []
        self.pulled: subprocess.Popen[bytes] | None = None
        self.pull_started = threading.Event()
        self._pull = pull
        self.commands: list[Sequence[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.started = threading.Event()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        if "pull" in command:
            self.pulls.append((command, environment))
            self.pulled = subprocess.Popen([sys.executable, "-c", self._pull], stdout=stdout)
            self.pull_started.set()
            return self.pulled
        self.commands.append(command)
        self.environments.append(environment)
        process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        self.processes.append(process)
        self.started.set()
        return process


def prefetch(
    planner: FakePlanner,
    processes: Processes,
    settings: InstanceSettings = SETTINGS,
    variables: Mapping[str, str] | None = None,
) -> Prefetch:
    environment = {"RFORK_REPLICA": "server-1", "RFORK_HTTP_PORT": "7000", "RFORK_PLANNER": "http://planner"}
    environment |= variables or {}
    return Prefetch("vllm", ARGUMENTS, settings, environment, connect=planner.connect, start_process=processes.start)


def test_the_holder_of_the_host_is_notified() -> None:
    """A holder without memory selects the weights, and is removed when the server ends."""
    planner, processes = FakePlanner(follows_host=True), Processes()
    with prefetch(planner, processes):
        assert planner.requested.wait(30)
    method, report = planner.calls[0]
    assert "PUT" == method
    assert isinstance(report, dict)
    assert [{"model": "org/model", "version": "v2"}] == report["selectors"]
    assert 0 == report["memory_bytes"]
    assert report["follows_host"] is False
    assert "node-1" == report["placement"]["host"]
    assert "DELETE" == planner.calls[-1][0]
    assert [] == processes.commands


@pytest.mark.parametrize("follows_host", [None, False])
def test_without_a_holder_of_the_host_one_is_started(follows_host: bool | None) -> None:
    """It selects the weights, ends with the launcher, and has neither the ports nor the name of the server."""
    planner, processes = FakePlanner(follows_host=follows_host), Processes()
    with prefetch(planner, processes):
        assert processes.started.wait(30)
    (command,), (environment,) = processes.commands, processes.environments
    assert ["hold", "--one-shot", "--models", "org/model@v2", "--until-pid", str(os.getpid())] == command[3:]
    assert {"RFORK_PLANNER": "http://planner"} == environment
    assert processes.processes[0].poll() is not None


@pytest.mark.parametrize("changes", [{"planner": None}, {"prefetch": "off"}])
def test_it_can_be_off(changes: dict[str, object]) -> None:
    """Without a planner, and by the setting, nothing happens."""
    planner, processes = FakePlanner(follows_host=None), Processes()
    with prefetch(planner, processes, SETTINGS.model_copy(update=changes)):
        pass
    assert [] == processes.commands
    assert [] == planner.calls


def test_a_failing_planner_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The server runs without a prefetch."""
    caplog.set_level("INFO")
    planner, processes = FakePlanner(follows_host=None, status=500), Processes()
    with prefetch(planner, processes):
        pass
    assert "weights not prefetched" in caplog.text
    assert [] == processes.commands


CACHES = {"RFORK_ARTIFACTS_KINDS": "vllm,inductor", "VLLM_CACHE_ROOT": "/caches/vllm"}
PULLED = ArtifactReport("org/model", "key", files=43, bytes=6800000, seconds=1.5, source="7f2a@node-2")


def prefetch_caches(processes: Processes, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Prefetch until the result of the caches is logged. Returns the lines about them."""
    caplog.set_level("INFO")
    logged = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: logged.set() if "JIT caches" in record.getMessage() else None  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with prefetch(FakePlanner(follows_host=True), processes, variables=CACHES):
            assert logged.wait(30)
    finally:
        logging.getLogger().removeHandler(handler)
    return [line for line in caplog.text.splitlines() if "JIT caches" in line]


def test_caches_are_pulled_into_the_folders_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """The command has the model's name and the engine's environment, and one line reports what came."""
    processes = Processes(f"print({json.dumps(PULLED.to_dict())!r})")
    (line,) = prefetch_caches(processes, caplog)
    ((command, environment),) = processes.pulls
    assert ["cache", "pull", "--json", "--model", "org/model"] == command[3:]
    assert CACHES["VLLM_CACHE_ROOT"] == environment["VLLM_CACHE_ROOT"]
    assert CACHES["RFORK_ARTIFACTS_KINDS"] == environment["RFORK_ARTIFACTS_KINDS"]
    assert "RFORK_HTTP_PORT" not in environment
    assert "JIT caches prefetched" in line
    assert "43" in line
    assert "7f2a@node-2" in line


@pytest.mark.parametrize(
    ("pull", "reason"),
    [
        (f"print({json.dumps(ArtifactReport('m', 'key', reason='no instance').to_dict())!r})", "no instance"),
        ("raise SystemExit(3)", "exit code 3"),
        ("print('?')", "Invalid JSON"),
    ],
)
def test_the_reason_why_no_caches_came_is_logged(pull: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """The engine compiles: nothing is raised."""
    (line, *_) = prefetch_caches(Processes(pull), caplog)
    assert "JIT caches not prefetched" in line
    assert reason in caplog.text


def test_pulling_caches_ends_with_the_server() -> None:
    """A pull that still runs is terminated, without waiting for its deadline."""
    processes = Processes("import signal; signal.pause()")
    with prefetch(FakePlanner(follows_host=True), processes, variables=CACHES):
        assert processes.pull_started.wait(30)
    assert processes.pulled is not None
    assert processes.pulled.poll() is not None


@pytest.mark.parametrize(
    ("changes", "variables"),
    [({"prefetch": "off"}, CACHES), ({"planner": None}, CACHES), ({}, {}), ({}, {"RFORK_ARTIFACTS_KINDS": ""})],
)
def test_caches_are_not_pulled_unless_enabled(changes: dict[str, object], variables: dict[str, str]) -> None:
    """Without cache types, without a planner, and by the setting, no command starts."""
    planner, processes = FakePlanner(follows_host=True), Processes()
    with prefetch(planner, processes, SETTINGS.model_copy(update=changes), variables):
        assert not {"prefetch", "planner"}.isdisjoint(changes) or planner.requested.wait(30)
    assert [] == processes.pulls
