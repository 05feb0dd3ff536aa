"""`fork_pretrained` across layouts: it serves engines' layouts, and reads its weights from them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaForCausalLM, MixtralForCausalLM, PreTrainedModel

import rfork
from benchmarks.reshard.sharded_model import Shape, ShardedEngine
from rfork.engines.relocation import tensors_of
from rfork.errors import AllSourcesFailed, NoSource
from rfork.image.capture import capture
from rfork.image.memory import compute_manifest
from rfork.planner_client.client import PlannerClient
from rfork.receiver.box_fork import BoxFork
from rfork.receiver.fallback import OTHER_LAYOUTS
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.source import box_images
from rfork.source.box_images import BoxImages
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.storage.versions.version import version_of_files
from tests.integration.test_fork_pretrained import logits, report, without_weights

SMALL: Final = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Half of the embeddings is larger than the smallest tensor in virtual memory."""
MODEL: Final = "served"
RANKS: Final = (0, 1)
SOON_S: Final = 30.0


@dataclass(frozen=True)
class CheckpointShape(Shape):
    """Shapes of the tensors of a checkpoint."""

    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each checkpoint tensor, by name."""
        return dict(self.tensors)


@dataclass(frozen=True)
class Files:
    """Folder of a random model in bfloat16, and its checkpoint."""

    folder: Path
    version: str
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def write(cls, folder: Path, model_class: type[PreTrainedModel], *, tied: bool = False) -> Files:
        """Write a model."""
        config = AutoConfig.for_model(folder.name, **SMALL, tie_word_embeddings=tied)
        model = model_class._from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():  # those of norms are all equal
                parameter.normal_(std=0.1)
        model.save_pretrained(folder)
        version = version_of_files(folder)
        assert version is not None
        return cls(folder, version, load_file(folder / "model.safetensors"))

    def engine(self, rank: int) -> ShardedEngine:
        """Return the engine of one of two ranks."""
        shape = CheckpointShape(tensors={name: tuple(tensor.shape) for name, tensor in self.tensors.items()})
        return ShardedEngine(shape, rank, len(RANKS))

    def loaded(self, rank: int) -> torch.nn.Module:
        """Return one of two ranks, loaded from the files."""
        return self.engine(rank).load_from(lambda _: self.tensors.items())


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model with a head of its own."""
    return Files.write(tmp_path_factory.mktemp("untied") / "llama", LlamaForCausalLM)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model whose head is its embeddings."""
    return Files.write(tmp_path_factory.mktemp("tied") / "llama", LlamaForCausalLM, tied=True)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model whose experts transformers merges as it loads them."""
    return Files.write(tmp_path_factory.mktemp("converted") / "mixtral", MixtralForCausalLM)


def tp_rank(rank: int) -> Rank:
    """Return one of two tensor-parallel ranks."""
    return Rank(tp=rank, tp_size=len(RANKS))


@contextlib.contextmanager
def sharded_seeds(files: Files, settings: InstanceSettings) -> Iterator[None]:
    """Serve both ranks of a model to other layouts."""
    with contextlib.ExitStack() as seeds:
        for rank in RANKS:
            engine, module = files.engine(rank), files.loaded(rank)
            image = capture(module)
            identity = InstanceIdentity.of(MODEL, tp_rank(rank), None, version=files.version)
            seed = Seed(image, identity, settings, Connections.of(settings), manifest=compute_manifest(image))
            seeds.enter_context(seed)
            placement_map = engine.record(engine.checkpoint_tensors())
            tensors, _ = engine.live_tensors(module, placement_map)
            seed.boxes = BoxImages(seed, placement_map, tensors, settings, memory_bytes=1 << 30)
            assert seed.wait_registered(SOON_S)
        yield


