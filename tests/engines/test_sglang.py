"""Forks between real, stock SGLang servers: the behaviour that `--rfork-planner` promises to users."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from rfork.schema import InstanceReport
from tests.engines.conftest import TinyFolder
from tests.engines.engine_server import READY_S, wait_until
from tests.engines.load_generator import LoadGenerator
from tests.engines.model_folders import copy_without_weights
from tests.engines.planner_process import PlannerProcess
from tests.engines.queries import (
    MIB,
    PROMPTS,
    SLOW_FORK_ENVIRONMENT,
    greedy_tokens,
    instances,
    wait_serving,
    weights_ids,
)
from tests.engines.servers import SglangServer
from tests.ports import free_port


def planner_flags(planner: PlannerProcess, *more: str) -> tuple[str, ...]:
    """Return the one flag that a user passes."""
    return ("--rfork-planner", planner.url, *more)


@pytest.mark.timeout(1500)
def test_one_flag_forks(model_folder: Path, weightless_folder: Path, planner: PlannerProcess, tmp_path: Path) -> None:
    """Two servers without weights fork concurrently from a busy one, and generate the same tokens.

    The seed loaded the checkpoint with SGLang's loader. A server that is terminated leaves the planner.
    """
    seed = SglangServer(model_folder, log=tmp_path / "seed.log", arguments=planner_flags(planner))
    forks = [
        SglangServer(weightless_folder, log=tmp_path / f"fork-{name}.log", arguments=planner_flags(planner))
        for name in "ab"
    ]
    with seed:
        seed.wait_ready()
        wait_serving(planner, 1)
        expected = greedy_tokens(seed)
        with LoadGenerator(seed, max_tokens=8) as load:
            load.wait_for(20)
            began = time.monotonic()
            with forks[0], forks[1]:
                for fork in forks:
                    fork.wait_ready(2 * READY_S)
                ended = time.monotonic()
                load.stop()
                for fork in forks:
                    assert expected == greedy_tokens(fork)
                    assert "outcome=fallback" not in fork.log
                    assert fork.wait_for_line(r"fork done report=forked 0\.\d+ GB .*").group()
                wait_serving(planner, 3)
                assert 1 == len(weights_ids(planner))
                assert [] == forks[1].stop()
                wait_serving(planner, 2)
                assert "drained" in forks[1].log
        print(f"seed idle:  {load.summary(until_s=began)}")
        print(f"two starts: {load.summary(began, ended)}")
        assert [] == load.failures


@pytest.mark.parametrize("weights", ["weights", "no weights"])
def test_a_seed_dies_in_mid_fork(
    weights: str, tiny_folder: TinyFolder, planner: PlannerProcess, tmp_path: Path
) -> None:
    """Its fork is unready until then and loads its files; without weights it ends with a clear error."""
    folder = tiny_folder()
    target = folder if weights == "weights" else copy_without_weights(folder, tmp_path)
    with SglangServer(
        folder,
        log=tmp_path / "seed.log",
        arguments=planner_flags(planner, "--rfork-max-egress-bytes-per-s", str(MIB)),
        environment=SLOW_FORK_ENVIRONMENT,
    ) as seed:
        seed.wait_ready()
        expected = greedy_tokens(seed, PROMPTS[:5])
        with SglangServer(
            target,
            log=tmp_path / "fork.log",
            arguments=planner_flags(planner),
            environment=SLOW_FORK_ENVIRONMENT,
        ) as fork:
            wait_until(
                lambda: any(0 < _verified(report) < report.chunk_count for report in instances(planner)),
                deadline_s=READY_S,
                what="a partly verified fork",
            )
            assert not fork.healthy()
            seed.kill()
            if weights == "weights":
                fork.wait_ready()
                assert expected == greedy_tokens(fork, PROMPTS[:5])
                assert "fork done report=loaded" in fork.log
                wait_serving(planner, 1)
            else:
                assert 0 != fork.wait()
                assert fork.lines_with("there are no weights in")
                assert fork.lines_with("cannot start the server: no weights")


def test_the_current_weights_are_forked(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """A server without a planner loads its files and becomes a seed later; forks have its weights at that
    time.

    An update that cannot be read changes nothing. Both by `--load-format rfork` and the environment alone.
    """
    port = free_port()
    old, new = tiny_folder(seed=1), tiny_folder(seed=2)
    bare = copy_without_weights(old, tmp_path)
    environment = {"RFORK_PLANNER": f"http://127.0.0.1:{port}", "RFORK_PLANNER_TIMEOUT_S": "1"}
    arguments = ("--load-format", "rfork")
    planner = PlannerProcess(port=port)

    def start(name: str) -> SglangServer:
        log = tmp_path / f"{name}.log"
        return SglangServer(
            bare, log=log, arguments=arguments, environment={**environment, "RFORK_FAIL_IF_NOT_FORKED": "1"}
        )

    with SglangServer(old, log=tmp_path / "seed.log", arguments=arguments, environment=environment) as seed:
        seed.wait_ready()
        assert "fork done report=loaded" in seed.log
        with planner:
            wait_serving(planner, 1)
            before = greedy_tokens(seed, PROMPTS[:5])
            with start("first") as first:
                first.wait_ready()
                assert before == greedy_tokens(first, PROMPTS[:5])
            old_id = weights_ids(planner)
            assert not update(seed, tmp_path / "missing")
            wait_until(lambda: weights_ids(planner) == old_id, deadline_s=60, what="the same weights")
            assert update(seed, new)
            wait_until(lambda: len(weights_ids(planner) - old_id) == 1, deadline_s=60, what="the new weights")
            after = greedy_tokens(seed, PROMPTS[:5])
            assert before != after
            with start("second") as second:
                second.wait_ready()
                assert after == greedy_tokens(second, PROMPTS[:5])


def test_required_without_a_source_is_an_error(
    tiny_folder: TinyFolder, planner: PlannerProcess, tmp_path: Path
) -> None:
    """With RFORK_FAIL_IF_NOT_FORKED a server without a source does not start, although it has weights."""
    with SglangServer(
        tiny_folder(),
        log=tmp_path / "server.log",
        arguments=planner_flags(planner, "--rfork-fail-if-not-forked", "--rfork-no-source-timeout-s", "0"),
    ) as server:
        assert 0 != server.wait()
        assert server.lines_with("cannot start the server: no weights")


def test_wrong_flags_end_the_launch(tiny_folder: TinyFolder, planner: PlannerProcess, tmp_path: Path) -> None:
    """The error is one line, before any process is started, with exit code 2."""
    for name, more, message in (
        ("value", ("--rfork-deadline-s", "soon"), "sglang: error: --rfork-deadline-s: "),
        ("format", ("--load-format", "dummy"), "sglang: error: --rfork-* requires --load-format rfork"),
        ("mode", ("--cpu-offload-gb", "1"), "sglang: error: --cpu-offload-gb cannot be used with"),
    ):
        with SglangServer(
            tiny_folder(), log=tmp_path / f"{name}.log", arguments=planner_flags(planner, *more)
        ) as server:
            assert 2 == server.wait()
            assert server.lines_with(message)


def update(server: SglangServer, folder: Path) -> bool:
    """Update the weights from a folder; returns whether it succeeded."""
    response = httpx.post(f"{server.url}/update_weights_from_disk", json={"model_path": str(folder)}, timeout=120)
    return bool(response.json()["success"])


def _verified(report: InstanceReport) -> int:
    return sum(end - begin for begin, end in report.verified)
