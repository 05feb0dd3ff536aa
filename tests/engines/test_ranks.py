"""Servers of several ranks: each rank forks, and after an update in place a fork gets all ranks of that update."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import httpx
import pytest

from rfork.schema import InstanceReport
from rfork.storage.versions.version import version_of
from tests.engines.conftest import TinyFolder
from tests.engines.engine_server import READY_S, ROOT, EngineServer, wait_until
from tests.engines.model_folders import copy_without_weights
from tests.engines.planner_process import PlannerProcess
from tests.engines.queries import PROMPTS, greedy_tokens, serving_instances
from tests.engines.servers import SglangServer, VllmServer
from tests.engines.vllm_extension import WorkerExtension

EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
UPDATE_TIMEOUT_S = 240.0
FIVE = PROMPTS[:5]

Position = tuple[int, int]
"""Pipeline and tensor rank."""


class RankedEngine(Protocol):
    """An engine whose servers have several ranks."""

    ranks: Sequence[Position]

    def server(self, folder: Path, log: Path, planner: str) -> EngineServer:
        """Return a server of all ranks."""
        ...

    def update(self, server: EngineServer, folder: Path) -> None:
        """Update its weights in place to those of a folder; the version of that folder is not known."""
        ...

    def fail_update(self, server: EngineServer, folder: Path) -> bool:
        """Begin such an update that fails on one rank only; False if the engine has no such update."""
        ...


class VllmRanks:
    """vLLM with tensor and pipeline ranks on a CPU.

    vLLM allocates what one stage receives from another only when it compiles, so the servers are not eager: they
    compile with the backend that generates no code.
    """

    def __init__(self, *, tp: int, pp: int) -> None:
        self.ranks = [(stage, rank) for stage in range(pp) for rank in range(tp)]
        self._arguments = (
            *("--load-format", "rfork", "--worker-extension-cls", EXTENSION),
            *("--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp)),
            *("--no-enforce-eager", "--compilation-config", '{"backend": "eager"}'),
        )

    def server(self, folder: Path, log: Path, planner: str) -> EngineServer:
        """See RankedEngine."""
        environment = {"RFORK_PLANNER": planner, "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1"}
        return VllmServer(folder, log=log, arguments=self._arguments, environment=environment)

    def update(self, server: EngineServer, folder: Path) -> None:
        """See RankedEngine."""
        assert 200 == self._call(server, "load_tensors", folder=str(folder))

    def fail_update(self, server: EngineServer, folder: Path) -> bool:
        """See RankedEngine."""
        last = str(len(self.ranks) - 1)
        assert 200 != self._call(server, "load_tensors", folder=str(folder), failing_rank=last)
        return True

    def _call(self, server: EngineServer, method: str, **named: str) -> int:
        body = {"method": method, "kwargs": named}
        return httpx.post(f"{server.url}/collective_rpc", json=body, timeout=UPDATE_TIMEOUT_S).status_code


class SglangRanks:
    """SGLang with two tensor ranks on a CPU, which talk through gloo, each on one core."""

    ranks = ((0, 0), (0, 1))

    def server(self, folder: Path, log: Path, planner: str) -> EngineServer:
        """See RankedEngine."""
        arguments = ("--rfork-planner", planner, "--tp", "2")
        return SglangServer(folder, log=log, arguments=arguments, environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})

    def update(self, server: EngineServer, folder: Path) -> None:
        """See RankedEngine."""
        body = {"model_path": str(folder)}
        response = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=UPDATE_TIMEOUT_S)
        assert response.json()["success"], response.text

    def fail_update(self, server: EngineServer, folder: Path) -> bool:
        """See RankedEngine."""
        return False


def served(planner: PlannerProcess) -> dict[Position, InstanceReport]:
    """Return the seeds that the planner knows, by their rank. Only one server must be running."""
    return {(report.rank.pp, report.rank.tp): report for report in serving_instances(planner)}


def wait_all_ranks(planner: PlannerProcess, engine: RankedEngine, versions: set[str | None]) -> None:
    """Wait until the seeds are all ranks of one server, and serve these versions."""
    wait_until(
        lambda: (
            sorted(served(planner)) == sorted(engine.ranks)
            and {report.version for report in served(planner).values()} == versions
        ),
        deadline_s=UPDATE_TIMEOUT_S,
        what=f"all ranks of {versions}",
    )


def of_unknown_version(folder: Path, parent: Path) -> Path:
    """Return a copy of a model whose files cannot be fingerprinted, but are loaded by the engines."""
    copy = Path(shutil.copytree(folder, parent / "unknown" / folder.name))
    (copy / "missing.gguf").symlink_to(copy / "nothing")
    return copy


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(SglangRanks(), id="sglang-tp2"),
        pytest.param(VllmRanks(tp=2, pp=1), id="vllm-tp2"),
        pytest.param(VllmRanks(tp=2, pp=2), id="vllm-tp2-pp2"),
    ],
)
def test_all_ranks_are_forked_from_one_update(
    engine: RankedEngine, tiny_folder: TinyFolder, planner: PlannerProcess, tmp_path: Path
) -> None:
    """Servers without weights fork every rank, before and after an update in place, with the seed's tokens.

    The update has one id on all ranks; one that failed on a rank is served by none. A server of the original files
    loads them.
    """
    original, count = tiny_folder(seed=1), len(engine.ranks)
    changed = of_unknown_version(tiny_folder(seed=2), tmp_path)
    bare = copy_without_weights(original, tmp_path)

    def server(folder: Path, name: str) -> EngineServer:
        return engine.server(folder, tmp_path / f"{name}.log", planner.url)

    with server(original, "seed") as seed:
        seed.wait_ready(2 * READY_S)
        wait_all_ranks(planner, engine, {version_of(original)})
        old = greedy_tokens(seed, FIVE)
        before = served(planner)
        with server(bare, "before") as fork:
            fork.wait_ready(2 * READY_S)
            assert count == len(fork.lines_with("fork done report=forked"))
            assert old == greedy_tokens(fork, FIVE)
        wait_all_ranks(planner, engine, {version_of(original)})

        number = 1
        if engine.fail_update(seed, changed):
            number += 1
            assert {} == served(planner)
        engine.update(seed, changed)
        replica = before[0, 0].replica
        wait_all_ranks(planner, engine, {f"update:{replica}:{number}"})
        after = served(planner)
        for position in engine.ranks:
            assert before[position].weights_id != after[position].weights_id
        new = greedy_tokens(seed, FIVE)
        assert old != new

        with server(bare, "after") as fork:
            fork.wait_ready(2 * READY_S)
            assert count == len(fork.lines_with("fork done report=forked"))
            assert new == greedy_tokens(fork, FIVE)
            ids = {report.weights_id for report in serving_instances(planner)}
            assert {report.weights_id for report in after.values()} == ids
        with server(original, "original") as loaded:
            loaded.wait_ready(2 * READY_S)
            assert count == len(loaded.lines_with("fork done report=loaded"))
            assert old == greedy_tokens(loaded, FIVE)