def sharded_fork(files: Files, rank: int, settings: InstanceSettings, version: str | None = None) -> torch.nn.Module:
    """Return one of two ranks, filled from other layouts."""
    fork = BoxFork(MODEL, tp_rank(rank), version, settings, deadline=time.monotonic() + SOON_S)
    engine = files.engine(rank)
    fetched = fork.fetch(engine.record(fork.checkpoint))
    try:
        return fetched.load(engine.load_from, tensors_of)
    finally:
        fetched.release(0.0)


def different_tensors(expected: torch.nn.Module, found: torch.nn.Module) -> list[str]:
    """Return the names of parameters and buffers, also tied ones, that are not equal."""
    wanted, actual = tensors_of(expected), tensors_of(found)
    return sorted(
        name
        for name in wanted.keys() | actual.keys()
        if name not in wanted or name not in actual or not torch.equal(wanted[name], actual[name])
    )


def seed_of(model: PreTrainedModel) -> Seed:
    """Return the seed of a model, once the planner knows it."""
    seed = report(model).seed
    assert seed is not None
    assert seed.wait_registered(SOON_S)
    return seed


@pytest.mark.parametrize("which", ["untied", "tied"])
@pytest.mark.parametrize("source", ["loaded", "forked"])
def test_a_model_is_read_by_other_layouts(
    request: pytest.FixtureRequest, settings: InstanceSettings, which: str, source: str
) -> None:
    """Both ranks of another layout have the bytes that they would have loaded from files."""
    files: Files = request.getfixturevalue(which)
    model = rfork.fork_pretrained(files.folder, name=MODEL, settings=settings)
    seed_of(model)
    if source == "forked":
        first, model = model, rfork.fork_pretrained(files.folder, name=MODEL, settings=settings)
        assert "forked" == report(model).outcome
        seed_of(first).close()
        seed_of(model)
    forked = [sharded_fork(files, rank, settings) for rank in RANKS]
    assert [[], []] == [different_tensors(files.loaded(rank), forked[rank]) for rank in RANKS]


@pytest.mark.parametrize("which", ["untied", "tied"])
def test_a_model_is_read_from_other_layouts(
    request: pytest.FixtureRequest, settings: InstanceSettings, tmp_path: Path, which: str
) -> None:
    """A model without weight files is what `from_pretrained` loads from them."""
    files: Files = request.getfixturevalue(which)
    expected = LlamaForCausalLM.from_pretrained(files.folder)
    with sharded_seeds(files, settings):
        model = rfork.fork_pretrained(without_weights(files.folder, tmp_path / "llama"), name=MODEL, settings=settings)
    assert OTHER_LAYOUTS == report(model).fallback
    found = report(model).cross_layout
    assert found is not None
    assert found.needed_bytes == sum(part.bytes_read for part in found.parts)
    with PlannerClient.of(settings) as client:
        finish = client.fork(report(model).fork_id).finish
    assert finish is not None
    assert found == finish.cross_layout
    assert {} == finish.sources  # they are in the results of the forks of boxes
    assert files.version == seed_of(model).version
    assert [] == different_tensors(expected, model)
    assert torch.equal(logits(expected), logits(model))
    assert (which == "tied") == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert not model.training


def test_a_model_that_was_read_from_other_layouts_serves_all(
    untied: Files, settings: InstanceSettings, tmp_path: Path
) -> None:
    """It is a source of its own layout, and of others."""
    bare = without_weights(untied.folder, tmp_path / "llama")
    with sharded_seeds(untied, settings):
        first = rfork.fork_pretrained(bare, name=MODEL, settings=settings)
    seed_of(first)
    second = rfork.fork_pretrained(bare, name=MODEL, settings=settings)
    assert "forked" == report(second).outcome
    assert [] == different_tensors(first, second)
    assert [] == different_tensors(untied.loaded(1), sharded_fork(untied, 1, settings))


