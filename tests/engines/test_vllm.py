"""Forks between real, stock vLLM servers: the behaviour that `--load-format rfork` promises."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

import rfork
from rfork.image.layout import tag_tensors
from rfork.schema import InstanceReport
from rfork.storage.versions.version import version_of
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
    serving_instances,
    wait_serving,
    weights_ids,
)
from tests.engines.servers import VllmServer
from tests.ports import free_port

FORMAT = ("--load-format", "rfork")


def server(folder: Path, log: Path, planner: str, *arguments: str | Path, **environment: str) -> VllmServer:
    """Return a vLLM server with a user's options: the load format and the planner."""
    return VllmServer(
        folder,
        log=log,
        arguments=(*FORMAT, *map(str, arguments)),
        environment={"RFORK_PLANNER": planner, **environment},
    )


def in_mid_fork(planner: PlannerProcess) -> bool:
    """Return whether an instance has some, but not all chunks of its image."""
    known = [(sum(end - begin for begin, end in _spans(report)), report) for report in instances(planner)]
    return any(0 < verified < report.chunk_count for verified, report in known)


def _spans(report: InstanceReport) -> list[tuple[int, int]]:
    return [(int(begin), int(end)) for begin, end in report.verified]


@pytest.mark.timeout(1500)
def test_one_flag_forks(model_folder: Path, weightless_folder: Path, planner: PlannerProcess, tmp_path: Path) -> None:
    """Two servers without weights fork concurrently from a busy one, and generate the same tokens.

    The seed loaded the checkpoint with vLLM's loader. A server that receives SIGTERM leaves the planner
    immediately.
    """
    with server(model_folder, tmp_path / "seed.log", planner.url) as seed:
        seed.wait_ready()
        wait_serving(planner, 1)
        expected = greedy_tokens(seed)
        with LoadGenerator(seed, max_tokens=8) as load:
            load.wait_for(20)
            began = time.monotonic()
            forks = [server(weightless_folder, tmp_path / f"fork-{name}.log", planner.url) for name in "ab"]
            with forks[0], forks[1]:
                for fork in forks:
                    fork.wait_ready(2 * READY_S)
                ended = time.monotonic()
                load.stop()
                for fork in forks:
                    assert expected == greedy_tokens(fork)
                    assert fork.wait_for_line(r"fork done report=forked 0\.\d+ GB .*").group()
                wait_serving(planner, 3)
                assert 1 == len(weights_ids(planner))
                forks[1].stop()
                assert 2 == len(instances(planner))
                assert forks[1].lines_with("seeds drained seeds=1 in_use=0")
        print(f"seed idle:  {load.summary(until_s=began)}")
        print(f"two starts: {load.summary(began, ended)}")
        assert [] == load.failures


def test_a_seed_dies_in_mid_fork(tiny_folder: TinyFolder, planner: PlannerProcess, tmp_path: Path) -> None:
    """Its forks are unready until then; one loads its files, one without weights ends with a clear error."""
    folder = tiny_folder()
    bare = copy_without_weights(folder, tmp_path)
    rate = {"RFORK_MAX_EGRESS_BYTES_PER_S": str(MIB)}
    with server(folder, tmp_path / "seed.log", planner.url, **SLOW_FORK_ENVIRONMENT, **rate) as seed:
        seed.wait_ready()
        expected = greedy_tokens(seed, PROMPTS[:5])
        with (
            server(folder, tmp_path / "fork.log", planner.url, **SLOW_FORK_ENVIRONMENT, **rate) as fork,
            server(bare, tmp_path / "bare.log", planner.url, **SLOW_FORK_ENVIRONMENT, **rate) as weightless,
        ):
            for target in (fork, weightless):
                target.wait_for_line(r"plan received fork=", deadline_s=2 * READY_S)
            wait_until(lambda: in_mid_fork(planner), deadline_s=60, what="a partly verified fork")
            assert [False, False] == [target.healthy() for target in (fork, weightless)]
            seed.kill()
            fork.wait_ready()
            assert expected == greedy_tokens(fork, PROMPTS[:5])
            assert fork.lines_with("fork done report=loaded")
            wait_serving(planner, 1)
            if weightless.wait(2 * READY_S):
                assert weightless.lines_with("there are no weights in")
            else:  # the other one loaded in time and served the rest
                assert expected == greedy_tokens(weightless, PROMPTS[:5])


def test_the_current_weights_are_forked(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """A server without a planner loads its files and becomes a seed later; forks have its weights at that
    time.
    """
    first, second = tiny_folder(seed=1), tiny_folder(seed=2)
    bare = copy_without_weights(first, tmp_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server(first, tmp_path / "seed.log", url, VLLM_SERVER_DEV_MODE="1") as seed:
        seed.wait_ready()
        old = greedy_tokens(seed, PROMPTS[:5])
        with PlannerProcess(port=port) as planner:
            wait_serving(planner, 1)
            with server(bare, tmp_path / "before.log", url) as before:
                before.wait_ready()
                assert old == greedy_tokens(before, PROMPTS[:5])
                assert before.lines_with("fork done report=forked")
            (old_weights_id,) = weights_ids(planner)
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(second)}}
            httpx.post(f"{seed.url}/collective_rpc", json=body, timeout=60).raise_for_status()
            new = greedy_tokens(seed, PROMPTS[:5])
            assert old != new
            wait_until(
                lambda: old_weights_id not in weights_ids(planner) and len(serving_instances(planner)) == 1,
                deadline_s=60,
                what="a seed of the new weights",
            )
            with server(bare, tmp_path / "after.log", url) as after:
                after.wait_ready()
                assert after.lines_with("fork done report=forked")
                assert new == greedy_tokens(after, PROMPTS[:5])


