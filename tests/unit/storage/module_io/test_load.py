"""Loading modules and dicts from files: by names, converted, tied, and from verified snapshots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import rfork
from rfork.errors import CheckpointError, StorageCorrupt
from rfork.image.capture import capture
from rfork.storage.formats.detect import INDEX, SINGLE
from rfork.storage.module_io.module_state import registered_state
from rfork.storage.snapshots.writer import write_snapshot


class Model(nn.Module):
    """Model with tied weights, a persistent buffer, a table that no checkpoint contains, and an unregistered
    tensor.
    """

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(40, 30, dtype=dtype)
        self.head = nn.Linear(30, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(30, 30, dtype=dtype) for _ in range(3))
        self.register_buffer("scale", torch.randn(2))
        self.register_buffer("rotary", torch.arange(9.0), persistent=False)
        self.stray = torch.tensor([1, 2, 3])


def equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(value.to(theirs[name].dtype), theirs[name]) for name, value in ours.items()
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Write `Model(1)` with safetensors."""
    save_model(Model(1), str(tmp_path / SINGLE))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_existing_module_is_filled(saved: Path, dtype: torch.dtype) -> None:
    """Each tensor stays in the module's memory and dtype, and no other tensor changes."""
    module = Model(2, dtype)
    before = {name: tensor.data_ptr() for name, tensor in registered_state(module).items()}
    report = rfork.load(module, saved)
    assert equal(Model(1), module)
    assert before == {name: tensor.data_ptr() for name, tensor in registered_state(module).items()}
    bytes_stored = sum(tensor.nbytes for tensor in load_file(saved / SINGLE).values())
    assert (saved / SINGLE).as_uri() == report.uri
    assert bytes_stored == report.bytes
    assert () == report.missing
    assert () == report.unexpected
    assert not report.verified
    assert report.gb_per_s > 0


def test_mismatched_names_are_refused_or_reported(saved: Path) -> None:
    """With `strict` they are refused before a byte is written; without it the report lists them."""
    content = load_file(saved / SINGLE)
    content["more"] = torch.ones(1)
    del content["scale"]
    save_file(content, saved / SINGLE)
    module = Model(2)
    for target, message in (
        (Model(2), r"contains more, .* \(1 in total\)"),
        (nn.Linear(2, 2), "none of the model's"),
    ):
        with pytest.raises(CheckpointError, match=message):
            rfork.load(target, saved)
    assert equal(Model(2), module)
    report = rfork.load(module, saved, strict=False)
    assert ("scale",) == report.missing
    assert ("more",) == report.unexpected
    assert torch.equal(Model(1).embed.weight, module.embed.weight)


def test_the_traversal_equals_the_state_dict() -> None:
    """Names, order and tensors equal those of torch for modules of all types."""
    for module in (
        Model(),
        nn.LSTM(3, 4),
        nn.Sequential(nn.BatchNorm1d(3), nn.Identity()),
        nn.MultiheadAttention(8, 2),
    ):
        expected = module.state_dict(keep_vars=True)
        found = registered_state(module)
        assert list(expected) == list(found)
        assert [True] * len(expected) == [found[name] is tensor for name, tensor in expected.items()]


def test_a_snapshot_of_this_module_is_verified(tmp_path: Path) -> None:
    """Its complete state is restored, computed tensors included; a changed byte is detected."""
    source = Model(1)
    source.stray += 4
    path = tmp_path / "x.safetensors"
    write(source, path)
    module = Model(2)
    report = rfork.load(module, path)
    assert report.verified
    assert equal(source, module)
    assert [5, 6, 7] == module.stray.tolist()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageCorrupt):
        rfork.load(Model(2), path)


def test_a_snapshot_of_another_layout_is_loaded_by_names(tmp_path: Path) -> None:
    """A module with another dtype loads the snapshot's tensors one by one."""
    path = tmp_path / "x.safetensors"
    write(Model(1), path)
    module = Model(2, torch.bfloat16)
    report = rfork.load(module, path)
    assert not report.verified
    assert equal(Model(1), module)


def write(module: nn.Module, path: Path) -> None:
    image = capture(module)
    write_snapshot(image, image.manifest(), path)


def test_load_tensors_returns_a_dict_of_selected_tensors(saved: Path) -> None:
    """Like safetensors' load_file, with an optional dtype and selection of names."""
    expected = load_file(saved / SINGLE)
    found = rfork.load_tensors(saved)
    kept = {name: found[name] for name in expected}
    assert [True] * len(expected) == [torch.equal(expected[name], tensor) for name, tensor in kept.items()]
    half = rfork.load_tensors(saved, ["scale", "embed.weight"], dtype=torch.float16)
    assert {"embed.weight": torch.float16, "scale": torch.float16} == {
        name: tensor.dtype for name, tensor in half.items()
    }
    assert torch.equal(expected["scale"].half(), half["scale"])
    with pytest.raises(CheckpointError, match="lacks x"):
        rfork.load_tensors(saved, ["x"])


def test_tensors_are_yielded_as_pairs_in_order_of_arrival(saved: Path) -> None:
    """An engine's load_weights receives pairs; integers keep their dtype."""
    found = dict(rfork.iter_tensors(saved, ["scale", "layers.0.bias"], dtype=torch.bfloat16))
    assert {"scale", "layers.0.bias"} == found.keys()
    assert torch.equal(Model(1).get_buffer("scale").bfloat16(), found["scale"])


def test_the_lazy_mapping_reads_only_requested_tensors(saved: Path) -> None:
    """The lazy mapping has all names and shapes, and reads requested tensors only."""
    with rfork.open_tensors(saved) as tensors:
        assert (40, 30) == tensors.specs["embed.weight"].shape
        assert "embed.weight" in tensors
        assert "x" not in tensors
        assert 9 == len(set(tensors))
        assert torch.equal(Model(1).embed.weight, tensors["embed.weight"])
        with pytest.raises(KeyError):
            tensors["x"]


def test_only_tensors_of_the_index_are_loaded(tmp_path: Path) -> None:
    """A tensor in a shard that the index does not list is not loaded."""
    save_file({"a": torch.ones(2), "old": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(3), "a": torch.zeros(2)}, tmp_path / "2.safetensors")
    names = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    assert {"a": [1.0, 1.0], "b": [1.0, 1.0, 1.0]} == {
        name: tensor.tolist() for name, tensor in rfork.load_tensors(tmp_path).items()
    }
