"""Writing ``.tensors`` files that tensorizer loads; a partial file is never visible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorizer import DecryptionParams, TensorDeserializer
from torch import nn

from rfork.errors import CheckpointError, StorageFull, UnsupportedTensor
from rfork.settings import StorageSettings
from rfork.storage.tensorizer.source import TensorizerSource
from rfork.storage.tensorizer.writer import write_stream, write_tensors
from rfork.storage.tensors import StoredTensor, TensorOutline
from tests.memory_bucket import InMemoryBucket, bucket
from tests.tensor_samples import KEY, PASSWORD, raw_tensors, samples

__all__ = ["bucket"]

URI = "s3://bucket/model.tensors"


def tensorizer_file(path: Path, encryption: DecryptionParams | None = None) -> TensorDeserializer:
    """Return the file as tensorizer loads it, with every hash checked."""
    # With several readers, each one derives the key from the password again.
    return TensorDeserializer(str(path), device="cpu", verify_hash=True, encryption=encryption, num_readers=1)


@pytest.mark.parametrize("encryption_type", ["plain", "key", "password"])
def test_tensorizer_reads_written_files(tmp_path: Path, encryption_type: str) -> None:
    """tensorizer's own loader returns names, types, shapes and bytes, encrypted or not."""
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
    assert len(samples()) == saved.tensors
    assert path.as_uri() == saved.uri
    assert sum(tensor.nbytes for tensor in samples().values()) == saved.nbytes


def test_large_tensors_are_encrypted_block_by_block(tmp_path: Path) -> None:
    """Several blocks with a shorter last one: tensorizer and rfork decrypt them."""
    tensors = {"a": torch.arange(700_001, dtype=torch.int64), "b": torch.ones(3)}
    before = raw_tensors(tensors)
    write_tensors(tensors, str(tmp_path / "model.tensors"), key=KEY)
    assert before == raw_tensors(tensors)  # the model's own memory is unchanged
    with tensorizer_file(tmp_path / "model.tensors", DecryptionParams.from_key(KEY)) as loaded:
        assert before == raw_tensors(loaded.items())
    with TensorizerSource.open(str(tmp_path / "model.tensors"), key=KEY) as source:
        assert before == raw_tensors(source.stream())


def test_tensorizer_fills_a_module_from_a_written_file(tmp_path: Path) -> None:
    """`load_into_module` fills parameters, buffers and tied tensors from a module's file."""
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
    """3,000 tensors, more than tensorizer's own writer supports, are one file that its loader reads."""
    tensors = {f"layers.{number}.experts.weight": torch.tensor([number]) for number in range(3000)}
    write_tensors(tensors, str(tmp_path / "model.tensors"))
    with tensorizer_file(tmp_path / "model.tensors") as loaded:
        assert raw_tensors(tensors) == raw_tensors(loaded.items())


def test_a_set_has_files_of_the_requested_size(bucket: InMemoryBucket) -> None:
    """Each file is valid and has at most that size; previous files of the name are removed."""
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
def test_a_failed_write_leaves_nothing(
    bucket: InMemoryBucket, monkeypatch: pytest.MonkeyPatch, max_file_bytes: int | None, failing: int
) -> None:
    """If storage fails, no file of the set is left, and existing files stay."""
    monkeypatch.setattr("rfork.storage.tensorizer.writer.GROUP_BYTES", 400)  # one write per tensor
    tensors = {f"t{number}": torch.full((100,), float(number)) for number in range(10)}
    bucket.objects["model.tensors"] = b"before"

    def full(operation: str, path: str) -> None:
        if operation == "write" and len(bucket.paths_of("write")) == failing:
            raise StorageFull(f"{path}: no space left")

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
def test_invalid_tensors_are_refused_before_a_write(
    bucket: InMemoryBucket, tensors: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    """A tensor without memory, or with a name that the format does not support, is refused before a write."""
    with pytest.raises(error, match=message):
        write_tensors(tensors, URI)
    assert [] == bucket.paths_of("write")


def test_extra_state_is_refused(bucket: InMemoryBucket) -> None:
    """Extra state would be lost silently, so it is named in an error."""

    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    with pytest.raises(UnsupportedTensor, match="_extra_state"):
        write_tensors(Counting(2, 2), URI)


def test_tensors_are_requested_within_the_memory_limit(bucket: InMemoryBucket) -> None:
    """Tensors are requested only as the memory setting allows, in addition to the one being written."""
    spec = StoredTensor(torch.uint8, (4 << 20,), 4 << 20)
    outlines = [TensorOutline(f"t{number}", spec) for number in range(30)]
    made = 0
    tensors_ahead: list[int] = []

    def tensors():  # type: ignore[no-untyped-def]
        nonlocal made
        for _ in outlines:
            made += 1
            yield torch.zeros(4 << 20, dtype=torch.uint8)

    done = 0

    def on_progress(count: int) -> None:
        nonlocal done
        done += count
        tensors_ahead.append(made - done // (4 << 20))

    write_stream(outlines, tensors(), URI, StorageSettings(staging_bytes=16 << 20), progress=on_progress)
    assert 30 * (4 << 20) == done
    assert max(tensors_ahead) <= 5
