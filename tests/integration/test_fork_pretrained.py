"""`fork_pretrained` through a real planner, over gRPC and http on loopback."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    ChineseCLIPConfig,
    ChineseCLIPModel,
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
)

import rfork
from rfork.errors import AllSourcesFailed, ModelError
from rfork.image.capture import capture
from rfork.image.memory import image_sha256
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings
from tests.conftest import StartRfork

PROMPT = torch.tensor([[1, 5, 9, 60, 2, 77]])


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """A planner without instances."""
    process = rfork_process("planner", "--port", "0", "--json")
    line = process.wait_for(r'^.*"event": ?"ready".*$').group()
    return cast(dict[str, str], json.loads(line))["url"]


@pytest.fixture
def settings(planner: str) -> InstanceSettings:
    """Settings with short timeouts."""
    return InstanceSettings(planner=planner, transports=("http",), no_source_timeout_s=0.2, drain_timeout_s=0)


@pytest.fixture(autouse=True)
def _seeds_closed() -> Iterator[None]:
    """Closes the seeds of all models that a test forked."""
    yield
    gc.collect()
    wait_until_closed()


def wait_until_closed() -> None:
    """Wait for the threads that close seeds of deleted models."""
    for thread in threading.enumerate():
        if thread.name == "rfork-close":
            thread.join()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model whose checkpoint is read as stored."""
    return save_random_model(tmp_path_factory.mktemp("models") / "llama", LlamaForCausalLM)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model whose checkpoint only transformers can read: it merges experts."""
    return save_random_model(tmp_path_factory.mktemp("models") / "mixtral", MixtralForCausalLM)


SMALL: dict[str, int] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_random_model(folder: Path, model_class: type[PreTrainedModel]) -> Path:
    """Write a random model of this class."""
    model_class._from_config(AutoConfig.for_model(folder.name, **SMALL)).save_pretrained(folder)
    return folder


def without_weights(folder: Path, target: Path) -> Path:
    """Copy a model's folder without its weights."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    return target


def model_checksum(model: torch.nn.Module) -> str:
    """Return the hash of everything that the model serves."""
    return image_sha256(capture(model))


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Return the model's output for the prompt."""
    with torch.inference_mode():
        return cast(torch.Tensor, model(PROMPT).logits)


def report(model: PreTrainedModel) -> rfork.ForkReport:
    """Return how the model got its weights."""
    found = rfork.fork_report(model)
    assert found is not None
    return found


@pytest.mark.parametrize("which", ["llama", "mixtral"])
def test_the_first_loads_and_the_second_forks(
    request: pytest.FixtureRequest, settings: InstanceSettings, tmp_path: Path, which: str
) -> None:
    """However the first was loaded, the second, without weight files, has the same weights and output."""
    folder: Path = request.getfixturevalue(which)
    expected = type(rfork.fork_pretrained(folder, settings=InstanceSettings())).from_pretrained(folder)
    first = rfork.fork_pretrained(folder, settings=settings)
    second = rfork.fork_pretrained(without_weights(folder, tmp_path / which), settings=settings)
    seed = report(first).seed
    assert seed is not None
    assert [seed.identity.instance_id] == [share.source_id for share in report(second).sources]
    assert model_checksum(expected) == model_checksum(first)
    assert model_checksum(expected) == model_checksum(second)
    assert torch.equal(logits(expected), logits(second))
    assert not second.training
    assert which == report(second).model


def test_the_loader_of_the_first(settings: InstanceSettings, llama: Path, mixtral: Path) -> None:
    """rfork reads files that are used as stored; those that only transformers can read are left to it."""
    models = [rfork.fork_pretrained(folder, settings=settings) for folder in (llama, mixtral)]
    assert [("forked", None), ("fallback", "the engine's loader")] == [
        (report(model).outcome, report(model).fallback) for model in models
    ]


@pytest.mark.parametrize("which", ["llama", "mixtral"])
def test_without_a_planner(request: pytest.FixtureRequest, which: str) -> None:
    """The weights are loaded, and the report states why."""
    folder: Path = request.getfixturevalue(which)
    model = rfork.fork_pretrained(folder)
    assert "fallback" == report(model).outcome
    assert report(model).reasons[0].startswith("NoSource: no planner is set")
    assert model_checksum(type(model).from_pretrained(folder)) == model_checksum(model)


