"""Reading ``.tensors`` files that tensorizer has written, and damaged ones."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensorizer import EncryptionParams, TensorSerializer
from torch import nn

from rfork.errors import (
    CheckpointError,
    MissingExtra,
    RforkError,
    SettingsError,
    StorageAccessDenied,
    StorageCorrupt,
    StorageError,
    StorageNotFound,
)
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.formats.detect import open_source
from rfork.storage.tensorizer.encryption import Secret
from rfork.storage.tensorizer.source import TensorizerSource
from rfork.storage.tensorizer.writer import write_tensors
from tests.memory_bucket import InMemoryBucket, bucket
from tests.tensor_samples import KEY, PASSWORD, Raw, raw_tensor, raw_tensors, samples

__all__ = ["bucket"]

URI = "s3://bucket/model.tensors"
SMALL = {"a": torch.arange(5.0), "b.weight": torch.arange(6, dtype=torch.int16).reshape(2, 3)}


def write_file(
    bucket: InMemoryBucket,
    tensors: Mapping[str, torch.Tensor] = SMALL,
    key: bytes | None = None,
    password: str | None = None,
) -> bytes:
    """Write tensors to URI and return the bytes of the file."""
    write_tensors(tensors, URI, key=key, password=password)
    return bucket.objects["model.tensors"]


def read_all(uri: str = URI) -> dict[str, torch.Tensor]:
    """Return every tensor of a file."""
    with TensorizerSource.open(uri) as source:
        return dict(source.stream())


@pytest.mark.parametrize("encryption_type", ["plain", "key", "password"])
def test_files_of_tensorizer_are_read(tmp_path: Path, encryption_type: str) -> None:
    """Names, types, shapes and bytes of a file that tensorizer wrote, encrypted or not."""
    # tensorizer itself cannot encrypt a tensor without bytes.
    tensors = {name: tensor for name, tensor in samples().items() if tensor.numel()}
    encryption = {
        "plain": None,
        "key": EncryptionParams(KEY),
        "password": EncryptionParams.from_string(PASSWORD, opslimit=1, memlimit=8192),
    }[encryption_type]
    serializer = TensorSerializer(tmp_path / "their.tensors", encryption=encryption)
    serializer.write_state_dict({name: tensor.clone() for name, tensor in tensors.items()})
    serializer.close()
    credentials = {"plain": (None, None), "key": (KEY, None), "password": (None, PASSWORD)}[encryption_type]
    with TensorizerSource.open(str(tmp_path / "their.tensors"), key=credentials[0], password=credentials[1]) as source:
        assert raw_tensors(tensors) == raw_tensors(source.stream())
        assert list(tensors) == list(source.specs)


def test_modules_nested_names_and_hollow_tensors_are_read(tmp_path: Path) -> None:
    """A module's own parameters have no leading dot, nested names are joined, and meta tensors are zeros."""
    module = nn.Linear(2, 3)
    for name, write in {
        "module": lambda serializer: serializer.write_module(module),
        "nested": lambda serializer: serializer.write_state_dict(
            {"a": [{"b": torch.ones(1)}], "c": torch.empty(2, device="meta")}
        ),
    }.items():
        serializer = TensorSerializer(tmp_path / f"{name}.tensors")
        write(serializer)
        serializer.close()
    assert raw_tensors(module.state_dict()) == raw_tensors(read_all(str(tmp_path / "module.tensors")))
    assert raw_tensors({"a.0.b": torch.ones(1), "c": torch.zeros(2)}) == raw_tensors(
        read_all(str(tmp_path / "nested.tensors"))
    )


def test_every_truncation_is_refused(bucket: InMemoryBucket) -> None:
    """A file that lacks bytes at its end is refused as truncated."""
    content = write_file(bucket)
    for length in range(len(content)):
        bucket.objects["model.tensors"] = content[:length]
        with pytest.raises(StorageCorrupt):
            read_all()
    assert 0 == bucket.open_blobs


def test_every_truncation_of_tensorizers_own_file_is_refused(bucket: InMemoryBucket, tmp_path: Path) -> None:
    """tensorizer's own loader accepts files that lack up to 3,999 bytes."""
    serializer = TensorSerializer(tmp_path / "model.tensors")
    serializer.write_state_dict({"a": torch.arange(1500.0)})
    serializer.close()
    content = (tmp_path / "model.tensors").read_bytes()
    front = len(content) - 6200
    for length in (
        *range(0, front, 14_983),
        *range(front, len(content) - 99, 31),
        *range(len(content) - 99, len(content)),
    ):
        bucket.objects["model.tensors"] = content[:length]
        with pytest.raises(StorageCorrupt):
            read_all()


