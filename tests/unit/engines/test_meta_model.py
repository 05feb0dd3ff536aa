"""A model built without its weights equals the one that `from_pretrained` builds, except for the weights."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralForCausalLM,
    PreTrainedModel,
    ResNetForImageClassification,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)

from rfork.engines.meta_model import MetaModel, model_errors, overwritten_weight
from rfork.errors import ModelError, SettingsError
from rfork.image.capture import capture


def test_a_missing_temporary_folder_is_not_blamed_on_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's folder is fine; the error names the setting that helps."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(SettingsError, match="temporary folder") as raised, model_errors(tmp_path):
        tempfile.gettempdir()
    assert "TMPDIR" in raised.value.hint
    assert str(tmp_path) not in str(raised.value)


def test_a_file_missing_from_the_model_is_blamed_on_it(tmp_path: Path) -> None:
    """This holds while a temporary folder exists."""
    with pytest.raises(ModelError, match=str(tmp_path)), model_errors(tmp_path):
        (tmp_path / "config.json").read_text()


SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {
    **{"n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    **{"num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"num_key_value_heads": 4},
}
T5 = {
    **{"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
}
WHISPER = {
    **{"vocab_size": 128, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64},
    **{"decoder_ffn_dim": 64, "max_source_positions": 20, "max_target_positions": 20},
    **{"decoder_start_token_id": 1, "begin_suppress_tokens": None},
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}

MODELS: dict[str, tuple[type[PreTrainedModel], Mapping[str, object]]] = {
    "tied": (LlamaForCausalLM, {**SMALL, **SPECIAL, "tie_word_embeddings": True}),
    "untied": (LlamaForCausalLM, {**SMALL, **SPECIAL, "tie_word_embeddings": False}),
    "classifier": (LlamaForSequenceClassification, {**SMALL, **SPECIAL, "num_labels": 3}),
    "merged experts": (MixtralForCausalLM, {**SMALL, **SPECIAL, "num_local_experts": 2}),
    "latent attention": (DeepseekV3ForCausalLM, {**SMALL, **SPECIAL, **EXPERTS, **LATENT}),
    "scaled embeddings": (Gemma3ForCausalLM, {**SMALL, **SPECIAL, "head_dim": 8}),
    "masks": (GPT2LMHeadModel, {**GPT2, **SPECIAL}),
    "no decoder": (BertForMaskedLM, {**SMALL, "pad_token_id": 0}),
    "kept in float32": (T5ForConditionalGeneration, T5),
    "running statistics": (ResNetForImageClassification, RESNET),
    "encoder and decoder": (WhisperForConditionalGeneration, {**WHISPER, **SPECIAL}),
}


def save_model(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write a random model of this architecture into the folder."""
    model_class, values = MODELS[name]
    config_class = model_class.config_class
    config = AutoConfig.for_model(config_class.model_type if config_class is not None else "", **values)
    model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return model


