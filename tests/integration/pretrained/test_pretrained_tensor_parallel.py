"""`fork_pretrained` with `tp`: ranks of transformers' tensor parallelism, in two processes with gloo on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

import rfork
from rfork.errors import SettingsError
from rfork.receiver.fallback import OTHER_LAYOUTS
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from tests.fork_server import PythonProcess
from tests.integration.pretrained.tensor_parallel_node import SIZE
from tests.integration.pretrained.test_pretrained_layouts import different_tensors, seed_of
from tests.integration.test_fork_pretrained import logits, report, without_weights

ROOT: Final = Path(__file__).parents[3]
SMALL: Final = {
    "vocab_size": 1003,
    "hidden_size": 64,
    "intermediate_size": 130,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The vocabulary is odd, so that its shards differ in size."""
LOADER: Final = "the engine's loader"
Result = Mapping[str, Any]


def write(folder: Path, *, tied: bool = False) -> Path:
    """Write a random model in bfloat16."""
    config = AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=tied)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with a head of its own."""
    return write(tmp_path_factory.mktemp("untied") / "llama")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model whose head is its embeddings."""
    return write(tmp_path_factory.mktemp("tied") / "llama", tied=True)


class Group:
    """Both ranks of one model, each in a process."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.results = [_result(cast(IO[str], process.stdout)) for process in processes]

    def end(self, rank: int) -> None:
        """Close the seed of a rank and end its process."""
        process = self._processes[rank]
        cast(IO[str], process.stdin).close()
        assert process.wait() == 0


def _result(output: IO[str]) -> Result:
    lines: list[str] = []
    for line in output:
        if line.startswith("RESULT "):
            return cast(Result, json.loads(line.removeprefix("RESULT ")))
        lines.append(line)
    raise AssertionError("".join(lines[-40:]))


@contextlib.contextmanager
def ranks(folder: Path, settings: InstanceSettings, tmp_path: Path, *, complete: Path | None = None) -> Iterator[Group]:
    """Both ranks of a model, serving. They are compared with what transformers loads from the `complete` folder."""
    store = tmp_path / f"group-{len(list(tmp_path.iterdir()))}"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(SIZE):
            paths = map(str, (folder, complete or folder, store))
            process = PythonProcess[str](
                [sys.executable, "-m", "tests.integration.pretrained.tensor_parallel_node", str(rank), *paths,
                 settings.model_dump_json()],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
                cwd=ROOT,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield Group(processes)


def assert_own_load(result: Result) -> None:
    """Assert that a rank is what transformers would have loaded."""
    assert [] == result["different"]
    assert result["placements"]
    assert result["logits"]


@pytest.mark.parametrize("which", ["folder", "tied"])
def test_ranks_are_read_from_a_complete_model(
    request: pytest.FixtureRequest, settings: InstanceSettings, tmp_path: Path, which: str
) -> None:
    """Ranks without weight files are what transformers loads for them."""
    complete: Path = request.getfixturevalue(which)
    model = rfork.fork_pretrained(complete, name="served", settings=settings)
    seed_of(model)
    bare = without_weights(complete, tmp_path / "llama")
    with ranks(bare, settings, tmp_path, complete=complete) as group:
        for result in group.results:
            assert OTHER_LAYOUTS == result["fallback"]
            assert_own_load(result)


def test_a_complete_model_is_read_from_ranks(folder: Path, settings: InstanceSettings, tmp_path: Path) -> None:
    """A model without weight files is what transformers loads."""
    with ranks(folder, settings, tmp_path) as group:
        assert [True] * SIZE == [result["serves_boxes"] for result in group.results]
        model = rfork.fork_pretrained(without_weights(folder, tmp_path / "llama"), name="served", settings=settings)
    assert OTHER_LAYOUTS == report(model).fallback
    expected = LlamaForCausalLM.from_pretrained(folder)
    assert [] == different_tensors(expected, model)
    assert torch.equal(logits(expected), logits(model))


def test_ranks_are_forked_from_the_same_ranks(folder: Path, settings: InstanceSettings, tmp_path: Path) -> None:
    """Ranks of one layout are forked without files, and not across layouts."""
    chosen = settings.model_copy(update={"cross_layout": False})
    bare = without_weights(folder, tmp_path / "llama")
    with ranks(folder, chosen, tmp_path), ranks(bare, chosen, tmp_path, complete=folder) as targets:
        for result in targets.results:
            assert "forked" == result["outcome"]
            assert_own_load(result)


def test_ranks_without_a_source_load_their_files(folder: Path, settings: InstanceSettings, tmp_path: Path) -> None:
    """transformers loads them."""
    with ranks(folder, settings, tmp_path) as group:
        for result in group.results:
            assert LOADER == result["fallback"]
            assert_own_load(result)


def test_one_rank_is_forked_while_the_other_loads(folder: Path, settings: InstanceSettings, tmp_path: Path) -> None:
    """Loading one rank does not wait for the others."""
    chosen = settings.model_copy(update={"cross_layout": False})
    with ranks(folder, chosen, tmp_path) as seeds:
        seeds.end(1)
        with ranks(folder, chosen, tmp_path) as targets:
            first, second = targets.results
    assert "forked" == first["outcome"]
    assert LOADER == second["fallback"]
    assert_own_load(first)
    assert_own_load(second)


def test_a_head_stored_twice_is_loaded_by_transformers(tied: Path, settings: InstanceSettings, tmp_path: Path) -> None:
    """transformers compares both on all ranks at once, so that no rank is forked or served."""
    stored = tmp_path / "llama"
    without_weights(tied, stored)
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    with ranks(stored, settings, tmp_path) as group:
        for result in group.results:
            assert result["outcome"] is None
            assert_own_load(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": "2"}, "tp must be a number of processes, not a str"),
        ({"tp": True}, "tp must be a number of processes, not a bool"),
        ({"tp": 0}, "tp must be at least 1, not 0"),
        ({"tp": 2, "device": "cpu"}, "device is derived from tp"),
        ({"tp": 2, "rank": Rank()}, "rank is derived from tp"),
        ({"tp": 2}, "tp=2 is impossible here"),
    ],
)
def test_invalid_arguments_are_rejected(folder: Path, arguments: Mapping[str, Any], message: str) -> None:
    """Also a number of processes that are not there."""
    with pytest.raises(SettingsError, match=message):
        rfork.fork_pretrained(folder, settings=InstanceSettings(), **arguments)
