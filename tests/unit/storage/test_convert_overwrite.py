"""Conversions that replace existing files: no reader mixes old and new weights, and a failure loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rfork.errors import (
    CheckpointError,
    RforkError,
    SettingsError,
    StorageAccessDenied,
    StorageCorrupt,
    StorageError,
    StorageFull,
)
from rfork.schema import Rank
from rfork.storage.blob import BlobEntry
from rfork.storage.convert import convert
from rfork.storage.formats.detect import open_source
from rfork.storage.local import LocalStore, LocalWriter
from rfork.storage.module_io.save import save
from rfork.storage.tensorizer.encryption import Secret
from rfork.storage.tensorizer.writer import write_tensors
from tests.memory_bucket import InMemoryBlobStore, InMemoryBucket, bucket
from tests.tensor_samples import KEY, Raw, raw_tensors

__all__ = ["bucket"]

OLD = {f"layers.{number}": torch.full((10,), float(number)) for number in range(4)}
NEW = {name: tensor + 100 for name, tensor in OLD.items()}
SHARDED = pytest.mark.parametrize("target", ["shards", "set.tensors"])


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    """Write files of `OLD` and of `NEW`."""
    for name, tensors in (("old", OLD), ("new", NEW)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    return str(tmp_path / "old.safetensors"), str(tmp_path / "new.safetensors")


def read_or_none(path: Path) -> Raw | None:
    """Return what a reader gets, or None if the file is refused."""
    try:
        with closing(open_source(path)) as source:
            return raw_tensors(source.stream())
    except RforkError:
        return None


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@SHARDED
def test_no_reader_mixes_old_and_new(
    tmp_path: Path, sources: tuple[str, str], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step, including one at which the writer is killed, a reader gets old, new, or an error."""
    old, new = sources
    destination = tmp_path / "to" / target
    convert(old, str(destination), max_shard_bytes=80)
    seen: list[Raw | None] = []
    write, remove = LocalStore.write, LocalStore.remove

    @contextmanager
    def writing(self: LocalStore, name: str, *, replace: bool = True) -> Iterator[LocalWriter]:
        with write(self, name, replace=replace) as writer:
            yield writer
        seen.append(read_or_none(destination))

    def removing(self: LocalStore, name: str) -> None:
        remove(self, name)
        seen.append(read_or_none(destination))

    monkeypatch.setattr(LocalStore, "write", writing)
    monkeypatch.setattr(LocalStore, "remove", removing)
    convert(new, str(destination), max_shard_bytes=80, force=True)
    assert raw_tensors(NEW) == read_or_none(destination)
    assert None in seen
    assert [] == [each for each in seen if each not in (None, raw_tensors(OLD), raw_tensors(NEW))]


def test_shards_without_an_index_are_refused(tmp_path: Path, sources: tuple[str, str]) -> None:
    """A writer that was killed or is still running leaves shards without an index."""
    convert(sources[0], str(tmp_path / "to"), max_shard_bytes=80)
    (tmp_path / "to" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="no index"):
        open_source(tmp_path / "to")


def test_an_incomplete_set_is_refused(tmp_path: Path, sources: tuple[str, str]) -> None:
    """A set that lacks a file is refused under each of its names."""
    convert(sources[0], str(tmp_path / "set.tensors"), max_shard_bytes=80)
    (tmp_path / "set-00002-of-00002.tensors").unlink()
    for name in ("set.tensors", "set-00001-of-00002.tensors", "set"):
        assert None is read_or_none(tmp_path / name)


@pytest.mark.parametrize(
    ("target", "defect"),
    [
        *(
            (target, defect)
            for target in ("shards", "set.tensors", "one.tensors", "one.safetensors", "snapshot")
            for defect in ("secret", "damage")
        ),
        ("shards", "type"),
        ("one.safetensors", "type"),
    ],
)
def test_an_unreadable_source_keeps_the_target(
    tmp_path: Path, sources: tuple[str, str], target: str, defect: str
) -> None:
    """With force too, a wrong secret, damaged bytes or an unsupported dtype leave the target unchanged."""
    max_shard_bytes = 80 if target in ("shards", "set.tensors") else None
    folder = tmp_path / "to" / ("" if "." in target else target)
    convert(sources[0], str(tmp_path / "to" / target), max_shard_bytes=max_shard_bytes)
    before, source = files(folder), str(tmp_path / "in.tensors")
    dtype = torch.complex64 if defect == "type" else torch.float32
    encryption_key = None if defect == "damage" else KEY
    write_tensors({name: tensor.to(dtype) for name, tensor in NEW.items()}, source, key=encryption_key)
    if defect == "damage":
        data = bytearray(Path(source).read_bytes())
        data[data.index(NEW["layers.0"].numpy().tobytes())] ^= 1
        Path(source).write_bytes(data)
    unlock = {"secret": Secret(key=bytes(32)), "damage": None, "type": Secret(key=KEY)}[defect]
    with pytest.raises(RforkError):
        convert(source, str(tmp_path / "to" / target), max_shard_bytes=max_shard_bytes, force=True, unlock=unlock)
    assert before == files(folder)