@pytest.mark.parametrize("equal", [True, False], ids=["equal values", "other values"])
def test_a_tied_weight_that_is_stored_twice(tmp_path: Path, *, equal: bool) -> None:
    """The embeddings and the head have the same values as in transformers."""
    folder = tmp_path / "llama"
    config = AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True)
    LlamaForCausalLM._from_config(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    embeddings = stored["model.embed_tokens.weight"]
    save_file({**stored, "lm_head.weight": embeddings.clone() if equal else embeddings + 1}, file, {"format": "pt"})
    model, expected = rfork.fork_pretrained(folder), LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(expected.lm_head.weight, model.lm_head.weight)
    assert torch.equal(logits(expected), logits(model))


def test_a_weight_that_transformers_changes_after_reading(settings: InstanceSettings, tmp_path: Path) -> None:
    """It sets the row of the padding token to zero, and so only transformers can load the checkpoint."""
    part = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ChineseCLIPConfig(text_config={**part, "vocab_size": 128}, vision_config={**part, "image_size": 16})
    trained = ChineseCLIPModel(config)
    torch.nn.init.ones_(trained.text_model.embeddings.word_embeddings.weight)
    trained.save_pretrained(tmp_path / "clip")
    expected = ChineseCLIPModel.from_pretrained(tmp_path / "clip")
    first = rfork.fork_pretrained(tmp_path / "clip", settings=settings)
    second = rfork.fork_pretrained(without_weights(tmp_path / "clip", tmp_path / "bare" / "clip"), settings=settings)
    assert ["fallback", "forked"] == [report(first).outcome, report(second).outcome]
    assert model_checksum(expected) == model_checksum(first)
    assert model_checksum(expected) == model_checksum(second)


@pytest.mark.slow  # logic: tests/unit/receiver/test_planner_requests.py
def test_another_dtype_is_another_layout(settings: InstanceSettings, llama: Path, tmp_path: Path) -> None:
    """Models of different dtypes do not fork from each other, and those of one dtype do."""
    first = rfork.fork_pretrained(llama, dtype="bfloat16", settings=settings)
    bare = without_weights(llama, tmp_path / "llama")
    with pytest.raises(AllSourcesFailed, match="another layout"):
        rfork.fork_pretrained(bare, settings=settings)
    second = rfork.fork_pretrained(bare, dtype=torch.bfloat16, settings=settings)
    expected = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    assert model_checksum(expected) == model_checksum(first)
    assert model_checksum(expected) == model_checksum(second)


def test_nothing_to_load_from(settings: InstanceSettings, llama: Path, tmp_path: Path) -> None:
    """Without a source and without weights it fails with a clear error."""
    with pytest.raises(AllSourcesFailed, match="no instance has model llama"):
        rfork.fork_pretrained(without_weights(llama, tmp_path / "llama"), settings=settings)


def test_a_fork_that_is_required(settings: InstanceSettings, llama: Path) -> None:
    """The checkpoint exists, but is not loaded."""
    with pytest.raises(AllSourcesFailed):
        rfork.fork_pretrained(llama, settings=settings.model_copy(update={"fail_if_not_forked": True}))


def test_a_quantised_model_that_is_required(settings: InstanceSettings, llama: Path, tmp_path: Path) -> None:
    """It cannot be forked, and no other weights are loaded."""
    folder = without_weights(llama, tmp_path / "llama")
    config = folder / "config.json"
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantised}))
    with pytest.raises(ModelError, match="is quantised"):
        rfork.fork_pretrained(folder, settings=settings.model_copy(update={"fail_if_not_forked": True}))


def test_tensors_that_an_update_replaces_are_served(settings: InstanceSettings, llama: Path, tmp_path: Path) -> None:
    """`assign=True` puts other tensors into the model, so that the ones that were forked are no longer its weights."""
    first = rfork.fork_pretrained(llama, settings=settings)
    seed = report(first).seed
    assert seed is not None
    before = model_checksum(first)
    with seed.updating():
        replaced = {name: torch.full_like(tensor, 0.5) for name, tensor in first.state_dict().items()}
        first.load_state_dict(replaced, assign=True)
    assert seed.wait_report_acked(30)
    second = rfork.fork_pretrained(without_weights(llama, tmp_path / "llama"), settings=settings)
    assert [seed.identity.instance_id] == [share.source_id for share in report(second).sources]
    assert before != model_checksum(second)
    assert model_checksum(first) == model_checksum(second)


def test_the_seed_ends_with_the_model(settings: InstanceSettings, llama: Path) -> None:
    """A deleted model is no longer served: the planner no longer lists it."""
    model = rfork.fork_pretrained(llama, settings=settings)
    with PlannerClient(str(settings.planner)) as client:
        seed = report(model).seed
        assert seed is not None
        assert seed.wait_registered(30)
        assert 1 == len(client.instances(model="llama"))
        del model, seed
        gc.collect()
        wait_until_closed()
        assert [] == client.instances(model="llama")


def test_a_copy_is_no_fork(settings: InstanceSettings, llama: Path, tmp_path: Path) -> None:
    """A forked model can be copied and saved like any other; only the original is a seed."""
    model = rfork.fork_pretrained(llama, settings=settings)
    other = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    assert model_checksum(model) == model_checksum(other)
    assert model_checksum(model) == model_checksum(read)
    assert rfork.fork_report(other) is None
    assert rfork.fork_report(read) is None


@pytest.mark.slow  # logic: tests/unit/engines/test_load_or_fork.py
def test_pull_leaves_merged_weights_to_transformers(
    rfork_process: StartRfork, planner: str, mixtral: Path, tmp_path: Path
) -> None:
    """`rfork pull --checkpoint` of weights that are merged during reading: a folder works, a URI cannot."""
    bare = without_weights(mixtral, tmp_path / "bare")
    expected = model_checksum(MixtralForCausalLM.from_pretrained(mixtral))
    common = ("pull", str(bare), "--version", "v1", "--planner", planner, "--json", "--sha256")
    environment = {"RFORK_TRANSPORTS": "http", "RFORK_NO_SOURCE_TIMEOUT_S": "0.2", "RFORK_DRAIN_TIMEOUT_S": "0"}
    fails = rfork_process(*common, "--checkpoint", "s3://models/mixtral/", environment=environment)
    assert 7 == fails.wait()
    assert "while reading: pass a local folder" in fails.stdout
    works = rfork_process(*common, "--checkpoint", mixtral.as_uri(), environment=environment)
    assert 0 == works.wait()
    found = json.loads(works.stdout)
    assert expected == found["sha256"]
    assert "fallback" == found["outcome"]
    assert "the engine's loader" == found["fallback"]
