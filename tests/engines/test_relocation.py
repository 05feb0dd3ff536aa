"""Real engines record their loading without weights, and load from tensors instead of files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rfork.placement.boxes import divide, wanted_boxes
from rfork.placement.placement_map import PlacementMap
from tests.engines.engine_server import ROOT, engine_python
from tests.engines.relocation_checks import MODELS
from tests.engines.zoo import write
from tests.ports import free_port

VLLM = ("llama", "llama-tied", "llama-padded", "qwen2", "mixtral")
"""Dense with its own and with a tied head, a vocabulary to pad, biases of q, k and v, and experts."""
COMPUTING = "mamba"
"""Model whose loader computes with a checkpoint tensor."""
EXPERT_PARALLEL = "mixtral-ep"
"""Model whose complete experts vLLM divides among ranks."""
ONLINE = "llama-online"
"""Model that vLLM quantises while it loads it."""
SGLANG = ("llama-tied", "llama-padded", "qwen2", "mixtral")
RANKS = 2
TIMEOUT_S = 400
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}

Results = Mapping[str, Mapping[str, Any]]
"""Results by model; see `tests.engines.relocation_checks`."""


def start(engine: str, *arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    """Start a probe in an engine's Python, with environment variables."""
    command = [str(engine_python(engine)), "-m", f"tests.engines.{engine}_relocation_probe", *map(str, arguments)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def results_of(probes: Sequence[subprocess.Popen[str]]) -> list[Results]:
    """Return the results of probes that run concurrently."""
    results: list[Results] = []
    try:
        for probe in probes:
            output, errors = probe.communicate(timeout=TIMEOUT_S)
            found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line[:7] == "RESULT "]
            assert found, errors
            results.append({Path(each["folder"]).name: each for each in found})
    finally:
        for probe in probes:
            probe.kill()
            probe.wait()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all models."""
    made = tmp_path_factory.mktemp("models")
    for name in (*VLLM, COMPUTING, EXPERT_PARALLEL, ONLINE):
        write(made, name, MODELS)
    return made


@pytest.fixture(scope="module")
def vllm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of vLLM without tensor parallelism."""
    rendezvous = tmp_path_factory.mktemp("one") / "rendezvous-1"
    return results_of([start("vllm", rendezvous, "0", "1", *(folder / name for name in (*VLLM, COMPUTING, ONLINE)))])[0]


@pytest.fixture(scope="module")
def vllm_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Results of each of vLLM's tensor-parallel ranks."""
    rendezvous = tmp_path_factory.mktemp("two") / "rendezvous-2"
    folders = [folder / name for name in (*VLLM, EXPERT_PARALLEL)]
    return results_of([start("vllm", rendezvous, str(rank), str(RANKS), *folders) for rank in range(RANKS)])


@pytest.fixture(scope="module")
def sglang(folder: Path) -> Results:
    """Results of SGLang, one process per model."""
    return {name: results_of([start("sglang", folder / name)])[0][name] for name in SGLANG}


@pytest.fixture(scope="module")
def sglang_ranks(folder: Path) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Results of each of SGLang's tensor-parallel ranks, by model."""
    found = {}
    for name in SGLANG:
        port = free_port()
        cores = "|".join(map(str, range(RANKS)))
        probes = [
            start("sglang", folder / name, str(rank), str(RANKS), str(port), SGLANG_CPU_OMP_THREADS_BIND=cores)
            for rank in range(RANKS)
        ]
        found[name] = [each[name] for each in results_of(probes)]
    return found


def map_of(result: Mapping[str, Any]) -> PlacementMap:
    """Return the recorded map."""
    return PlacementMap.from_bytes(bytes.fromhex(result["map"]))


def require_relocatable(result: Mapping[str, Any]) -> None:
    """Check a result that does not depend on the engine."""
    assert "error" not in result, result["error"]
    assert result["checkpoint"]
    assert [] == result["changed"]
    assert result["repeatable"]
    assert [] == result["wrong_rows"]
    assert result["tensors"]
    assert [] == result["differences"]
    assert [] == result["filled_later"]


def require_complete(*maps: PlacementMap) -> None:
    """Check that ranks read every checkpoint tensor, all of its elements, and compute nothing."""
    assert {name for each in maps for name in each.checkpoint.names} == {
        row.checkpoint for each in maps for row in each if row.checkpoint
    }
    assert [{}] * len(maps) == [each.computed for each in maps]


@pytest.mark.parametrize("name", VLLM)
def test_vllm_loads_from_boxes(vllm: Results, name: str) -> None:
    """The boxes of the map determine all tensors that vLLM's own loading leaves, and recording leaves no trace."""
    require_relocatable(vllm[name])
    require_complete(map_of(vllm[name]))


def test_vllm_computes_with_complete_tensors(vllm: Results) -> None:
    """A tensor that flows into computed values is requested completely, so that the result is the same."""
    require_relocatable(vllm[COMPUTING])
    recorded = map_of(vllm[COMPUTING])
    assert {"backbone.layers.0.mixer.A", "backbone.layers.1.mixer.A"} == set(recorded.computed)
    assert all(box.is_complete for box in wanted_boxes(recorded) if box.tensor.endswith("A_log"))


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", VLLM)
def test_vllms_ranks_load_from_boxes(vllm_ranks: list[Results], name: str, rank: int) -> None:
    """The same holds for each tensor-parallel rank."""
    require_relocatable(vllm_ranks[rank][name])