@pytest.mark.parametrize("key", [None, KEY])
def test_a_flipped_bit_is_refused_and_its_tensor_named(bucket: InMemoryBucket, key: bytes | None) -> None:
    """A changed byte of a tensor is never read; one of its header is refused or has no effect."""
    write_tensors(SMALL, URI, key=key)
    content, right = bucket.objects["model.tensors"], raw_tensors(SMALL)
    with TensorizerSource.open(URI, key=key) as source:
        entries = [stored.entry for stored in source._tensors.values()]
    for entry in entries:
        for at in range(entry.header, entry.data + entry.length):
            changed = bytearray(content)
            changed[at] ^= 0x10
            bucket.objects["model.tensors"] = bytes(changed)
            with TensorizerSource.open(URI, key=key) as source:
                message, found = read_or_error(source)
            assert f": {entry.name}" in message or (at < entry.data and right == found)


def read_or_error(source: TensorizerSource) -> tuple[str, Raw]:
    """Return the error that a source raises, or its content."""
    try:
        return "", raw_tensors(source.stream())
    except (StorageCorrupt, StorageAccessDenied) as error:
        return str(error), {}


def test_a_flipped_bit_of_the_index_is_refused_or_harmless(bucket: InMemoryBucket) -> None:
    """The index is compared with each tensor's own header, which is hashed."""
    content = write_file(bucket)
    right = raw_tensors(SMALL)
    for at in range(len(content) - sum(tensor.nbytes for tensor in SMALL.values()) - 8):
        for bit in (0, 6):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            bucket.objects["model.tensors"] = bytes(changed)
            try:
                found = raw_tensors(read_all())
            except (StorageCorrupt, CheckpointError, StorageAccessDenied):
                continue
            assert found.items() <= right.items()


@pytest.mark.parametrize(
    ("written", "key", "password", "error_type", "message"),
    [
        ("password", None, "wrong", StorageAccessDenied, "wrong key or password"),
        ("password", bytes(32), None, StorageAccessDenied, "wrong key or password"),
        ("password", None, None, StorageAccessDenied, "is encrypted"),
        ("key", bytes(32), None, StorageAccessDenied, "wrong key or password"),
        ("key", None, "wrong", StorageAccessDenied, "encrypted with a key"),
        ("plain", KEY, None, CheckpointError, "is not encrypted"),
        ("plain", b"short", None, SettingsError, "must have 32 bytes"),
        ("plain", KEY, "both", SettingsError, "not both"),
        ("plain", None, "", SettingsError, "password is empty"),
    ],
)
def test_a_wrong_secret_is_a_one_line_error(
    bucket: InMemoryBucket,
    written: str,
    key: bytes | None,
    password: str | None,
    error_type: type[RforkError],
    message: str,
) -> None:
    """The error states the problem without key or password."""
    write_file(bucket, SMALL, KEY if written == "key" else None, PASSWORD if written == "password" else None)
    with pytest.raises(error_type, match=message) as raised:
        dict(TensorizerSource.open(URI, key=key, password=password).stream())
    assert 1 == len(str(raised.value).splitlines())
    assert "wrong'" not in str(raised.value)
    assert "wrong" not in repr(Secret(password="wrong"))


def test_one_tensor_is_read_separately(bucket: InMemoryBucket) -> None:
    """Specs need the index, and a tensor its own bytes: no others are read."""
    write_file(bucket, {f"t{number}": torch.full((100_000,), number) for number in range(20)})
    bucket.log.clear()
    with TensorizerSource.open(URI) as source:
        read = counted(source)
        assert torch.int64 == source.specs["t7"].dtype
        assert (100_000,) == source.specs["t7"].shape
        assert read == []
        assert raw_tensor(torch.full((100_000,), 7)) == raw_tensor(source["t7"])
        assert 800_000 <= sum(read) <= 801_000
        with pytest.raises(KeyError):
            source["t99"]


def counted(source: TensorizerSource) -> list[int]:
    """Record the bytes of each read from now on."""
    read: list[int] = []
    blob = source._blobs[0]
    real = blob.read

    def count(offset: int, into: Sequence[memoryview]) -> None:
        read.append(sum(view.nbytes for view in into))
        real(offset, into)

    blob.read = count  # type: ignore[method-assign]
    return read


