"""The example server: real processes that fork their model and serve and seed it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest
import torch

from rfork.engines.transformers import loaded_model, tokenizer_of
from rfork.planner_client.client import PlannerClient
from tests.conftest import StartRfork
from tests.processes import RforkProcess, SignalThread, startup_patch

PROMPTS = ("The capital of France is", "fork() copies")
SLOW = str(2 << 20)
"""Bytes per second at which the tiny model (9 MB) needs seconds, so that a server is seen before it is ready."""
TOKENS = 8
RESPONSE_TIMEOUT_S = 60.0
COMMIT = "1" * 40
DROPPED_EXCEPTION_PATCH = """
import signal
handle = signal.signal

def dropped(number, handler):
    def handled(*arguments):
        try:
            handler(*arguments)
        except KeyboardInterrupt:
            pass
    return handle(number, handled if callable(handler) else handler)

signal.signal = dropped
"""
"""Startup patch of a server in which exceptions of signal handlers are dropped."""


class ExampleServer:
    """One example server, and its responses."""

    def __init__(self, model: str, planner: str, options: dict[str, str], name: str = "tiny") -> None:
        self.process = RforkProcess(
            [model, "--planner", planner, "--name", name, "--port", "0"],
            # One thread: on a busy machine, two wait for each other at each step.
            {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **options},
            module="deploy.examples.pytorch.server",
        )
        self._address: str | None = None

    def event(self, name: str) -> dict[str, str]:
        """Wait until the server reports the event."""
        line = self.process.wait_for(rf'^{{"event": "{name}".*$').group()
        return cast(dict[str, str], json.loads(line))

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection to the server, once it listens."""
        if self._address is None:
            self._address = urlsplit(self.event("listening")["url"]).netloc
        return http.client.HTTPConnection(self._address, timeout=RESPONSE_TIMEOUT_S)

    def health(self) -> int:
        """Return the status of /health."""
        with closing(self.connect()) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status

    def tokens(self, prompt: str) -> list[int]:
        """Return the tokens with which the server continues the prompt."""
        with closing(self.connect()) as connection:
            send_prompt(connection, prompt)
            return read_tokens(connection)


def send_prompt(connection: http.client.HTTPConnection, prompt: str) -> None:
    """Send a prompt and return immediately."""
    body = json.dumps({"prompt": prompt, "max_new_tokens": TOKENS})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})


def read_tokens(connection: http.client.HTTPConnection) -> list[int]:
    """Return the requested tokens."""
    response = connection.getresponse()
    text = response.read().decode()
    assert 200 == response.status, text
    return cast(list[int], json.loads(text)["tokens"])


StartServer = Callable[..., ExampleServer]


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """A planner that removes killed instances within the test."""
    environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5", "RFORK_PLANNER_INSTANCE_TTL_S": "8"}
    process = rfork_process("planner", "--port", "0", "--json", environment=environment)
    line = process.wait_for(r'^.*"event": ?"ready".*$').group()
    return cast(dict[str, str], json.loads(line))["url"]


@pytest.fixture
def server(planner: str) -> Iterator[StartServer]:
    """Starts example servers; each is ended with the test."""
    started: list[ExampleServer] = []

    def start(model: Path | str, **options: str) -> ExampleServer:
        made = ExampleServer(str(model), planner, {"HF_HUB_OFFLINE": "1", "RFORK_TRANSPORTS": "http", **options})
        started.append(made)
        return made

    yield start
    for made in reversed(started):
        made.process.stop()
        print(made.process.transcript())


@pytest.fixture
def weightless(tiny_model: Path, tmp_path: Path) -> Path:
    """Folder of the tiny model without its weights."""
    return without_weights(tiny_model, tmp_path / "bare")


