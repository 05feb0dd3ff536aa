"""Writing ``.tensors`` files: tensorizer loads them, and none is ever seen half-written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorizer import DecryptionParams, TensorDeserializer
from torch import nn

from rfork.errors import CheckpointError, StorageFull, UnsupportedTensor
from rfork.settings import StorageSettings
from rfork.storage.tensorizer.source import TensorizerSource
from rfork.storage.tensorizer.writer import TensorOutline, write_stream, write_tensors
from rfork.storage.tensors import StoredTensor
from tests.memory_bucket import InMemoryBucket, bucket
from tests.tensor_samples import KEY, PASSWORD, raw_tensors, samples

__all__ = ["bucket"]

URI = "s3://bucket/model.tensors"


def tensorizer_file(path: Path, encryption: DecryptionParams | None = None) -> TensorDeserializer:
    """The file as tensorizer loads it, every hash checked."""
    # With several readers each makes the key of the password anew.
    return TensorDeserializer(str(path), device="cpu", verify_hash=True, encryption=encryption, num_readers=1)


@pytest.mark.parametrize("encryption_type", ["plain", "key", "password"])
def test_tensorizer_reads_what_is_written(tmp_path: Path, encryption_type: str) -> None:
    """Names, types, shapes and bytes come out of tensorizer's own loader, encrypted or not."""
    path = tmp_path / "model.tensors"
    credentials: dict[str, tuple[bytes | None, str | None, DecryptionParams | None]] = {
        "plain": (None, None, None),
        "key": (KEY, None, DecryptionParams.from_key(KEY)),
        "password": (None, PASSWORD, DecryptionParams.from_string(PASSWORD)),
    }
    key, password, encryption = credentials[encryption_type]
    saved = write_tensors(samples(), str(path), key=key, password=password)
    with tensorizer_file(path, encryption) as loaded:
        assert raw_tensors(samples()) == raw_tensors(loaded.items())
    assert (len(samples()), path.as_uri()) == (saved.tensors, saved.uri)
    assert sum(tensor.nbytes for tensor in samples().values()) == saved.nbytes


def test_large_tensors_are_encrypted_block_by_block(tmp_path: Path) -> None:
    """Several blocks, the last one shorter: tensorizer and ourselves decrypt them."""
    tensors = {"a": torch.arange(700_001, dtype=torch.int64), "b": torch.ones(3)}
    before = raw_tensors(tensors)
    write_tensors(tensors, str(tmp_path / "model.tensors"), key=KEY)
    assert before == raw_tensors(tensors)  # the model's own memory is left as it is
    with tensorizer_file(tmp_path / "model.tensors", DecryptionParams.from_key(KEY)) as loaded:
        assert before == raw_tensors(loaded.items())
    with TensorizerSource.open(str(tmp_path / "model.tensors"), key=KEY) as source:
        assert before == raw_tensors(source.stream())


def test_tensorizer_fills_a_module_from_what_is_written(tmp_path: Path) -> None:
    """A module's file is one for `load_into_module`: with its own parameters and buffers, and tied ones."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    module.register_parameter("own", nn.Parameter(torch.randn(2)))
    module.register_buffer("kept", torch.randn(3))
    module.register_buffer("made", torch.randn(3), persistent=False)
    module[2].weight = module[0].weight
    write_tensors(module, str(tmp_path / "model.tensors"))
    right = raw_tensors(module.state_dict())
    for tensor in module.state_dict().values():
        tensor.zero_()
    with tensorizer_file(tmp_path / "model.tensors") as loaded:
        loaded.load_into_module(module)
    assert right == raw_tensors(module.state_dict())
    with TensorizerSource.open(str(tmp_path / "model.tensors")) as source:
        assert right == raw_tensors(source.stream())


def test_many_tensors_are_one_file(tmp_path: Path) -> None:
    """3,000 tensors, more than tensorizer's own writer takes, are one file that its loader reads."""
    tensors = {f"layers.{number}.experts.weight": torch.tensor([number]) for number in range(3000)}
    write_tensors(tensors, str(tmp_path / "model.tensors"))
    with tensorizer_file(tmp_path / "model.tensors") as loaded:
        assert raw_tensors(tensors) == raw_tensors(loaded.items())


