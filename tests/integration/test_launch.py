"""`rfork launch` as a process, with stand-ins for engines: signals, exit codes, and the drain."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rfork.image.capture import image_from_tensors
from rfork.image.chunks import ChunkState
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkRequest, Rank
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.http import HttpTransport
from tests.conftest import StartRfork
from tests.processes import RforkProcess, SignalThread

ENGINE = """#!{python}
import importlib.metadata, os, signal, sys, time

def report(*words):
    print(*words, flush=True)

def end(number, frame):
    report("engine got", signal.Signals(number).name)
    if "--stubborn" not in sys.argv:
        sys.exit(7)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, end)
points = {{point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}}
settings = [os.environ["RFORK_" + name] for name in ("PLANNER", "REPLICA", "DRAIN_TIMEOUT_S")]
report("engine has", sys.argv[1:], *settings, points)
if "--die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
while "--once" not in sys.argv:
    time.sleep(1)  # a signal just before the sleep is handled after it
sys.exit(3)
"""
REPLICA = "server-1"
Launch = Callable[..., RforkProcess]


@pytest.fixture
def launch(rfork_process: StartRfork, tmp_path: Path) -> Launch:
    """Start a stand-in with `rfork launch`, and wait until it is up."""
    engine = tmp_path / "vllm"
    engine.write_text(ENGINE.format(python=sys.executable))
    engine.chmod(0o755)

    def start(
        *arguments: str,
        planner: str = "http://127.0.0.1:9",
        drain_timeout_s: str = "20",
        environment: dict[str, str] | None = None,
    ) -> RforkProcess:
        options = ["--planner", planner, "--replica", REPLICA, "--drain-timeout-s", drain_timeout_s]
        return rfork_process(
            "launch", *options, "--", str(engine), "serve", "model", *arguments,
            until="engine has", environment=environment,
        )  # fmt: skip

    return start


@pytest.fixture
def planner(rfork_process: StartRfork) -> Iterator[PlannerClient]:
    """A client of a planner."""
    process = rfork_process("planner", "--port", "0", "--json", until=r'"event": ?"ready"')
    client = PlannerClient(process.wait_for(r"http://127.0.0.1:\d+").group())
    yield client
    client.close()


def seed_of(planner: PlannerClient, replica: str, *, has_weights: bool = True) -> Seed:
    """Register a rank of the server as a seed or as an instance without weights."""
    settings = InstanceSettings()
    image = image_from_tensors({"weight": torch.ones(64)})
    return Seed(
        image,
        InstanceIdentity("model", Rank(), f"{replica}-{Rank().key}-dp0-00000000"),
        settings,
        Connections([HttpTransport(settings)], planner=PlannerClient(planner.url)),
        chunk_state=None if has_weights else ChunkState(image.layout.chunks),
        manifest=image.manifest() if has_weights else None,
    )


def lines(process: RforkProcess) -> list[str]:
    return re.findall("engine got .*", process.stdout)


def test_the_engine_gets_its_configuration(launch: Launch) -> None:
    """Load format, planner, name, plugin and a zero drain timeout; its exit code is the launcher's."""
    process = launch("--once")
    arguments = ["serve", "model", "--once", "--load-format", "rfork"]
    message = f"engine has {arguments} http://127.0.0.1:9 {REPLICA} 0 {{'rfork'}}"
    assert 3 == process.wait()
    assert message == process.wait_for("engine has .*").group()


def test_a_signal_that_kills_the_engine_is_the_exit_code(launch: Launch) -> None:
    """128 plus the number of the signal, as in shells."""
    assert 128 + signal.SIGKILL == launch("--die").wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_other_signals_are_forwarded(launch: Launch, number: signal.Signals) -> None:
    """Once, and without a drain."""
    process = launch()
    process.signal(number)
    assert 7 == process.wait()
    assert [f"engine got {number.name}"] == lines(process)


def test_a_signal_received_on_another_thread_is_forwarded(launch: Launch, tmp_path: Path) -> None:
    """Even though it does not wake the launcher, which waits for the engine."""
    thread = SignalThread(tmp_path / "patch")
    process = launch(environment=thread.environment)
    thread.deliver(signal.SIGINT)
    assert 7 == process.wait()
    assert ["engine got SIGINT"] == lines(process)


def test_an_unreachable_planner_does_not_block_the_exit(launch: Launch) -> None:
    """SIGTERM reaches the engine within the drain timeout, even though no planner responds."""
    process = launch(drain_timeout_s="0.5")
    process.signal(signal.SIGTERM)
    assert 7 == process.wait()
    assert ["engine got SIGTERM"] == lines(process)


def test_a_sigterm_drains_first(launch: Launch, planner: PlannerClient) -> None:
    """The server's instance drains although it is the last; an instance with a similar name does not."""
    with seed_of(planner, REPLICA) as seed, seed_of(planner, f"{REPLICA}-b") as other:
        assert seed.wait_registered(10)
        assert other.wait_registered(10)
        process = launch(planner=planner.url)
        process.signal(signal.SIGTERM)
        code = process.wait()
        states = {view.report.instance_id: view.report.state for view in planner.instances()}
        expected = {seed.identity.instance_id: "draining", other.identity.instance_id: "serving"}
        assert 7 == code
        assert ["engine got SIGTERM"] == lines(process)
        assert expected == states


def test_a_second_sigterm_is_forwarded_immediately(launch: Launch, planner: PlannerClient) -> None:
    """Even though the drain would continue: a reader stays for longer than the test waits."""
    with seed_of(planner, REPLICA) as seed, seed_of(planner, "reader", has_weights=False) as reader:
        assert seed.wait_registered(10)
        assert reader.wait_registered(10)
        planner.request_plan(ForkRequest(fork_id="fork-1", instance=reader.report(), faults=(), current_assignments=()))
        process = launch(planner=planner.url, drain_timeout_s="1000")
        process.signal(signal.SIGTERM)
        process.wait_for("draining")
        process.signal(signal.SIGTERM)
        assert 7 == process.wait()
        assert "engine got SIGTERM" == lines(process)[0]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["vllm", "bench"], "is not a server"),
        (["/no/such/vllm", "serve"], "cannot start /no/such/vllm"),
        (["bash", "-c", "vllm serve m"], "starts a shell"),
    ],
)
def test_a_bad_command_is_one_line(rfork_process: StartRfork, command: list[str], message: str) -> None:
    """Exit code 2, and the problem."""
    process = rfork_process("launch", "--", *command)
    assert 2 == process.wait()
    assert message in process.stderr
    assert "Traceback" not in process.stderr
