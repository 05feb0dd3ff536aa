"""Snapshots: opened, read chunk by chunk or at once, and refused if they are damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rfork.errors import CheckpointError, RforkError, SettingsError, StorageCorrupt, StorageNotFound
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.schema import Rank, StorageCandidate
from rfork.storage.base import to_candidate
from rfork.storage.snapshots.entry import snapshot_location, snapshot_name
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.snapshots.writer import write_snapshot
from tests.memory_bucket import InMemoryBucket, bucket

__all__ = ["bucket"]

REVISION = "s3://bucket/tiny/rev-1/"
NAME = "tiny/rev-1/model-rank-000.safetensors"
HEADER = 4096


def make_image(seed: int) -> Image:
    """Return an image of two and a fraction chunks in three tensors."""
    generator = torch.Generator().manual_seed(seed)
    return image_from_tensors(
        {
            "a": torch.randn(MIB // 4 + 3, generator=generator),
            "b": torch.randn(2, MIB // 8, generator=generator),
            "c": torch.randint(0, 256, (77,), dtype=torch.uint8, generator=generator),
        }
    )


IMAGE = make_image(1)
MANIFEST = IMAGE.manifest()
FORMS = pytest.mark.parametrize("shared", [False, True], ids=["file", "shared"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a snapshot of HELD to a file."""
    written = tmp_path / "model.safetensors"
    write_snapshot(IMAGE, MANIFEST, written)
    return written


def manifest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.manifest.json")


def open_(path: Path, image: Image = IMAGE) -> Snapshot:
    return Snapshot.open(path.as_uri(), image.layout)


@FORMS
def test_every_chunk_is_read_back(bucket: InMemoryBucket, shared: bool) -> None:
    """An image filled chunk by chunk has the written manifest; nothing stays open."""
    write_snapshot(IMAGE, MANIFEST, REVISION, shared=shared)
    target, snapshot = make_image(2), Snapshot.open(REVISION, IMAGE.layout)
    for begin, end in target.layout.chunks:
        with target.writable(begin, end) as views:
            snapshot.read(begin, end, views)
    snapshot.close()
    assert MANIFEST.weights_id == snapshot.manifest.weights_id
    assert MANIFEST.digests == target.manifest().digests
    assert 0 == bucket.open_blobs


@FORMS
def test_an_image_is_filled_at_once(bucket: InMemoryBucket, shared: bool) -> None:
    """Every byte is reported, and every chunk as soon as it is verified."""
    write_snapshot(IMAGE, MANIFEST, REVISION, shared=shared)
    target, progress_bytes, chunks = make_image(2), list[int](), list[int]()
    snapshot = Snapshot.open(REVISION, IMAGE.layout)
    snapshot.fill(target, progress=progress_bytes.append, on_chunk=chunks.append)
    snapshot.close()
    assert MANIFEST.digests == target.manifest().digests
    assert IMAGE.layout.image_bytes == sum(progress_bytes)
    assert [0, 1, 2] == sorted(chunks)
    assert 0 == bucket.open_blobs


