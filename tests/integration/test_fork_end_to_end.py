"""Forks between real processes, through a real planner, over gRPC and http on loopback."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

import rfork
from rfork.engines.transformers import loaded_model
from rfork.image.capture import capture
from rfork.image.memory import image_sha256
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings
from tests.conftest import StartRfork
from tests.fault_proxy import FaultProxy
from tests.processes import RforkProcess
from tests.storage_faults import StallFault

SLOW = str(2 << 20)
"""Bytes per second at which the tiny model (9 MB) needs seconds: time to kill its source."""
READY = r'"event": ?"ready"'

Report = dict[str, object]


def event(process: RforkProcess) -> dict[str, str]:
    """Return the event that a process printed when it was ready."""
    return cast(dict[str, str], json.loads(process.wait_for(rf"^.*{READY}.*$").group()))


class ForkFleet:
    """A planner, and the processes started with it."""

    def __init__(self, start: StartRfork, model: Path) -> None:
        self._start = start
        self.model = model
        environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5"}
        self.planner = start("planner", "--port", "0", "--json", until=READY, environment=environment)
        self.url = event(self.planner)["url"]
        self.client = PlannerClient(self.url)
        self.seeds: dict[str, RforkProcess] = {}

    def seed(self, *more: str, name: str = "tiny", model: Path | None = None, rate: str | None = None) -> RforkProcess:
        arguments = ["seed", str(model or self.model), "--name", name, "--planner", self.url, "--json", *more]
        if rate is not None:
            arguments += ["--egress-rate", rate]
        process = self._start(*arguments, until=READY, environment={"RFORK_TRANSPORTS": "http"})
        self.seeds[event(process)["instance_id"]] = process
        return process

    def pull(
        self,
        *more: str,
        name: str = "tiny",
        model: Path | None = None,
        planner: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> RforkProcess:
        return self._start(
            *(
                "pull",
                str(model or self.model),
                "--name",
                name,
                "--planner",
                planner or self.url,
                "--json",
                "--sha256",
            ),
            *more,
            environment={
                "RFORK_TRANSPORTS": "http",
                # One chunk in flight: a slow seed sends something every half second.
                "RFORK_MAX_INFLIGHT_CHUNKS": "1",
                # Long, since this machine may be busy.
                "RFORK_SOURCE_IDLE_TIMEOUT_S": "60",
                "RFORK_RACE_STORAGE": "0",
                **(environment or {}),
            },
        )

    def close(self) -> None:
        self.client.close()


def result(process: RforkProcess, code: int = 0) -> Report:
    """Return the report of a pull that ended with this exit code."""
    assert code == process.wait()
    return cast(Report, json.loads(process.stdout))


@pytest.fixture
def fleet(rfork_process: StartRfork, tiny_model: Path) -> Iterator[ForkFleet]:
    """A planner without instances."""
    made = ForkFleet(rfork_process, tiny_model)
    yield made
    made.close()


@pytest.fixture(scope="session")
def expected_sha256(tiny_model: Path) -> str:
    """Hash of the tiny model's tensors, as loaded from its checkpoint."""
    return image_sha256(capture(loaded_model(tiny_model)))


def wait_mid_fork(process: RforkProcess) -> None:
    """Wait until a pull has some bytes, but far from all."""
    process.wait_for(r"fork tiny: [2-5]\.\d+ MB of")


def test_a_fork_between_processes(fleet: ForkFleet, expected_sha256: str) -> None:
    """The target has the seed's tensors, every chunk is verified, and the planner knows that it finished."""
    fleet.seed()
    report = result(fleet.pull())
    assert "forked" == report["outcome"]
    assert expected_sha256 == report["sha256"]
    assert [] == report["reasons"]
    assert report["chunks"] == report["chunks_verified"]
    assert [(report["fork_id"], "finished")] == [
        (view.fork_id, view.state) for view in fleet.client.forks(model="tiny")
    ]


