"""Placement maps of transformers models, and models built from tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rfork.engines.meta_model import MetaModel, stored_tensors
from rfork.engines.pretrained_layout import PretrainedEngine
from rfork.engines.relocation import tensors_of
from rfork.errors import UnsupportedTensor
from rfork.placement.boxes import wanted_boxes
from rfork.placement.placement_map import PlacementMap
from tests.unit.engines.test_meta_model import MODELS, save_model, without_weights

Weights = dict[str, torch.Tensor]
CONVERTED = ("merged experts", "latent attention")
"""Models whose experts transformers merges."""


def recorded(folder: Path) -> PlacementMap:
    """Return the placement map of a model, for the checkpoint of its files."""
    engine = PretrainedEngine(MetaModel.of(folder))
    checkpoint = engine.checkpoint_tensors()
    assert checkpoint is not None
    return engine.record(checkpoint)


def change(folder: Path, function: Callable[[Weights], Weights]) -> None:
    """Replace the checkpoint of a folder."""
    file = folder / "model.safetensors"
    save_file(function(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", [name for name in MODELS if name not in CONVERTED])
def test_a_model_from_tensors_equals_the_loaded_one(name: str, tmp_path: Path) -> None:
    """In all parameters and buffers. All tensors of the checkpoint are read, and served by the loaded model."""
    model = save_model(tmp_path, name)
    weights = load_file(tmp_path / "model.safetensors")
    placement_map = recorded(tmp_path)
    assert sorted(weights) == sorted(box.tensor for box in wanted_boxes(placement_map) if box.is_complete)

    engine = PretrainedEngine(MetaModel.of(without_weights(tmp_path)))
    loaded = type(model).from_pretrained(tmp_path)
    live, others = engine.live_tensors(loaded, placement_map)
    assert "" == others
    assert set(map(id, stored_tensors(loaded).values())) == set(map(id, live.values()))

    filled = tensors_of(engine.load_from(lambda _: weights.items()))
    expected = tensors_of(loaded)
    assert expected.keys() == filled.keys()
    assert [] == [each for each in expected if not torch.equal(expected[each], filled[each])]


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_weights_are_refused(name: str, tmp_path: Path) -> None:
    """The error names the type of the model."""
    model = save_model(tmp_path, name)
    with pytest.raises(UnsupportedTensor, match=f"converts the weights of {model.config.model_type} models"):
        recorded(tmp_path)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    """transformers would initialise it."""
    save_model(tmp_path, "untied")
    change(tmp_path, lambda weights: {name: each for name, each in weights.items() if name != "model.norm.weight"})
    with pytest.raises(UnsupportedTensor, match=r"'model\.norm\.weight'.*not in the checkpoint"):
        recorded(tmp_path)


def test_a_tied_tensor_that_is_stored_twice_is_named(tmp_path: Path) -> None:
    """Only the values show whether transformers ties it."""
    save_model(tmp_path, "tied")
    change(tmp_path, lambda weights: {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    with pytest.raises(UnsupportedTensor, match=r"'lm_head\.weight'.*tied to model\.embed_tokens\.weight"):
        recorded(tmp_path)


def test_a_tied_tensor_may_have_its_second_name(tmp_path: Path) -> None:
    """The checkpoint has the head, and the embeddings are it."""
    save_model(tmp_path, "tied")
    embeddings = "model.embed_tokens.weight"
    change(tmp_path, lambda weights: {"lm_head.weight": weights.pop(embeddings), **weights})
    weights = load_file(tmp_path / "model.safetensors")
    filled = tensors_of(PretrainedEngine(MetaModel.of(tmp_path)).load_from(lambda _: weights.items()))
    assert "lm_head.weight" in {box.tensor for box in wanted_boxes(recorded(tmp_path))}
    assert torch.equal(weights["lm_head.weight"], filled[embeddings])
    assert filled[embeddings] is filled["lm_head.weight"]


def test_other_tensors_of_the_checkpoint_are_ignored(tmp_path: Path) -> None:
    """They are neither read nor loaded."""
    save_model(tmp_path, "untied")
    change(tmp_path, lambda weights: {**weights, "rotary_emb.inv_freq": torch.ones(4)})
    filled = PretrainedEngine(MetaModel.of(tmp_path)).load_from(
        lambda _: load_file(tmp_path / "model.safetensors").items()
    )
    assert "rotary_emb.inv_freq" not in {box.tensor for box in wanted_boxes(recorded(tmp_path))}
    assert "rotary_emb.inv_freq" not in tensors_of(filled)


def test_a_model_does_not_share_memory_with_its_weights(tmp_path: Path) -> None:
    """The fetched boxes may still be read by other targets while the model changes."""
    save_model(tmp_path, "untied")
    weights = load_file(tmp_path / "model.safetensors")
    filled = PretrainedEngine(MetaModel.of(tmp_path)).load_from(lambda _: weights.items())
    addresses = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    assert set() == addresses & {tensor.untyped_storage().data_ptr() for tensor in tensors_of(filled).values()}


def test_a_folder_without_weights_has_no_checkpoint(tmp_path: Path) -> None:
    """So the model is not served to other layouts."""
    save_model(tmp_path, "untied")
    assert PretrainedEngine(MetaModel.of(without_weights(tmp_path))).checkpoint_tensors() is None