@SHARDED
def test_the_first_error_is_raised(bucket: InMemoryBucket, target: str) -> None:
    """A file that cannot be removed afterwards does not hide the first error."""
    write_tensors(NEW, "s3://bucket/in.tensors")

    def fail(operation: str, path: str) -> None:
        if operation == "remove" and bucket.paths_of("commit")[1:]:
            raise StorageError("cannot be removed")
        if operation == "commit" and "00002-of" in path:
            raise StorageFull("no space left")

    bucket.fault = fail
    with pytest.raises(StorageFull, match="no space left"):
        convert("s3://bucket/in.tensors", f"s3://bucket/to/{target}", max_shard_bytes=80)


def test_missing_folders_are_created(tmp_path: Path, sources: tuple[str, str]) -> None:
    """The target's folder is created for each type of file."""
    for name in ("a/y.tensors", "b/y.safetensors", "c/d"):
        convert(sources[0], str(tmp_path / "to" / name))
        assert raw_tensors(OLD) == read_or_none(tmp_path / "to" / name)


def test_writing_needs_no_permission_to_list(bucket: InMemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other names are unknown then; an existing target is not replaced without force."""

    def denied(_: InMemoryBlobStore, prefix: str = "") -> Iterator[BlobEntry]:
        raise StorageAccessDenied(f"{prefix}: access denied")

    monkeypatch.setattr(InMemoryBlobStore, "list", denied)
    save(OLD, "s3://bucket/a.tensors")
    convert("s3://bucket/a.tensors", "s3://bucket/b.tensors")
    with pytest.raises(SettingsError, match="already exists"):
        convert("s3://bucket/a.tensors", "s3://bucket/b.tensors")
    convert("s3://bucket/a.tensors", "s3://bucket/b.tensors", force=True)
    assert {"a.tensors", "b.tensors"} == set(bucket.objects)


def test_other_names_are_listed_before_the_upload(bucket: InMemoryBucket) -> None:
    """A failed listing prevents the upload."""
    bucket.objects["a-00001-of-00002.tensors"] = b"old"
    save(OLD, "s3://bucket/a.tensors")
    assert {"a.tensors"} == set(bucket.objects)


@pytest.mark.parametrize("shared", [False, True], ids=["file", "shared"])
def test_a_damaged_snapshot_is_not_converted(tmp_path: Path, shared: bool) -> None:
    """A damaged snapshot is refused, because its bytes would get new, matching hashes."""
    save(OLD, tmp_path / "rev-1", shared=shared)
    (path,) = [
        found
        for found in tmp_path.rglob("*")
        if found.is_file() and OLD["layers.3"].numpy().tobytes() in found.read_bytes()
    ]
    original = path.read_bytes()
    path.write_bytes(original.replace(OLD["layers.3"].numpy().tobytes(), NEW["layers.3"].numpy().tobytes()))
    with pytest.raises(StorageCorrupt, match="does not match its digest"):
        convert(str(tmp_path / "rev-1"), str(tmp_path / "out.tensors"))
    assert not (tmp_path / "out.tensors").exists()
    path.write_bytes(original)
    convert(str(tmp_path / "rev-1"), str(tmp_path / "out.tensors"))
    assert raw_tensors(OLD) == read_or_none(tmp_path / "out.tensors")


@pytest.mark.parametrize("suffix", [".safetensors", ".tensors"])
def test_a_folder_of_several_ranks_needs_a_rank(tmp_path: Path, suffix: str) -> None:
    """The rank must be selected; a snapshot keeps its rank."""
    for rank, tensors in ((0, OLD), (1, NEW)):
        template = tmp_path / "in" / f"model-rank-%03d{suffix}"
        save(tensors, template, rank=Rank(tp=rank, tp_size=2))
    with pytest.raises(SettingsError, match="contains 2 ranks"):
        convert(str(tmp_path / "in"), str(tmp_path / "out.tensors"))
    with pytest.raises(SettingsError, match="files of several ranks"):
        convert(str(tmp_path / "in" / f"model-rank-%03d{suffix}"), str(tmp_path / "out.tensors"))
    with pytest.raises(SettingsError, match="already names the file of one rank"):
        convert(str(tmp_path / "in" / f"model-rank-000{suffix}"), str(tmp_path / "out.tensors"), rank=1)
    convert(str(tmp_path / "in" / f"model-rank-%03d{suffix}"), str(tmp_path / "model-%d.tensors"), rank=1)
    assert raw_tensors(NEW) == read_or_none(tmp_path / "model-1.tensors")
    for rank in (0, 1):
        convert(str(tmp_path / "in"), str(tmp_path / "snapshot"), rank=rank)
    assert {"model-rank-000.safetensors", "model-rank-001.safetensors"} == {
        path.name for path in (tmp_path / "snapshot").glob("*.safetensors")
    }