def test_a_set_has_files_of_the_size_asked_for(bucket: InMemoryBucket) -> None:
    """Each file is a whole one, at most that large; what stood for the name before is gone."""
    tensors = {f"t{number}": torch.full((100,), float(number)) for number in range(10)}
    write_tensors(tensors, URI)
    write_tensors(tensors, URI, max_file_bytes=1200)
    assert [f"model-0000{number}-of-00004.tensors" for number in (1, 2, 3, 4)] == sorted(bucket.objects)
    with TensorizerSource.open(URI) as source:
        assert raw_tensors(tensors) == raw_tensors(source.stream())
    write_tensors(tensors, URI, max_file_bytes=2000)
    assert 2 == len(bucket.objects)
    write_tensors(tensors, URI)
    assert ["model.tensors"] == list(bucket.objects)


@pytest.mark.parametrize("max_file_bytes", [None, 1200])
@pytest.mark.parametrize("failing", [1, 4, 9])
def test_a_write_that_fails_leaves_nothing(
    bucket: InMemoryBucket, monkeypatch: pytest.MonkeyPatch, max_file_bytes: int | None, failing: int
) -> None:
    """No file, and none of a set, is left where the storage fails; what was there stays."""
    monkeypatch.setattr("rfork.storage.tensorizer.writer.GROUP_BYTES", 400)  # one write a tensor
    tensors = {f"t{number}": torch.full((100,), float(number)) for number in range(10)}
    bucket.objects["model.tensors"] = b"before"

    def full(operation: str, path: str) -> None:
        if operation == "write" and len(bucket.paths_of("write")) == failing:
            raise StorageFull(f"{path}: no room")

    bucket.fault = full
    with pytest.raises(StorageFull):
        write_tensors(tensors, URI, max_file_bytes=max_file_bytes)
    assert {"model.tensors": b"before"} == bucket.objects


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"a": torch.empty(2, device="meta")}, UnsupportedTensor, "'a'"),
        ({"a": torch.ones(2).to_sparse()}, UnsupportedTensor, "'a'"),
        ({"": torch.ones(2)}, UnsupportedTensor, "name"),
        ({"n" * 70_000: torch.ones(2)}, UnsupportedTensor, "name"),
        ({}, CheckpointError, "no tensor"),
    ],
)
def test_what_cannot_be_written_is_told_first(
    bucket: InMemoryBucket, tensors: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    """A tensor without bytes, or with a name that the format cannot have, is refused before a write."""
    with pytest.raises(error, match=message):
        write_tensors(tensors, URI)
    assert [] == bucket.paths_of("write")


def test_extra_state_is_refused(bucket: InMemoryBucket) -> None:
    """What a module keeps beside tensors would be lost without a word: it is named instead."""

    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    with pytest.raises(UnsupportedTensor, match="_extra_state"):
        write_tensors(Counting(2, 2), URI)


def test_tensors_are_taken_as_memory_allows(bucket: InMemoryBucket) -> None:
    """No more tensors are asked for than fit into the setting's memory, beside the one that is written."""
    spec = StoredTensor(torch.uint8, (4 << 20,), 4 << 20)
    outlines = [TensorOutline(f"t{number}", spec) for number in range(30)]
    made = 0
    ahead: list[int] = []

    def tensors():  # type: ignore[no-untyped-def]
        nonlocal made
        for _ in outlines:
            made += 1
            yield torch.zeros(4 << 20, dtype=torch.uint8)

    done = 0

    def on_progress(count: int) -> None:
        nonlocal done
        done += count
        ahead.append(made - done // (4 << 20))

    write_stream(outlines, tensors(), URI, StorageSettings(staging_bytes=16 << 20), progress=on_progress)
    assert 30 * (4 << 20) == done
    assert max(ahead) <= 5