def test_more_chunks_than_open_objects_are_filled_in_batches(
    bucket: InMemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared snapshot with too many chunks is filled in batches."""
    monkeypatch.setattr("rfork.storage.snapshots.snapshot.MAX_OPEN", 1)
    monkeypatch.setattr("rfork.storage.snapshots.chunked_blob.MAX_OPEN", 1)
    write_snapshot(IMAGE, MANIFEST, REVISION, shared=True)
    target, snapshot = make_image(2), Snapshot.open(REVISION, IMAGE.layout)
    snapshot.fill(target)
    assert MANIFEST.digests == target.manifest().digests
    assert 1 == bucket.open_blobs
    snapshot.close()
    assert 0 == bucket.open_blobs


@FORMS
def test_a_corrupt_chunk_is_named(bucket: InMemoryBucket, shared: bool) -> None:
    """A chunk that does not match twice raises StorageCorrupt after the other chunks were offered."""
    write_snapshot(IMAGE, MANIFEST, REVISION, shared=shared)
    name = f"tiny/chunks/{MANIFEST.digests[1].hex()[:2]}/{MANIFEST.digests[1].hex()}-{MIB}" if shared else NAME
    data = bytearray(bucket.objects[name])
    data[5 if shared else HEADER + MIB + 5] ^= 1
    bucket.objects[name] = bytes(data)
    snapshot, chunks = Snapshot.open(REVISION, IMAGE.layout), list[int]()
    with pytest.raises(StorageCorrupt, match=r"model-rank-000\.safetensors: chunk 1 \(bytes 1052672-2101248\)"):
        snapshot.fill(make_image(2), on_chunk=chunks.append)
    snapshot.close()
    assert 1 not in chunks


def test_a_chunk_that_was_wrong_once_is_read_again(bucket: InMemoryBucket) -> None:
    """A chunk that was corrupted in transit is correct the second time."""
    write_snapshot(IMAGE, MANIFEST, REVISION)
    target, snapshot = make_image(2), Snapshot.open(REVISION, IMAGE.layout)
    right = bucket.objects[NAME]
    reads = len(bucket.paths_of("read"))
    digest, corrupted = Image.digest, list[int]()

    def wrong_once(image: Image, chunk: int) -> bytes:
        if chunk == 1 and not corrupted:
            corrupted.append(chunk)
            return bytes(16)
        return digest(image, chunk)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Image, "digest", wrong_once)
        snapshot.fill(target)
    snapshot.close()
    assert MANIFEST.digests == target.manifest().digests
    assert [1] == corrupted
    assert len(bucket.paths_of("read")) - reads > 1
    assert bucket.objects[NAME] is right


def test_a_missing_chunk_is_named(bucket: InMemoryBucket) -> None:
    """A shared snapshot that lacks an object is damaged."""
    write_snapshot(IMAGE, MANIFEST, REVISION, shared=True)
    lost = f"{MANIFEST.digests[2].hex()}-{IMAGE.layout.image_bytes - 2 * MIB}"
    del bucket.objects[f"tiny/chunks/{lost[:2]}/{lost}"]
    snapshot = Snapshot.open(REVISION, IMAGE.layout)
    with pytest.raises(StorageCorrupt, match=f": missing object s3://bucket/tiny/chunks/../{lost}"):
        snapshot.fill(make_image(2))
    snapshot.close()


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        (Rank(), "model-rank-000.safetensors"),
        (Rank(tp=1, tp_size=4, pp=2, pp_size=3), "model-rank-009.safetensors"),
        (Rank(role="speculative", tp=1, tp_size=2), "speculative-rank-001.safetensors"),
        (Rank(tp=3, tp_size=4, ep=1, ep_size=2), "model-rank-003.safetensors"),
        (Rank(ep=5, ep_size=8, dp=5), "model-rank-000-ep-005.safetensors"),
        (Rank(dp=3), "model-rank-000.safetensors"),
    ],
)
def test_the_name_of_a_snapshot_identifies_the_rank(rank: Rank, name: str) -> None:
    """A name identifies the rank; data-parallel replicas share one."""
    assert name == snapshot_name(rank)


def test_a_uri_is_a_file_or_a_folder() -> None:
    """A URI that ends with .safetensors is one file; any other is a folder with one file per rank."""
    expected = [
        ("s3://b/llama/", "model-rank-000.safetensors"),
        ("s3://b/llama/", "model-rank-000.safetensors"),
        ("https://h/llama/", "x.safetensors?signature=1"),
        ("file:///models/", "x.safetensors"),
    ]
    uris = [
        "s3://b/llama",
        "s3://b/llama/",
        "https://h/llama/x.safetensors?signature=1",
        "/models/x.safetensors",
    ]
    assert expected == [(folder.uri, name) for folder, name in map(snapshot_location, uris)]


def test_an_offer_names_the_weights(path: Path) -> None:
    """The planner is notified of the snapshot's weights before anything is read."""
    snapshot = open_(path)
    snapshot.close()
    weights_id = MANIFEST.weights_id
    expected = StorageCandidate(kind="snapshot", uri=path.as_uri(), origin=weights_id, weights_id=weights_id)
    assert expected == to_candidate(snapshot)


def test_a_snapshot_is_a_safetensors_file(path: Path) -> None:
    """The tools of safetensors read the tensors."""
    read = load_file(path)
    expected = {name: list(tensor.shape) for name, tensor in read.items()}
    assert {"a": [MIB // 4 + 3], "b": [2, MIB // 8], "c": [77]} == expected


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def without_manifest(path: Path) -> None:
    manifest_path(path).unlink()


def broken_manifest(path: Path) -> None:
    manifest_path(path).write_text("{}")


def forged_manifest(path: Path) -> None:
    text = manifest_path(path).read_text()
    manifest_path(path).write_text(text.replace(MANIFEST.digests[0].hex(), "0" * 32))


def incomplete_manifest(path: Path) -> None:
    text = manifest_path(path).read_text()
    manifest_path(path).write_text(text.replace(f'"{MANIFEST.digests[0].hex()}",', ""))


def manifest_of_another(path: Path) -> None:
    other_path = path.with_name("other.safetensors")
    write_snapshot(make_image(2), make_image(2).manifest(), other_path)
    manifest_path(other_path).replace(manifest_path(path))


def damaged_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b'"a"') + 1] = ord("z")
    path.write_bytes(data)


def plain_file(path: Path) -> None:
    path.write_bytes(b"hello")


def data_missing(path: Path) -> None:
    path.unlink()


def all_missing(path: Path) -> None:
    path.unlink()
    manifest_path(path).unlink()


@pytest.mark.parametrize(
    ("corrupt", "error", "message"),
    [
        (cut_short, StorageCorrupt, "according to its manifest"),
        (without_manifest, CheckpointError, "has no manifest"),
        (broken_manifest, StorageCorrupt, "not a manifest"),
        (forged_manifest, StorageCorrupt, "do not match"),
        (incomplete_manifest, StorageCorrupt, "2 digests"),
        (manifest_of_another, StorageCorrupt, "different weights"),
        (damaged_header, StorageCorrupt, "header does not match"),
        (plain_file, StorageCorrupt, "has 5 bytes"),
        (data_missing, StorageNotFound, "model.safetensors"),
        (all_missing, StorageNotFound, "no snapshot at"),
    ],
)
def test_a_damaged_snapshot_is_refused(
    path: Path, corrupt: Callable[[Path], None], error: type[RforkError], message: str
) -> None:
    """Each is refused when it is opened, and the error states the defect."""
    corrupt(path)
    with pytest.raises(error, match=message) as raised:
        open_(path)
    assert error is raised.type


def test_the_first_difference_from_another_layout_is_named(path: Path) -> None:
    """The first difference is named."""
    other = image_from_tensors({"a": torch.zeros(3), "b": torch.zeros(2, MIB // 8), "c": torch.zeros(77)})
    with pytest.raises(CheckpointError, match="first difference: a: here"):
        open_(path, other)


def test_an_image_with_another_layout_is_not_filled(path: Path) -> None:
    """A snapshot opened for one layout cannot fill another."""
    snapshot = open_(path)
    with pytest.raises(ValueError, match="another layout"):
        snapshot.fill(image_from_tensors({"a": torch.zeros(3)}))
    snapshot.close()


def test_an_unknown_scheme_is_a_user_error() -> None:
    """A URI with an unknown scheme is a settings error."""
    with pytest.raises(SettingsError, match="unknown scheme"):
        Snapshot.open("ftp://host/model", IMAGE.layout)