def test_a_server_with_lora_serves_its_base_weights(
    tiny_folder: TinyFolder, planner: PlannerProcess, tmp_path: Path
) -> None:
    """vLLM wraps the layers to serve adapters; after an update in place their new weights are forked."""
    first, second = tiny_folder(seed=1), tiny_folder(seed=2)
    bare = copy_without_weights(first, tmp_path)
    lora = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8")
    with server(first, tmp_path / "seed.log", planner.url, *lora, VLLM_SERVER_DEV_MODE="1") as seed:
        seed.wait_ready()
        wait_serving(planner, 1)
        (old_weights_id,) = weights_ids(planner)
        old = greedy_tokens(seed, PROMPTS[:5])
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(second)}}
        httpx.post(f"{seed.url}/collective_rpc", json=body, timeout=60).raise_for_status()
        new = greedy_tokens(seed, PROMPTS[:5])
        assert old != new
        wait_until(
            lambda: old_weights_id not in weights_ids(planner) and len(serving_instances(planner)) == 1,
            deadline_s=60,
            what="a seed of the new weights",
        )
        with server(bare, tmp_path / "fork.log", planner.url) as fork:
            fork.wait_ready()
            assert fork.lines_with("fork done report=forked")
            assert new == greedy_tokens(fork, PROMPTS[:5])


def test_required_without_a_source_is_an_error(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """With RFORK_FAIL_IF_NOT_FORKED a server without a source does not start, although it has weights."""
    url = f"http://127.0.0.1:{free_port()}"
    with server(tiny_folder(), tmp_path / "server.log", url, RFORK_FAIL_IF_NOT_FORKED="1") as alone:
        assert 0 != alone.wait()
        assert alone.lines_with("no source or fallback worked: PlannerUnreachable")


def test_wrong_options_are_one_clear_error(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """An unknown key of --model-loader-extra-config is named before engines start."""
    extra = ("--model-loader-extra-config", json.dumps({"planer": "http://127.0.0.1:8700"}))
    with VllmServer(tiny_folder(), log=tmp_path / "server.log", arguments=(*FORMAT, *extra)) as wrong:
        assert 0 != wrong.wait()
        assert wrong.lines_with("unknown rfork setting 'planer'")
        assert [] == wrong.lines_with("EngineCore pid=")


def test_another_engine_s_image_is_refused(tiny_folder: TinyFolder, planner: PlannerProcess, tmp_path: Path) -> None:
    """Weights of SGLang are not used for vLLM, whatever their name: the server logs the reason and loads."""
    folder = tiny_folder()
    other = nn.Module()
    vars(other)["rfork"] = {"is": tag_tensors(["engine sglang 0.5.23", "device cpu", "dtype float32"])}
    other.weight = nn.Parameter(torch.zeros(1024), requires_grad=False)
    with (
        rfork.seed(other, model=folder.name, version=version_of(folder), planner=planner.url),
        server(folder, tmp_path / "server.log", planner.url) as refusing,
    ):
        wait_serving(planner, 1)
        refusing.wait_ready()
        assert refusing.lines_with("engine: here vllm 0.32.0; there sglang 0.5.23")
        assert refusing.lines_with("fork done report=loaded")
        wait_serving(planner, 2)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ranks_and_speculative_models_fork_separately(
    tiny_folder: TinyFolder, planner: PlannerProcess, tmp_path: Path
) -> None:
    """With two tensor ranks and a speculative draft model, four images are forked independently."""
    main, draft = tiny_folder("llama"), tiny_folder("qwen3")

    def arguments(draft_folder: Path) -> tuple[str, ...]:
        speculative = {
            "method": "draft_model", "model": str(draft_folder), "num_speculative_tokens": 2,
            "draft_tensor_parallel_size": 2,
        }  # fmt: skip
        extra = json.dumps({"planner": planner.url})
        return (
            *("--tensor-parallel-size", "2", "--model-loader-extra-config", extra),
            *("--speculative-config", json.dumps(speculative)),
        )

    bare = [copy_without_weights(folder, tmp_path) for folder in (main, draft)]
    with server(main, tmp_path / "seed.log", "", *arguments(draft)) as seed:
        seed.wait_ready(2 * READY_S)
        wait_serving(planner, 4)
        expected = greedy_tokens(seed, PROMPTS[:5])
        with server(bare[0], tmp_path / "fork.log", "", *arguments(bare[1])) as fork:
            fork.wait_ready(2 * READY_S)
            assert expected == greedy_tokens(fork, PROMPTS[:5])
            assert 4 == len(fork.lines_with("fork done report=forked"))
            wait_serving(planner, 8)
            ranks = {(report.rank.role, report.rank.tp) for report in instances(planner)}
            assert {("main", 0), ("main", 1), ("speculative", 0), ("speculative", 1)} == ranks


def test_sigterm_to_the_api_server_ends_the_seed(
    tiny_folder: TinyFolder, planner: PlannerProcess, tmp_path: Path
) -> None:
    """SIGTERM to the API server alone ends all processes, and the planner has no instance of it immediately."""
    with server(tiny_folder(), tmp_path / "server.log", planner.url) as seed:
        seed.wait_ready()
        wait_serving(planner, 1)
        os.kill(seed.pid, signal.SIGTERM)
        seed.wait(60)
        assert [] == instances(planner)
        assert seed.lines_with("seeds drained seeds=1 in_use=0")
