"""Servers without files get their weights from servers with other layouts, and are what they would have loaded."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from rfork.receiver.fallback import OTHER_LAYOUTS
from tests.engines.engine_server import READY_S, ROOT, EngineServer, wait_until
from tests.engines.model_folders import copy_without_weights, make_tiny
from tests.engines.planner_process import PlannerProcess
from tests.engines.queries import greedy_tokens, serving_instances
from tests.engines.servers import SglangServer, VllmServer
from tests.processes import RforkProcess

BOXES = "#boxes"
"""End of the model name of box images."""
RELATED_S = 120.0
Kind = Literal["tied", "untied", "padded", "experts"]


def settings_of(planner: str, model: str) -> dict[str, str]:
    """Return the environment of an instance that reads from and serves other layouts."""
    return {
        "RFORK_PLANNER": planner,
        "RFORK_MODEL": model,
        "RFORK_CROSS_LAYOUT": "1",
        "RFORK_NO_SOURCE_TIMEOUT_S": "1",
        "PYTHONPATH": str(ROOT),
    }


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """Layout of a server."""

    engine: Literal["vllm", "sglang"] = "vllm"
    tp: int = 1
    pp: int = 1
    ep: bool = False
    """True if the ranks of `tp` divide the experts among them, instead of dividing each expert. vLLM 0.32 loads such a
    layout on CPUs, but its workers crash in the first forward pass, with weights from files as well.
    """

    @property
    def ranks(self) -> int:
        """Number of its ranks."""
        return self.tp * self.pp

    def __str__(self) -> str:
        """Name for test ids."""
        return f"{self.engine}-tp{self.tp}" + (f"-pp{self.pp}" if self.pp > 1 else "") + ("-ep" if self.ep else "")

    def server(self, folder: Path, log: Path, planner: str, model: str) -> EngineServer:
        """Return a server of all ranks, which reads from and serves other layouts."""
        environment = settings_of(planner, model)
        if self.engine == "sglang":
            bound = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if self.tp > 1 else {}
            arguments = ("--load-format", "rfork", "--tp", str(self.tp))
            return SglangServer(folder, log=log, arguments=arguments, environment=environment | bound, dtype="float32")
        sizes = ("--tensor-parallel-size", str(self.tp), "--pipeline-parallel-size", str(self.pp))
        # What one pipeline stage receives from another is only allocated when vLLM compiles.
        compiled = ("--no-enforce-eager", "--compilation-config", '{"backend": "eager"}') if self.pp > 1 else ()
        expert_parallel = ("--enable-expert-parallel",) if self.ep else ()
        arguments = ("--load-format", "rfork", *sizes, *compiled, *expert_parallel)
        return VllmServer(folder, log=log, arguments=arguments, environment=environment, dtype="float32")


OPTIONS: Mapping[Kind, Mapping[str, object]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "padded": {"tie_word_embeddings": False, "vocab_size": 515},
    "experts": {
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}
"""Configuration of each kind of model."""


def write_model(folder: Path, tokenizer: Path, kind: Kind) -> Path:
    """Write a random float32 model of one kind into `folder`."""
    make_tiny(folder, tokenizer, "qwen3_moe" if kind == "experts" else "llama", seed=3, **OPTIONS[kind])
    return folder


def weights_of(
    planner: PlannerProcess, model: str, layout: ServerLayout, others: Collection[str] = ()
) -> dict[tuple[int, int], str | None]:
    """Return the id of the weights of each rank of the layout that serves the model, except instances of `others`."""
    return {
        (report.rank.pp, report.rank.tp): report.weights_id
        for report in serving_instances(planner)
        if report.model == model
        and (report.rank.tp_size, report.rank.pp_size) == (layout.tp, layout.pp)
        and report.instance_id not in others
    }


V1, V2, V_PP2, V_EP2 = ServerLayout(), ServerLayout(tp=2), ServerLayout(pp=2), ServerLayout(tp=2, ep=True)
S1, S2 = ServerLayout("sglang"), ServerLayout("sglang", tp=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "sources", "target"),
    [
        pytest.param("tied", [V1], V2, id="tied-vllm-tp1-to-tp2"),
        pytest.param("padded", [V2], V1, id="padded-vllm-tp2-to-tp1"),
        pytest.param("untied", [V1, V2], V_PP2, id="untied-vllm-tp1-and-tp2-to-pp2"),
        pytest.param("untied", [V1], S1, id="untied-vllm-to-sglang"),
        pytest.param("untied", [V1], S2, id="untied-vllm-to-sglang-tp2"),
        pytest.param("untied", [S2], V1, id="untied-sglang-tp2-to-vllm"),
        pytest.param("experts", [S1], V2, id="experts-sglang-to-vllm-tp2"),
        pytest.param("experts", [S1], V_EP2, id="experts-sglang-to-vllm-ep2"),
    ],
)
def test_weights_come_from_servers_with_other_layouts(
    kind: Kind,
    sources: Sequence[ServerLayout],
    target: ServerLayout,
    tiny_model: Path,
    planner: PlannerProcess,
    tmp_path: Path,
) -> None:
    """A server without files has, on every rank, the bytes that its engine loads from files, and the same tokens."""
    folder = write_model(tmp_path / "files" / "model", tiny_model, kind)
    bare = copy_without_weights(folder, tmp_path)
    with contextlib.ExitStack() as servers:
        started: list[EngineServer] = []
        for source in sources:
            server = source.server(folder, tmp_path / f"{source}.log", planner.url, "served")
            started.append(servers.enter_context(server))
            server.wait_ready(2 * READY_S)
            _wait_ranks(planner, "served", source)
        expected = greedy_tokens(started[0])
        others = {report.instance_id for report in serving_instances(planner)}
        with target.server(bare, tmp_path / "target.log", planner.url, "served") as fork:
            fork.wait_ready(2 * READY_S)
            assert target.ranks == len(fork.lines_with("weights loaded from other layouts"))
            assert target.ep or expected == greedy_tokens(fork)
            _wait_ranks(planner, "served", target, others)
            received = weights_of(planner, "served", target, others)
    with target.server(folder, tmp_path / "own.log", planner.url, "own") as own:
        own.wait_ready(2 * READY_S)
        _wait_ranks(planner, "own", target)
        assert weights_of(planner, "own", target) == received


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_repacked_experts_are_refused_by_name(tiny_model: Path, planner: PlannerProcess, tmp_path: Path) -> None:
    """vLLM packs experts for CPUs, so a server with another layout loads its own files; the log has the reason."""
    folder = write_model(tmp_path / "files" / "model", tiny_model, "experts")
    with V1.server(folder, tmp_path / "seed.log", planner.url, "served") as seed:
        seed.wait_ready(2 * READY_S)
        _wait_ranks(planner, "served", V1)
        with V2.server(folder, tmp_path / "target.log", planner.url, "served") as target:
            target.wait_ready(2 * READY_S)
            (refusal, *_) = target.lines_with("no source has model.layers.0.mlp.experts")
            assert "UnquantizedFusedMoEMethod/CPU" in refusal
            assert greedy_tokens(seed) == greedy_tokens(target)


@contextlib.contextmanager
def transformers_source(folder: Path, planner: str, model: str) -> Iterator[Mapping[str, str]]:
    """Serve a model of `fork_pretrained`; yields its line of JSON."""
    environment = {**os.environ, **settings_of(planner, model)}
    source = RforkProcess((str(folder),), environment, module="tests.engines.transformers_source")
    try:
        yield json.loads(source.wait_for(r'^.*"event": "ready".*$').group())
    finally:
        source.stop()
        print(source.transcript())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_transformers_serves_and_reads_the_layout_of_vllm(
    tiny_model: Path, planner: PlannerProcess, tmp_path: Path
) -> None:
    """vLLM without files has the bytes that it loads from files; and so has transformers, from that vLLM."""
    folder = write_model(tmp_path / "files" / "model", tiny_model, "untied")
    bare = copy_without_weights(folder, tmp_path)
    with (
        transformers_source(folder, planner.url, "served") as source,
        V1.server(bare, tmp_path / "target.log", planner.url, "served") as fork,
    ):
        others = {source["instance_id"]}
        fork.wait_ready(2 * READY_S)
        assert 1 == len(fork.lines_with("weights loaded from other layouts"))
        tokens = greedy_tokens(fork)
        _wait_ranks(planner, "served", V1, others)
        received = weights_of(planner, "served", V1, others)
    with V1.server(folder, tmp_path / "own.log", planner.url, "own") as own:
        own.wait_ready(2 * READY_S)
        assert tokens == greedy_tokens(own)
        _wait_ranks(planner, "own", V1)
        assert received == weights_of(planner, "own", V1)
        with transformers_source(bare, planner.url, "own") as target:
            assert OTHER_LAYOUTS == target["fallback"]
            assert source["sha256"] == target["sha256"]


def _wait_ranks(planner: PlannerProcess, model: str, layout: ServerLayout, others: Collection[str] = ()) -> None:
    def is_complete() -> bool:
        return len(weights_of(planner, model, layout, others)) == layout.ranks

    wait_until(is_complete, deadline_s=RELATED_S, what=f"all ranks of {layout}")
