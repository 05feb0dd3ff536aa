"""Selection of files in folders with several ranks, or with two models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rfork
from rfork.errors import CheckpointError, SettingsError
from rfork.schema import Rank
from rfork.storage.module_io.load import load
from rfork.storage.module_io.save import save
from rfork.storage.tensorizer.file_set import resolve_template
from rfork.storage.tensorizer.writer import write_tensors

FIRST, SECOND = Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)
SPECULATIVE = Rank(role="speculative")
SUFFIXES = pytest.mark.parametrize("suffix", [".tensors", ".safetensors"])


def linear(value: float) -> nn.Linear:
    """Return a layer with all weights of that value."""
    module = nn.Linear(2, 2, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def loaded(uri: Path | str, rank: Rank) -> float:
    """Return the weights' value that a rank loads from a URI."""
    module = linear(-1)
    rfork.load(module, uri, rank=rank)
    return float(module.weight.detach()[0, 0])


@SUFFIXES
def test_a_template_names_the_file_of_each_rank(tmp_path: Path, suffix: str) -> None:
    """`rank` selects the numbered file for writing and reading."""
    template = tmp_path / f"model-rank-%03d{suffix}"
    for value, rank in ((10.0, FIRST), (11.0, SECOND)):
        saved = save(linear(value), template, rank=rank)
        assert f"model-rank-{rank.tp:03d}{suffix}" == saved.uri.rpartition("/")[2]
    assert [10.0, 11.0] == [loaded(template, rank) for rank in (FIRST, SECOND)]
    assert [10.0, 11.0] == [loaded(tmp_path, rank) for rank in (FIRST, SECOND)]


@pytest.mark.parametrize(
    ("name", "rank", "written"),
    [
        ("model-rank-%03d.tensors", Rank(ep=1, ep_size=2), "model-rank-000-ep-001.tensors"),
        ("m-%d.safetensors", Rank(tp=1, tp_size=2, pp=1, pp_size=2), "m-3.safetensors"),
        ("speculative-rank-%03d.safetensors", SPECULATIVE, "speculative-rank-000.safetensors"),
        ("a%20draft%d0.safetensors", SECOND, "a%20draft%d0.safetensors"),
        ("folder-%03d", SECOND, "folder-%03d"),
    ],
)
def test_the_names_of_a_template_equal_those_of_snapshots(name: str, rank: Rank, written: str) -> None:
    """Names equal those of snapshots in a folder; escapes in a URI are no template."""
    assert f"s3://bucket/{written}" == resolve_template(f"s3://bucket/{name}", rank)


@SUFFIXES
def test_a_speculative_model_does_not_replace_the_main_model(tmp_path: Path, suffix: str) -> None:
    """Both have the same number, so their names must differ."""
    with pytest.raises(SettingsError, match="speculative"):
        save(linear(1), tmp_path / f"model-rank-%03d{suffix}", rank=SPECULATIVE)
    assert [] == list(tmp_path.iterdir())


@SUFFIXES
@pytest.mark.parametrize(
    ("stored_name", "requested"),
    [
        ("model-rank-001", FIRST),
        ("model-rank-000", SPECULATIVE),
        ("speculative-rank-001", SPECULATIVE),
        ("speculative-rank-000", FIRST),
    ],
)
def test_the_file_of_another_rank_is_refused(tmp_path: Path, stored_name: str, requested: Rank, suffix: str) -> None:
    """A file of another rank or model is refused with an error."""
    if suffix == ".tensors":
        write_tensors(linear(1), str(tmp_path / f"{stored_name}{suffix}"))
    else:
        save_file({"weight": torch.ones(2, 2)}, tmp_path / f"{stored_name}{suffix}")
    with pytest.raises(CheckpointError, match="not the requested rank"):
        loaded(tmp_path, requested)


@SUFFIXES
@pytest.mark.parametrize("target", ["model.safetensors", "model.safetensors.index.json"])
def test_the_file_of_a_speculative_model_has_precedence(tmp_path: Path, target: str, suffix: str) -> None:
    """The checkpoint in the same folder belongs to the main model."""
    save_file({"weight": torch.full((2, 2), 1.0)}, tmp_path / "model.safetensors")
    if target.endswith(".json"):
        (tmp_path / target).write_text('{"weight_map": {"weight": "model.safetensors"}}')
    save(linear(2), tmp_path / f"speculative-rank-000{suffix}", rank=SPECULATIVE)
    assert [1.0, 2.0] == [loaded(tmp_path, rank) for rank in (FIRST, SPECULATIVE)]
    (tmp_path / f"speculative-rank-000{suffix}").rename(tmp_path / f"speculative-rank-001{suffix}")
    with pytest.raises(CheckpointError, match="not the requested rank"):
        loaded(tmp_path, SPECULATIVE)


def test_without_a_file_for_the_rank_the_checkpoint_of_the_folder_is_loaded(tmp_path: Path) -> None:
    """If no file names a rank, the folder's checkpoint is loaded."""
    save_file({"weight": torch.full((2, 2), 3.0)}, tmp_path / "model.safetensors")
    assert 3.0 == loaded(tmp_path, SPECULATIVE)


def test_the_set_of_files_of_a_rank_is_found_in_the_folder(tmp_path: Path) -> None:
    """The set of the rank is found in the folder."""
    for value, rank in ((10.0, FIRST), (11.0, SECOND)):
        module = nn.Sequential(linear(value), linear(value))
        write_tensors(module, str(tmp_path / f"model-rank-{rank.tp:03d}.tensors"), max_file_bytes=16)
    module = nn.Sequential(linear(0), linear(0))
    load(module, tmp_path, rank=SECOND)
    assert [11.0] * 8 == torch.cat([tensor.flatten() for tensor in module.state_dict().values()]).tolist()


@pytest.mark.parametrize("name", ["foo.pt", "foo.gguf", "foo.bin"])
def test_the_name_of_another_format_is_refused(tmp_path: Path, name: str) -> None:
    """A folder with the name of another format is not created."""
    with pytest.raises(SettingsError, match="not a valid name"):
        save(linear(1), tmp_path / name)
    assert [] == list(tmp_path.iterdir())