def without_weights(folder: Path) -> Path:
    """Return a copy of the folder without the weights."""
    config_only = folder.with_name(f"{folder.name}-bare")
    shutil.copytree(folder, config_only, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    return config_only


def state_of(model: PreTrainedModel, folder: Path) -> dict[str, object]:
    """Return the state of the model except its weights; the model was built from this folder."""
    loaded = set(model.state_dict())
    return {
        "class": type(model),
        "layout": capture(model).layout.layout_id,
        "attributes": {name for name in vars(model) if name != "_weight_conversions"},
        "computed": {name: tensor.tolist() for name, tensor in model.named_buffers() if name not in loaded},
        "training": [name for name, module in model.named_modules() if module.training],
        "trained": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "config": json.loads(model.config.to_json_string().replace(str(folder), "FOLDER")),
        "attention": model.config._attn_implementation,
        "name": str(model.name_or_path).replace(str(folder), "FOLDER"),
        "generation": model.generation_config.to_dict() if model.can_generate() else None,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_empty_model_equals_that_of_from_pretrained(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Layout, computed buffers, config and everything else are equal, although the folder has no weights."""
    folder = tmp_path / "model"
    save_model(folder, name, dtype)
    config_only = without_weights(folder)
    loaded = MODELS[name][0].from_pretrained(folder, dtype="auto")  # transformers 4 defaults to float32
    assert state_of(loaded, folder) == state_of(MetaModel.of(config_only).empty(), config_only)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16], ids=str)
def test_a_requested_dtype_is_that_of_from_pretrained(tmp_path: Path, dtype: str | torch.dtype) -> None:
    """The model has the dtype that `from_pretrained` would choose."""
    folder = tmp_path / "model"
    save_model(folder, "kept in float32")
    config_only = without_weights(folder)
    loaded = T5ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    assert state_of(loaded, folder) == state_of(MetaModel.of(config_only, dtype=dtype).empty(), config_only)


def test_a_config_without_a_dtype_has_that_of_the_weights(tmp_path: Path) -> None:
    """It is that of the weights if there are any, else float32."""
    save_model(tmp_path / "model", "tied", torch.bfloat16)
    without_dtype(tmp_path / "model")
    found = [MetaModel.of(folder).dtype for folder in (tmp_path / "model", without_weights(tmp_path / "model"))]
    assert [torch.bfloat16, torch.float32] == found


def without_dtype(folder: Path) -> None:
    """Remove the dtype from a config."""
    config = folder / "config.json"
    config.write_text(
        json.dumps({key: value for key, value in json.loads(config.read_text()).items() if key != "dtype"})
    )


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_the_dtype_of_the_weights_is_that_of_the_file_that_transformers_reads(tmp_path: Path, file: str) -> None:
    """Adapters and other files in the folder do not count."""
    save_model(tmp_path, "tied", torch.bfloat16)
    without_dtype(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if file == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(weights, tmp_path / file)
    save_file({"lora": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert AutoModel.from_pretrained(tmp_path, dtype="auto").dtype is torch.bfloat16
    assert MetaModel.of(tmp_path).dtype is torch.bfloat16


def test_the_dtype_of_a_sharded_model_is_that_of_its_first_shard(tmp_path: Path) -> None:
    """Transformers compares no shards."""
    save_model(tmp_path, "tied", torch.float16)
    without_dtype(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_file({"b": torch.ones(2, dtype=torch.float8_e4m3fn), "c": torch.ones(2).half()}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "2.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert MetaModel.of(tmp_path).dtype is torch.float16


def test_files_that_transformers_does_not_read_are_no_checkpoint(tmp_path: Path) -> None:
    """A variant is read only on request, and `pytorch_model.bin` otherwise."""
    save_model(tmp_path, "tied")
    assert MetaModel.of(tmp_path).has_checkpoint
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "model.fp16.safetensors")
    assert not MetaModel.of(tmp_path).has_checkpoint
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert not MetaModel.of(tmp_path).has_checkpoint


def test_a_file_with_precedence_over_an_index_is_not_loaded_by_it(tmp_path: Path) -> None:
    """Transformers prefers the file, and rfork the index."""
    save_model(tmp_path, "tied")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert not MetaModel.of(tmp_path).has_checkpoint


def test_weights_that_the_config_names_are_no_checkpoint(tmp_path: Path) -> None:
    """Transformers reads the named file instead of `model.safetensors`."""
    save_model(tmp_path, "tied")
    (tmp_path / "other.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_weights": "other.safetensors"}))
    assert not MetaModel.of(tmp_path).has_checkpoint


def test_a_requested_attention_implementation_is_used(tmp_path: Path) -> None:
    """Both build paths use it."""
    save_model(tmp_path, "tied")
    meta_model = MetaModel.of(tmp_path, attn_implementation="eager")
    models = meta_model.empty(), meta_model.loaded()
    assert ["eager", "eager"] == [model.config._attn_implementation for model in models]


def test_a_requested_class_replaces_that_of_the_config(tmp_path: Path) -> None:
    """A class or an Auto class replaces the one named by the config."""
    save_model(tmp_path, "tied")
    class_names = [
        type(MetaModel.of(tmp_path, model_class=model_class).empty()).__name__
        for model_class in (LlamaForSequenceClassification, AutoModel)
    ]
    assert ["LlamaForSequenceClassification", "LlamaModel"] == class_names


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_not_changed_after_reading(tmp_path: Path, name: str) -> None:
    """Of these models, rfork may read the files."""
    save_model(tmp_path, name)
    assert overwritten_weight(MetaModel.of(tmp_path).empty()) is None


def test_integers_are_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leftover memory in their place may contain addresses of other weights, and capture refuses those."""
    save_model(tmp_path, "running statistics")
    empty = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **options: empty(*args, **options).fill_(7))
    model = MetaModel.of(tmp_path).empty()
    counters = [value for name, value in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert {0} == {int(value) for value in counters}


class OwnConfig(LlamaConfig):
    """A config that AutoConfig does not know."""

    model_type = "own"


class OwnModel(LlamaForCausalLM):
    """A model of that config."""

    config_class = OwnConfig


def test_a_requested_class_reads_its_own_config(tmp_path: Path) -> None:
    """As in `from_pretrained`: AutoConfig need not know it."""
    OwnModel(OwnConfig.from_dict({**SMALL, **SPECIAL})).save_pretrained(tmp_path)
    loaded, empty = OwnModel.from_pretrained(tmp_path), MetaModel.of(tmp_path, model_class=OwnModel).empty()
    assert type(empty.config) is OwnConfig
    assert state_of(loaded, tmp_path) == state_of(empty, tmp_path)


def test_a_requested_class_may_be_a_part_of_the_model(tmp_path: Path) -> None:
    """Its config is a part of the one in the folder."""
    part = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(text_config={**part, "vocab_size": 128}, vision_config={**part, "image_size": 16})
    CLIPModel(config).save_pretrained(tmp_path)
    loaded, empty = CLIPTextModel.from_pretrained(tmp_path), MetaModel.of(tmp_path, model_class=CLIPTextModel).empty()
    assert type(empty.config) is CLIPTextConfig
    assert state_of(loaded, tmp_path) == state_of(empty, tmp_path)


class AppendingModel(LlamaForCausalLM):
    """A model that appends to a list of its config each time it is built, as LeViT does."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        config.stages.append(len(config.stages))


def test_a_config_that_a_model_changes_is_changed_once(tmp_path: Path) -> None:
    """It is built twice, and the first one has a config of its own."""
    LlamaForCausalLM(LlamaConfig.from_dict({**SMALL, **SPECIAL, "stages": []})).save_pretrained(tmp_path)
    loaded, empty = AppendingModel.from_pretrained(tmp_path), MetaModel.of(tmp_path, model_class=AppendingModel).empty()
    assert [0] == loaded.config.stages
    assert [0] == empty.config.stages


class ScaledModel(LlamaForCausalLM):
    """A model whose class changes the weights that it read."""

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """Load and scale the head."""
        model = super().from_pretrained(*args, **options)
        model.lm_head.weight.data.mul_(2)
        return model


def test_a_class_with_its_own_from_pretrained_is_rejected(tmp_path: Path) -> None:
    """The error names it."""
    save_model(tmp_path, "untied")
    with pytest.raises(ModelError, match="ScaledModel has its own from_pretrained"):
        MetaModel.of(tmp_path, model_class=ScaledModel).empty()


def test_the_generation_config_of_the_folder_is_read(tmp_path: Path) -> None:
    """generation_config.json is read in addition to the model's config."""
    model = save_model(tmp_path, "tied")
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.save_pretrained(tmp_path)
    assert 1.5 == MetaModel.of(tmp_path).empty().generation_config.repetition_penalty


def test_it_is_saved_under_the_names_of_its_architecture(tmp_path: Path) -> None:
    """A model built without reading is saved like one that was read, with separate experts."""
    folder, ours, theirs = tmp_path / "model", tmp_path / "ours", tmp_path / "theirs"
    save_model(folder, "merged experts")
    meta_model = MetaModel.of(folder)
    model, loaded = meta_model.empty(), meta_model.loaded()
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(ours)
    loaded.save_pretrained(theirs)
    assert (theirs / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "expected"), [("tied", True), ("merged experts", transformers.__version__.startswith("4."))]
)
def test_whether_weights_are_loaded_unchanged(tmp_path: Path, name: str, expected: bool) -> None:
    """If transformers merges or transposes weights as it reads them, rfork must not read the files instead."""
    save_model(tmp_path, name)
    meta_model = MetaModel.of(tmp_path)
    assert expected == meta_model.loads_as_stored(meta_model.empty())


def test_transformers_4_loads_all_weights_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no module with conversions, and so rfork reads the files of every model."""
    save_model(tmp_path, "tied")
    meta_model = MetaModel.of(tmp_path)
    model = meta_model.empty()
    monkeypatch.setattr("transformers.__version__", "4.56.0")
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    assert meta_model.loads_as_stored(model)


def test_without_the_conversions_of_transformers_5_no_weights_are_loaded_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rfork cannot know which weights a version without that module converts."""
    save_model(tmp_path, "tied")
    meta_model = MetaModel.of(tmp_path)
    model = meta_model.empty()
    monkeypatch.setattr("transformers.__version__", "5.99.0")
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    assert not meta_model.loads_as_stored(model)


def test_quantised_models_are_rejected(tmp_path: Path) -> None:
    """The error contains the reason."""
    save_model(tmp_path, "tied")
    config = tmp_path / "config.json"
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantised}))
    with pytest.raises(ModelError, match="is quantised"):
        MetaModel.of(tmp_path).empty()


@pytest.mark.parametrize("source", [Path("/nowhere"), "/nowhere", "no such/model/at all"])
def test_a_missing_model_is_a_one_line_error(source: str | Path) -> None:
    """The error is one line with the model's name."""
    with pytest.raises(ModelError, match=str(source)):
        MetaModel.of(source)


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A build that reads nothing shows no progress bar and no warning."""
    save_model(tmp_path, "tied")
    capfd.readouterr()
    MetaModel.of(tmp_path).empty()
    assert ("", "") == capfd.readouterr()