def without_weights(folder: Path, target: Path) -> Path:
    """Copy a model's folder without its weights."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    return target


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """Tokens with which transformers continues the prompts."""
    model, tokenizer = loaded_model(tiny_model), tokenizer_of(tiny_model)
    found: list[list[int]] = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(  # type: ignore[operator]  # mixed in where types do not see it
                **inputs, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
            )
        found.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_servers_that_fork_from_one_another(
    server: StartServer,
    planner: str,
    tiny_model: Path,
    weightless: Path,
    tmp_path: Path,
    expected: list[list[int]],
) -> None:
    """The first reads its files; the second has none and forks; the first is killed, and a third forks from
    the second.
    """
    first = server(tiny_model, RFORK_MAX_EGRESS_BYTES_PER_S=SLOW)
    first.event("ready")
    second = server(weightless)
    second.event("listening")
    assert 503 == second.health()
    assert second.event("ready")["weights"].startswith("forked ")
    assert 200 == second.health()
    assert expected == [first.tokens(prompt) for prompt in PROMPTS]
    assert expected == [second.tokens(prompt) for prompt in PROMPTS]

    responses: list[list[int]] = []
    answered = threading.Event()

    def send_requests() -> None:
        for _ in range(6):
            responses.append(second.tokens(PROMPTS[0]))
            answered.set()

    client_thread = threading.Thread(target=send_requests)
    client_thread.start()
    assert answered.wait(RESPONSE_TIMEOUT_S)
    first.process.signal(signal.SIGKILL)
    client_thread.join()
    assert [expected[0]] * 6 == responses

    cache = tmp_path / "hub" / "models--acme--tiny"
    without_weights(weightless, cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    with closing(PlannerClient(planner)) as client:
        [version] = {instance.version for instance in client.instances(model="tiny")}
    # A Hub model's version is its commit, which differs from the fingerprint of the first server's files.
    third = server("acme/tiny", HF_HUB_CACHE=str(tmp_path / "hub"), RFORK_VERSION=version)
    assert third.event("ready")["weights"].startswith("forked ")
    assert expected == [third.tokens(prompt) for prompt in PROMPTS]


def test_sigterm_shuts_down_cleanly(
    server: StartServer, planner: str, tiny_model: Path, expected: list[list[int]]
) -> None:
    """At SIGTERM a running response is finished, the planner is notified, and the exit code is 0."""
    only = server(tiny_model)
    only.event("ready")
    with closing(PlannerClient(planner)) as client:
        assert 1 == len(client.instances(model="tiny"))
        with closing(only.connect()) as connection:
            send_prompt(connection, PROMPTS[0])
            assert 200 == only.health()  # the request sent before is running by now
            only.process.signal(signal.SIGTERM)
            assert expected[0] == read_tokens(connection)
        assert 0 == only.process.wait()
        assert [] == client.instances(model="tiny")


@pytest.mark.slow  # logic: tests/unit/test_shutdown.py
def test_a_signal_delivered_to_another_thread_ends_the_server(
    server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """The server shuts down cleanly although the waiting thread is not woken."""
    thread = SignalThread(tmp_path / "patch")
    only = server(tiny_model, **thread.environment)
    only.event("ready")
    thread.deliver(signal.SIGTERM)
    assert 0 == only.process.wait()
    assert "ended" == only.event("ended")["event"]


@pytest.mark.slow  # logic: tests/unit/test_shutdown.py
def test_a_signal_with_a_dropped_exception_ends_the_server(
    server: StartServer, tiny_model: Path, weightless: Path, tmp_path: Path
) -> None:
    """The signal arrives in a weak reference's callback: the fork finishes, and nothing is served."""
    first = server(tiny_model, RFORK_MAX_EGRESS_BYTES_PER_S=SLOW)
    first.event("ready")
    second = server(weightless, **startup_patch(tmp_path / "patch", DROPPED_EXCEPTION_PATCH))
    second.event("listening")
    second.process.signal(signal.SIGTERM)
    assert 0 == second.process.wait()
    assert "ended" == second.event("ended")["event"]
    assert '"ready"' not in second.process.stdout


def test_sigterm_before_the_server_is_ready(server: StartServer, tiny_model: Path, weightless: Path) -> None:
    """SIGTERM during the fork ends a server that was never ready, with exit code 0."""
    first = server(tiny_model, RFORK_MAX_EGRESS_BYTES_PER_S=SLOW)
    first.event("ready")
    second = server(weightless)
    second.event("listening")
    second.process.signal(signal.SIGTERM)
    assert 0 == second.process.wait()
    assert '"ready"' not in second.process.stdout
