"""Models in several parts: each rank and each role forks its own image and never another's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

import rfork
from rfork.errors import AllSourcesFailed
from rfork.planner_client.client import PlannerClient
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from tests.conftest import StartRfork
from tests.ports import free_port
from tests.processes import RforkProcess

EXAMPLE = "deploy.examples.pytorch.tensor_parallel"
READY = r'^{"event": "ready".*$'

ReadyEvent = dict[str, str | int | list[int]]
StartReplica = Callable[..., list[RforkProcess]]


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """The URL of an empty planner."""
    environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5", "RFORK_PLANNER_INSTANCE_TTL_S": "3"}
    process = rfork_process("planner", "--port", "0", "--json", environment=environment)
    line = process.wait_for(r'^.*"event": ?"ready".*$').group()
    return cast(dict[str, str], json.loads(line))["url"]


@pytest.fixture
def replica(planner: str) -> Iterator[StartReplica]:
    """Start replicas of two ranks; each process ends with the test."""
    started: list[RforkProcess] = []

    def start(*arguments: str) -> list[RforkProcess]:
        port = free_port()
        ranks = [
            RforkProcess(
                ["--planner", planner, *arguments],
                {
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "OMP_NUM_THREADS": "1",
                    "RFORK_TRANSPORTS": "http",
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                module=EXAMPLE,
            )
            for rank in range(2)
        ]
        started.extend(ranks)
        return ranks

    yield start
    for process in reversed(started):
        process.stop()
        print(process.transcript())


def ready_event(process: RforkProcess) -> ReadyEvent:
    """Return a rank's ready event."""
    return cast(ReadyEvent, json.loads(process.wait_for(READY).group()))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_replicas_of_two_ranks(replica: StartReplica, tmp_path: Path) -> None:
    """Each rank of the second forks from the same rank of the first; the logits are equal byte for byte."""
    checkpoint = str(tmp_path / "model.safetensors")
    subprocess.run([sys.executable, "-m", EXAMPLE, "--make", checkpoint], check=True)
    first = [ready_event(process) for process in replica("--checkpoint", checkpoint)]
    processes = replica()
    second = [ready_event(process) for process in processes]
    assert [True, True] == [str(rank["weights"]).startswith("forked ") for rank in second]
    for each in ("weights_id", "logits", "tokens"):
        assert [rank[each] for rank in first] == [rank[each] for rank in second]
    assert 2 == len({str(rank["weights_id"]) for rank in first})
    assert 1 == len({str(rank["logits"]) for rank in (*first, *second)})
    for process in processes:
        process.signal(signal.SIGTERM)
    assert [0, 0] == [process.wait() for process in processes]


class ModelPart(nn.Module):
    """Weights with the same layout for every rank and role."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(300, 400)

    def equals(self, other: ModelPart) -> bool:
        """Return True if the other one has the same weights."""
        return torch.equal(self.linear.weight, other.linear.weight)


@pytest.fixture
def settings(planner: str) -> InstanceSettings:
    """Settings of forks that fail soon."""
    return InstanceSettings(planner=planner, transports=("http",), no_source_timeout_s=0.2, drain_timeout_s=0)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (Rank(tp=1, tp_size=2), Rank(tp=0, tp_size=2)),
        (Rank(tp=0, tp_size=2), Rank()),
        (Rank(pp=1, pp_size=2), Rank(pp=0, pp_size=2)),
        (Rank(ep=1, ep_size=2), Rank(ep=0, ep_size=2)),
        (Rank(role="speculative"), Rank()),
    ],
    ids=lambda rank: rank.key,
)
def test_a_rank_never_forks_another_ranks_image(settings: InstanceSettings, mine: Rank, other: Rank) -> None:
    """Of equal layouts, only that of the same rank is forked; otherwise the fork fails."""
    theirs, ours, target = ModelPart(1), ModelPart(2), ModelPart(3)
    with rfork.seed(theirs, model="parts", version="v1", rank=other, settings=settings) as seed:
        assert seed.wait_registered(30)
        with pytest.raises(AllSourcesFailed):
            rfork.fork(target, model="parts", version="v1", rank=mine, settings=settings)
        assert not target.equals(theirs)
        with rfork.seed(ours, model="parts", version="v1", rank=mine, settings=settings) as right:
            assert right.wait_registered(30)
            report = rfork.fork(target, model="parts", version="v1", rank=mine, settings=settings)
    assert report.seed is not None
    report.seed.close()
    assert target.equals(ours)
    assert [right.identity.instance_id] == [share.source_id for share in report.sources]


def test_two_models_in_one_process(settings: InstanceSettings) -> None:
    """A main and a speculative model: two seeds with separate ids and ports, each forked by its own role."""
    roles = (Rank(role="main"), Rank(role="speculative"))
    sources, targets = (ModelPart(1), ModelPart(2)), (ModelPart(3), ModelPart(4))
    with ExitStack() as open_seeds, PlannerClient(str(settings.planner)) as client:
        for source, rank in zip(sources, roles, strict=True):
            seed = open_seeds.enter_context(rfork.seed(source, model="pair", rank=rank, settings=settings))
            assert seed.wait_registered(30)
        for target, rank in zip(targets, roles, strict=True):
            report = rfork.fork(target, model="pair", rank=rank, settings=settings)
            assert report.seed is not None
            open_seeds.callback(report.seed.close)
            assert report.seed.wait_registered(30)
        views = [view.report for view in client.instances(model="pair")]
    assert [True, True] == [target.equals(source) for target, source in zip(targets, sources, strict=True)]
    assert 4 == len({view.instance_id for view in views})
    assert 4 == len({view.address for view in views})
    assert ["main", "main", "speculative", "speculative"] == sorted(view.rank.role for view in views)