@pytest.mark.parametrize("name", VLLM)
def test_vllms_ranks_have_all_that_one_rank_needs(vllm: Results, vllm_ranks: list[Results], name: str) -> None:
    """The maps of two ranks cover the map of one, and the reverse."""
    one, ranks = map_of(vllm[name]), [map_of(results[name]) for results in vllm_ranks]
    require_complete(*ranks)
    assert () == divide(wanted_boxes(one), ranks).missing
    assert [(), ()] == [divide(wanted_boxes(each), [one]).missing for each in ranks]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-padded", "qwen2"])
def test_vllms_dense_layers_keep_what_was_loaded(vllm: Results, name: str) -> None:
    """All tensors with elements of the checkpoint are served."""
    assert "" == vllm[name]["others"]
    assert {row.own for row in map_of(vllm[name])} == set(vllm[name]["live"])


def test_vllms_experts_on_a_cpu_are_left_out(vllm: Results) -> None:
    """They are packed after loading; the reason names the method. Other layers are served."""
    assert "UnquantizedFusedMoEMethod" in vllm["mixtral"]["others"]
    served = set(vllm["mixtral"]["live"])
    left_out = {row.own for row in map_of(vllm["mixtral"])} - served
    assert served
    assert {"w13_weight", "w2_weight"} == {name.rpartition(".")[2] for name in left_out}


@pytest.mark.parametrize("name", SGLANG)
def test_sglang_loads_from_boxes(sglang: Results, name: str) -> None:
    """The same holds for SGLang."""
    require_relocatable(sglang[name])
    require_complete(map_of(sglang[name]))


@pytest.mark.parametrize("name", SGLANG)
def test_sglangs_layers_keep_what_was_loaded(sglang: Results, name: str) -> None:
    """Without AMX kernels all tensors with elements of the checkpoint are served, experts too."""
    assert "" == sglang[name]["others"]
    assert {row.own for row in map_of(sglang[name]) if row.checkpoint} == set(sglang[name]["live"])


@pytest.mark.parametrize("name", SGLANG)
def test_each_engine_has_all_that_the_other_one_needs(vllm_ranks: list[Results], sglang: Results, name: str) -> None:
    """The maps of two engines with different layouts cover each other."""
    ranks, other = [map_of(results[name]) for results in vllm_ranks], map_of(sglang[name])
    assert () == divide(wanted_boxes(other), ranks).missing
    assert [(), ()] == [divide(wanted_boxes(each), [other]).missing for each in ranks]


@pytest.mark.parametrize("rank", range(RANKS))
def test_expert_parallel_ranks_load_from_boxes(vllm_ranks: list[Results], rank: int) -> None:
    """A rank with some experts of the model loads from the boxes of its map."""
    require_relocatable(vllm_ranks[rank][EXPERT_PARALLEL])


@pytest.mark.parametrize("rank", range(RANKS))
def test_expert_parallel_ranks_need_their_own_experts(vllm_ranks: list[Results], rank: int) -> None:
    """A rank reads its half of the experts, each of them completely, and none of the others."""
    boxes = [box for box in wanted_boxes(map_of(vllm_ranks[rank][EXPERT_PARALLEL])) if ".experts." in box.tensor]
    assert {2 * rank, 2 * rank + 1} == {int(box.tensor.split(".experts.")[1].split(".")[0]) for box in boxes}
    assert all(box.is_complete for box in boxes)


def test_expert_parallel_ranks_have_all_that_one_rank_needs(vllm: Results, vllm_ranks: list[Results]) -> None:
    """The maps of expert-parallel ranks and of one rank without parallelism cover each other."""
    one, ranks = map_of(vllm["mixtral"]), [map_of(results[EXPERT_PARALLEL]) for results in vllm_ranks]
    assert () == divide(wanted_boxes(one), ranks).missing
    assert [(), ()] == [divide(wanted_boxes(each), [one]).missing for each in ranks]


def test_a_model_that_vllm_quantises_online_is_refused(vllm: Results) -> None:
    """Its loader computes while it loads; the reason is named, and the engine reads its files."""
    assert "vLLM quantises it while it loads" in vllm[ONLINE]["error"]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", SGLANG)
def test_sglangs_ranks_load_from_boxes(
    sglang_ranks: Mapping[str, Sequence[Mapping[str, Any]]], name: str, rank: int
) -> None:
    """Each tensor-parallel rank of SGLang loads from the boxes of its map."""
    require_relocatable(sglang_ranks[name][rank])


@pytest.mark.parametrize("name", SGLANG)
def test_sglangs_ranks_and_vllm_cover_each_other(
    vllm: Results, sglang_ranks: Mapping[str, Sequence[Mapping[str, Any]]], name: str
) -> None:
    """Two ranks of SGLang have all that one rank of vLLM needs, and the reverse."""
    one, ranks = map_of(vllm[name]), [map_of(result) for result in sglang_ranks[name]]
    require_complete(*ranks)
    assert () == divide(wanted_boxes(one), ranks).missing
    assert [(), ()] == [divide(wanted_boxes(each), [one]).missing for each in ranks]