@pytest.mark.parametrize("key", [None, KEY])
def test_tensors_of_all_types_are_filled(bucket: InMemoryBucket, key: bytes | None) -> None:
    """Another dtype, gaps, ties and parameters: each tensor has the stored values."""
    stored = {"a": torch.arange(6.0), "b": torch.arange(6.0), "c": torch.arange(6.0), "d": torch.ones(2, 3)}
    write_tensors(stored, URI, key=key)
    tied = torch.zeros(6)
    into = {
        "a": tied,
        "b": tied,
        "c": nn.Parameter(torch.zeros(12, dtype=torch.bfloat16))[::2],
        "d": nn.Parameter(torch.zeros(3, 2)).t(),
    }
    message: list[int] = []
    with TensorizerSource.open(URI, key=key) as source, torch.no_grad():
        source.read_into(into, message.append)
    assert raw_tensors({**stored, "c": stored["c"].to(torch.bfloat16)}) == raw_tensors(into)
    assert 96 == sum(message)


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"a": torch.zeros(4)}, "shape"),
        ({"x": torch.zeros(4)}, "lacks x"),
        ({"a": torch.zeros(5, device="meta")}, "no memory"),
        ({"a": torch.zeros(5, dtype=torch.int32)}, "float32"),
    ],
)
def test_a_mismatch_is_refused_before_a_byte_is_read(
    bucket: InMemoryBucket, into: dict[str, torch.Tensor], message: str
) -> None:
    """A name, shape or dtype that does not match is a CheckpointError, and nothing is read."""
    write_file(bucket)
    with TensorizerSource.open(URI) as source:
        read = counted(source)
        with pytest.raises(CheckpointError, match=message):
            source.read_into(into)
        assert [] == read


def test_a_stream_returns_requested_names_and_can_be_closed(bucket: InMemoryBucket) -> None:
    """Missing names are an error; a stream that is dropped, or whose source is closed, ends."""
    tensors = {f"t{number}": torch.full((1 << 20,), float(number)) for number in range(20)}
    write_file(bucket, tensors)
    small = StorageSettings(staging_bytes=16 << 20, concurrency=2)
    source = TensorizerSource.open(URI, settings=small)
    assert {"t3": raw_tensor(tensors["t3"])} == raw_tensors(source.stream(["t3"]))
    with pytest.raises(CheckpointError, match="lacks other"):
        source.stream(["other"])
    begun = source.stream()
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    begun = source.stream()
    next(begun)
    source.close()
    with pytest.raises(StorageError, match="closed"):
        dict(begun)
    assert 0 == bucket.open_blobs


def test_sets_folders_and_ranks_read_as_one_source(bucket: InMemoryBucket) -> None:
    """A numbered set is opened by the name of any of its files, by its own name, or by its folder."""
    write_tensors(SMALL, "s3://bucket/set/model.tensors", max_file_bytes=1)
    write_tensors(SMALL, "s3://bucket/ranks/model-rank-003.tensors")
    rank = Rank(tp=1, tp_size=2, pp=1, pp_size=2)
    for uri in ("set/model.tensors", "set/model-00002-of-00002.tensors", "set", "set/"):
        assert raw_tensors(SMALL) == raw_tensors(read_all(f"s3://bucket/{uri}"))
    with TensorizerSource.open("s3://bucket/ranks/model-rank-%03d.tensors", rank=rank) as source:
        assert raw_tensors(SMALL) == raw_tensors(source.stream())
    with closing(open_source("s3://bucket/ranks", rank=rank)) as source:
        assert raw_tensors(SMALL) == raw_tensors(source.stream())


def test_an_incomplete_set_and_a_folder_of_two_models_are_refused(bucket: InMemoryBucket) -> None:
    """An incomplete model and an ambiguous folder are errors."""
    write_tensors(SMALL, URI, max_file_bytes=1)
    del bucket.objects["model-00002-of-00002.tensors"]
    with pytest.raises(StorageNotFound, match="00002-of-00002"):
        TensorizerSource.open(URI)
    write_tensors(SMALL, "s3://bucket/other.tensors")
    with pytest.raises(CheckpointError, match="contains 2 models"):
        TensorizerSource.open("s3://bucket/")
    with pytest.raises(StorageNotFound):
        TensorizerSource.open("s3://bucket/none/")
    assert 0 == bucket.open_blobs


def test_a_missing_libsodium_names_the_extra(bucket: InMemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encrypted files need the tensorizer extra; plain ones are read without it."""
    write_file(bucket)
    real = builtins.__import__

    def refuse(name: str, *rest: object) -> ModuleType:
        if name in ("libnacl", "tensorizer"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert raw_tensors(SMALL) == raw_tensors(read_all())
    with pytest.raises(MissingExtra, match="libsodium") as raised:
        write_file(bucket, key=KEY)
    assert "pip install 'rfork[tensorizer]'" == raised.value.hint