@pytest.mark.parametrize("is_required", [False, True])
def test_other_layouts_come_before_files(untied: Files, settings: InstanceSettings, is_required: bool) -> None:
    """Also if the fork is required."""
    chosen = settings.model_copy(update={"fail_if_not_forked": is_required})
    with sharded_seeds(untied, settings):
        model = rfork.fork_pretrained(untied.folder, name=MODEL, settings=chosen)
    assert OTHER_LAYOUTS == report(model).fallback


@pytest.mark.parametrize("cold_start", ["cooperative", "independent"])
def test_sources_that_fail_while_the_model_is_loaded(
    untied: Files, settings: InstanceSettings, cold_start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is built again, and loaded from its files."""

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(box_images, "gather", fail)
    chosen = settings.model_copy(update={"cold_start": cold_start})
    with sharded_seeds(untied, settings):
        model = rfork.fork_pretrained(untied.folder, name=MODEL, settings=chosen)
    assert "the engine's loader" == report(model).fallback
    assert [] == different_tensors(LlamaForCausalLM.from_pretrained(untied.folder), model)


def test_other_layouts_must_be_enabled(untied: Files, settings: InstanceSettings, tmp_path: Path) -> None:
    """By default, a model is read from its own layout only."""
    chosen = settings.model_copy(update={"cross_layout": False})
    with sharded_seeds(untied, settings), pytest.raises(AllSourcesFailed, match="other ranks are available"):
        rfork.fork_pretrained(without_weights(untied.folder, tmp_path / "llama"), name=MODEL, settings=chosen)


def test_another_version_is_not_read(untied: Files, tied: Files, settings: InstanceSettings, tmp_path: Path) -> None:
    """A target with a version reads nothing of another one: it loads its files, or fails."""
    with sharded_seeds(tied, settings):
        model = rfork.fork_pretrained(untied.folder, name=MODEL, settings=settings)
        assert [] == different_tensors(LlamaForCausalLM.from_pretrained(untied.folder), model)
        assert report(model).fallback != OTHER_LAYOUTS
        with pytest.raises(AllSourcesFailed, match="no instance serves version v2"):
            rfork.fork_pretrained(
                without_weights(untied.folder, tmp_path / "llama"), name=MODEL, version="v2", settings=settings
            )


def test_another_version_is_not_served(untied: Files, settings: InstanceSettings) -> None:
    """A target of another layout does not read a model of another version."""
    model = rfork.fork_pretrained(untied.folder, name=MODEL, settings=settings)
    seed_of(model)
    with pytest.raises(NoSource, match="no instance serves version v2"):
        sharded_fork(untied, 0, settings, "v2")


def test_converted_weights_are_loaded_by_transformers(mixtral: Files, settings: InstanceSettings) -> None:
    """A model that transformers does not load as stored is not read from other layouts."""
    with sharded_seeds(mixtral, settings):
        model = rfork.fork_pretrained(mixtral.folder, name=MODEL, settings=settings)
    assert "the engine's loader" == report(model).fallback
    assert [] == different_tensors(MixtralForCausalLM.from_pretrained(mixtral.folder), model)
    assert "transformers converts the weights of mixtral models" in " ".join(report(model).reasons)


def test_converted_weights_are_not_served(
    mixtral: Files, settings: InstanceSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged, and the model is served to its own layout."""
    caplog.set_level("INFO", "rfork")
    model = rfork.fork_pretrained(mixtral.folder, name=MODEL, settings=settings)
    assert seed_of(model).boxes is None
    assert "transformers converts the weights of mixtral models" in caplog.text


def test_another_dtype_is_refused_by_name(untied: Files, settings: InstanceSettings, tmp_path: Path) -> None:
    """The error names the tensor and both dtypes."""
    bare = without_weights(untied.folder, tmp_path / "llama")
    reason = r"'model.embed_tokens.weight'.*float32 \[4096, 256\], but bfloat16 \[4096, 256\] in the checkpoint"
    with sharded_seeds(untied, settings), pytest.raises(AllSourcesFailed, match=reason):
        rfork.fork_pretrained(bare, name=MODEL, dtype="float32", settings=settings)