class TiedWeightsModel(nn.Module):
    """Tied weights, and a buffer that no checkpoint would contain."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Linear(600, 700)
        self.two = nn.Linear(600, 700)
        self.two.weight = self.one.weight
        self.register_buffer("table", torch.randn(9), persistent=False)

    def content(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self.buffers()]


def equal(one: TiedWeightsModel, other: TiedWeightsModel) -> bool:
    pairs = zip(one.content(), other.content(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def test_a_fork_in_python(fleet: ForkFleet) -> None:
    """`rfork.seed` serves a module and `rfork.fork` fills another from it, including tied weights and
    buffers.
    """
    chosen = InstanceSettings(planner=fleet.url, transports=("http",))
    source, target = TiedWeightsModel(1), TiedWeightsModel(2)
    with rfork.seed(source, model="net", settings=chosen) as seed:
        assert seed.wait_registered(30)
        report = rfork.fork(target, model="net", settings=chosen)
    assert report.seed is not None
    report.seed.close()
    assert "forked" == report.outcome
    assert equal(source, target)
    assert target.one.weight is target.two.weight


def test_a_corrupted_source(fleet: ForkFleet) -> None:
    """A seed whose bytes do not match its manifest is detected, and its bytes are replaced."""
    chosen = InstanceSettings(planner=fleet.url, transports=("http",), drain_timeout_s=0)
    source, target, right = TiedWeightsModel(1), TiedWeightsModel(2), TiedWeightsModel(3)
    with rfork.seed(source, model="net", settings=chosen) as seed:
        assert seed.wait_registered(30)
        with torch.no_grad():
            source.one.weight[0, 0] += 1
        report = rfork.fork(
            target,
            model="net",
            settings=chosen,
            loader=lambda module: module.load_state_dict(right.state_dict()) and None,
        )
        (accused,) = (
            view.accused
            for view in fleet.client.instances(model="net")
            if view.report.instance_id == seed.identity.instance_id
        )
    assert report.seed is not None
    report.seed.close()
    # Elected, or as a fallback, depending on whether the valid chunk arrived first.
    verified_bytes = {share.source_id: share.verified_bytes for share in report.sources}
    assert report.image_bytes == verified_bytes["loader:"]
    assert "SourceCorrupt" == report.reasons[0].partition(":")[0]
    assert "SourceCorrupt" in str(accused)
    right.get_buffer("table").copy_(TiedWeightsModel(2).get_buffer("table"))
    assert equal(right, target)


@pytest.mark.slow  # logic: tests/unit/receiver/test_fallback.py
def test_without_a_planner_the_checkpoint_loads(fleet: ForkFleet, expected_sha256: str, free_port: int) -> None:
    """If the planner is unreachable, the checkpoint loads, and the report states why."""
    planner = f"http://127.0.0.1:{free_port}"
    report = result(fleet.pull("--checkpoint", str(fleet.model), planner=planner))
    reasons = cast(list[str], report["reasons"])
    assert "fallback" == report["outcome"]
    assert f"checkpoint {fleet.model}" == report["fallback"]
    assert expected_sha256 == report["sha256"]
    assert "PlannerUnreachable" == reasons[-1].partition(":")[0]


@pytest.mark.slow  # logic: tests/unit/receiver/test_planner_requests.py
def test_a_planner_that_is_silent_at_first_is_retried(fleet: ForkFleet, expected_sha256: str) -> None:
    """One missing response does not end the fork: the next one plans it under its id."""
    fleet.seed()
    with FaultProxy(int(fleet.url.rpartition(":")[2])) as proxy:
        proxy.script.then(StallFault(None), path="POST /v1/forks")
        environment = {"RFORK_PLANNER_TIMEOUT_S": "4"}
        report = result(fleet.pull("--checkpoint", str(fleet.model), planner=proxy.url, environment=environment))
        fork_requests = [line for line in proxy.requests_matching("POST /v1/forks") if line == "POST /v1/forks"]
    (fork,) = fleet.client.forks()
    assert "forked" == report["outcome"]
    assert report["fallback"] is None
    assert expected_sha256 == report["sha256"]
    assert fork.fork_id == report["fork_id"]
    assert 2 == len(fork_requests)


@pytest.mark.slow  # logic: tests/unit/receiver/test_cold_start_session.py
def test_independent_cold_start_makes_no_target_wait(fleet: ForkFleet, expected_sha256: str) -> None:
    """With `cold_start` independent, a model without a source is loaded from the checkpoint as a fallback."""
    own = {"RFORK_COLD_START": "independent"}
    report = result(fleet.pull("--version", "v1", environment=own))
    reasons = cast(list[str], report["reasons"])
    assert "fallback" == report["outcome"]
    assert expected_sha256 == report["sha256"]
    assert "NoSource" == reasons[-1].partition(":")[0]
    assert report["image_bytes"] == report["storage_bytes"]


def test_no_source_left_is_exit_code_7(fleet: ForkFleet, tmp_path: Path) -> None:
    """Without a source, a checkpoint and other weights the command fails with a clear error."""
    folder = tmp_path / "config-only"
    shutil.copytree(fleet.model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    process = fleet.pull(model=folder)
    assert 7 == process.wait()
    assert "no source or fallback worked" in process.stdout + process.stderr


# The logic of all four is in tests/unit/receiver/test_transfer.py and test_fallback.py.
@pytest.mark.parametrize(
    ("seeds", "number"),
    [
        pytest.param(2, signal.SIGKILL, id="another seed-killed"),
        pytest.param(2, signal.SIGSTOP, id="another seed-stopped", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, id="checkpoint-killed", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, id="checkpoint-stopped", marks=pytest.mark.slow),
    ],
)
def test_a_source_lost_during_a_fork(
    fleet: ForkFleet, expected_sha256: str, number: signal.Signals, seeds: int
) -> None:
    """A source that dies or hangs during a fork is replaced by another seed or by the checkpoint."""
    for _ in range(seeds):
        fleet.seed(rate=SLOW)
    process = fleet.pull("--checkpoint", str(fleet.model), environment={"RFORK_SOURCE_IDLE_TIMEOUT_S": "5"})
    wait_mid_fork(process)
    (view,) = fleet.client.forks(model="tiny")
    fleet.seeds[view.plan[0].source_id].signal(number)
    report = result(process)
    sources = cast(list[dict[str, int]], report["sources"])
    verified = sum(share["verified_chunks"] for share in sources)
    assert expected_sha256 == report["sha256"]
    if seeds == 2:
        assert "forked" == report["outcome"]
        assert 2 == len(sources)
        assert report["chunks"] == verified
        assert cast(int, report["bytes_repeated"]) <= 1 << 20
    else:
        assert "fallback" == report["outcome"]


@pytest.mark.parametrize(
    "back",
    [pytest.param(True, id="restarted"), pytest.param(False, id="away", marks=pytest.mark.slow)],
)
def test_a_planner_lost_during_a_fork(
    fleet: ForkFleet, rfork_process: StartRfork, expected_sha256: str, back: bool
) -> None:
    """With or without a replacement for the killed planner, the fork finishes and reads nothing twice."""
    seed = fleet.seed(rate=SLOW)
    process = fleet.pull()
    wait_mid_fork(process)
    fleet.planner.signal(signal.SIGKILL)
    fleet.planner.wait()
    if back:
        seed.signal(signal.SIGSTOP)  # the fork lasts until the next one is up
        rfork_process("planner", "--port", fleet.url.rpartition(":")[2], "--json", until=READY)
        seed.signal(signal.SIGCONT)
    report = result(process)
    assert "forked" == report["outcome"]
    assert expected_sha256 == report["sha256"]
    assert 0 == report["bytes_repeated"]
    if back:
        assert ["finished"] == [view.state for view in fleet.client.forks(model="tiny")]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.slow  # logic: tests/unit/receiver/test_transfer.py
def test_an_interrupt_during_a_fork(fleet: ForkFleet, number: signal.Signals) -> None:
    """Ctrl-C or SIGTERM is exit code 130; the planner has the lease back and has removed the instance."""
    fleet.seed(rate=SLOW)
    process = fleet.pull()
    wait_mid_fork(process)
    process.signal(number)
    assert 130 == process.wait()
    views = fleet.client.forks(model="tiny")
    assert [("failed", "interrupted")] == [(view.state, view.finish.outcome if view.finish else None) for view in views]
    assert 1 == len(fleet.client.instances(model="tiny"))


@pytest.mark.slow  # logic: tests/unit/receiver/test_planner_requests.py
def test_another_layout_names_the_tensor(fleet: ForkFleet, tmp_path: Path) -> None:
    """For a seed of the same version with other shapes, the reason names the first tensor that differs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(fleet.model)
    config.intermediate_size //= 2
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    fleet.seed("--version", "v1", model=tmp_path)
    own = {"RFORK_COLD_START": "independent"}
    report = result(fleet.pull("--version", "v1", environment=own))
    reason = cast(list[str], report["reasons"])[0]
    assert [] == [part for part in ("mlp.", "here bfloat16[", "there bfloat16[", "1024", "512") if part not in reason]
