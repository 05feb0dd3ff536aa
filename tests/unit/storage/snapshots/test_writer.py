"""Writing snapshots: after any failure, no reader gets wrong weights."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from rfork.errors import RforkError, SettingsError, SourceWeightsChanged, StorageError, StorageFull
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB
from rfork.image.layout import allocate_buffer
from rfork.image.memory import Image
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.snapshots.writer import WriteReport, write_snapshot
from tests.memory_bucket import InMemoryBucket, bucket

__all__ = ["bucket"]

REVISION = "s3://bucket/tiny/rev-1/"
NEXT_REVISION = "s3://bucket/tiny/rev-2/"
NAME = "tiny/rev-1/model-rank-000.safetensors"
HEADER = 4096
SERIAL_SETTINGS = StorageSettings(concurrency=1)
FORMS = pytest.mark.parametrize("shared", [False, True], ids=["file", "shared"])


def make_image(seed: int, *, last: float = 0.0) -> Image:
    """Return an image of three chunks of 1 MiB: two of the seed's numbers, and one filled with `last`."""
    generator = torch.Generator().manual_seed(seed)
    return image_from_tensors({"a": torch.randn(MIB // 2, generator=generator), "b": torch.full((MIB // 4,), last)})


IMAGE, OTHER_IMAGE = make_image(1), make_image(2)
MANIFEST, OTHER_MANIFEST = IMAGE.manifest(), OTHER_IMAGE.manifest()


def weights_at(uri: str) -> str | None:
    """Return the weights_id of an image filled from a URI, or None if the snapshot is refused."""
    buffer, _ = allocate_buffer(IMAGE.layout)
    target = Image(IMAGE.layout, [buffer])
    try:
        snapshot = Snapshot.open(uri, IMAGE.layout, settings=SERIAL_SETTINGS)
    except RforkError:
        return None
    try:
        snapshot.fill(target)
    finally:
        snapshot.close()
    return target.manifest().weights_id


def test_the_manifest_is_written_last(bucket: InMemoryBucket) -> None:
    """The file is header and image; its manifest is written last."""
    progress_bytes = list[int]()
    written = write_snapshot(IMAGE, MANIFEST, REVISION, progress=progress_bytes.append)
    uri = "s3://bucket/tiny/rev-1/model-rank-000.safetensors"
    assert WriteReport(uri, MANIFEST.weights_id, HEADER + 3 * MIB, 0) == written
    assert 3 * MIB == sum(progress_bytes)
    assert [NAME, f"{NAME}.manifest.json"] == bucket.paths_of("commit") == list(bucket.objects)


def test_equal_chunks_are_stored_once(bucket: InMemoryBucket) -> None:
    """Another rank and another revision write only differing chunks, and each is read back completely."""
    first = write_snapshot(IMAGE, MANIFEST, REVISION, shared=True)
    other_rank = write_snapshot(IMAGE, MANIFEST, REVISION, shared=True, rank=Rank(tp=1, tp_size=2))
    other_revision = write_snapshot(OTHER_IMAGE, OTHER_MANIFEST, NEXT_REVISION, shared=True)
    again = write_snapshot(OTHER_IMAGE, OTHER_MANIFEST, NEXT_REVISION, shared=True)
    snapshot_bytes = HEADER + 3 * MIB
    assert snapshot_bytes == first.written
    assert 0 == first.reused_bytes
    assert 0 == other_rank.written
    assert snapshot_bytes == other_rank.reused_bytes
    assert HEADER + 2 * MIB == other_revision.written
    assert MIB == other_revision.reused_bytes
    assert 0 == again.written
    assert snapshot_bytes == again.reused_bytes
    assert MANIFEST.weights_id == weights_at(REVISION)
    assert OTHER_MANIFEST.weights_id == weights_at(NEXT_REVISION)
    assert 5 + 2 == sum(name.startswith("tiny/chunks/") for name in bucket.objects)


def test_equal_chunks_of_one_image_are_stored_once(bucket: InMemoryBucket) -> None:
    """Three chunks of zeros are one object; all bytes are reported."""
    image, progress_bytes = image_from_tensors({"a": torch.zeros(3 * MIB // 4)}), list[int]()
    written = write_snapshot(image, image.manifest(), REVISION, shared=True, progress=progress_bytes.append)
    assert HEADER + MIB == written.written
    assert 2 * MIB == written.reused_bytes
    assert 3 * MIB == sum(progress_bytes)


def test_shared_chunks_are_in_the_folder_of_the_caller(bucket: InMemoryBucket) -> None:
    """Next to the revision, further up, or at the top of a bucket that is the revision."""
    for uri, chunks in ((REVISION, "../chunks/"), (REVISION, "../../all/"), ("s3://bucket/", "../chunks/")):
        write_snapshot(IMAGE, MANIFEST, uri, shared=True, chunks=chunks)
    folders = {name.rsplit("/", 2)[0] for name in bucket.objects if "manifest" not in name}
    assert {"tiny/chunks", "all", "chunks"} == folders
    assert [MANIFEST.weights_id] * 2 == [weights_at(REVISION), weights_at("s3://bucket/")]


@pytest.mark.parametrize("chunks", ["chunks", "../../../c/", "/c/", "../a/b/", "../.hidden/"])
def test_an_invalid_folder_of_chunks_is_refused(bucket: InMemoryBucket, chunks: str) -> None:
    """It is refused before anything is written."""
    with pytest.raises(SettingsError):
        write_snapshot(IMAGE, MANIFEST, REVISION, shared=True, chunks=chunks)
    assert [] == bucket.log


def test_a_truncated_chunk_is_written_again(bucket: InMemoryBucket) -> None:
    """An object with the wrong size counts as missing."""
    write_snapshot(IMAGE, MANIFEST, REVISION, shared=True)
    name = next(name for name in bucket.objects if name.endswith(f"-{MIB}"))
    bucket.objects[name] = b""
    assert MIB == write_snapshot(IMAGE, MANIFEST, REVISION, shared=True).written
    assert MANIFEST.weights_id == weights_at(REVISION)


class _WriterKilled(Exception):
    """Raised where the process is killed."""


OLD, NEW = OTHER_MANIFEST.weights_id, MANIFEST.weights_id


@pytest.mark.parametrize(
    ("before", "shared", "allowed"),
    [
        (None, False, [None]),
        ("file", False, [OLD, None]),  # the data is replaced before its manifest
        ("shared", False, [OLD]),
        (None, True, [None, NEW]),
        ("file", True, [OLD, None, NEW]),
        ("shared", True, [OLD, NEW]),  # only the manifest is replaced
    ],
)
def test_a_writer_may_die_at_any_step(
    bucket: InMemoryBucket, before: str | None, shared: bool, allowed: list[str | None]
) -> None:
    """A reader gets the old or the new weights or an error, never a mixture."""
    if before is not None:
        write_snapshot(OTHER_IMAGE, OTHER_MANIFEST, REVISION, shared=before == "shared", settings=SERIAL_SETTINGS)
    start, steps, seen = dict(bucket.objects), 0, list[str | None]()
    while True:
        bucket.objects, left = dict(start), steps

        def kill_writer(operation: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:  # from here on nothing is written or removed: the process is dead
                raise _WriterKilled(operation)

        bucket.fault = kill_writer
        try:
            write_snapshot(IMAGE, MANIFEST, REVISION, shared=shared, settings=SERIAL_SETTINGS)
        except _WriterKilled:
            bucket.fault = None
            seen.append(weights_at(REVISION))
            steps += 1
        else:
            bucket.fault = None
            break
    assert allowed == list(dict.fromkeys(seen))
    assert NEW == weights_at(REVISION)


@FORMS
@pytest.mark.parametrize("last", [False, True], ids=["data", "manifest"])
def test_a_full_disk_leaves_no_snapshot(bucket: InMemoryBucket, shared: bool, last: bool) -> None:
    """The store's error is raised, and the writer's marker is removed."""

    def full(operation: str, path: str) -> None:
        if operation == "write" and (path.endswith("manifest.json") if last else len(bucket.paths_of("write")) > 3):
            raise StorageFull(f"{path}: no space left")

    bucket.fault = full
    with pytest.raises(StorageFull, match="no space left"):
        write_snapshot(IMAGE, MANIFEST, REVISION, shared=shared)
    bucket.fault = None
    assert weights_at(REVISION) is None
    assert [] == [name for name in bucket.objects if "rev-1" in name]


@FORMS
def test_weights_that_change_during_the_write_are_an_error(bucket: InMemoryBucket, shared: bool) -> None:
    """Written bytes are digested again: bytes that differ from the manifest are an error."""
    changing = make_image(1)
    manifest = changing.manifest()

    def change(count: int) -> None:
        changing.regions[0][-1] += 1

    with pytest.raises(SourceWeightsChanged, match="chunk 1 differs"):
        write_snapshot(changing, manifest, REVISION, shared=shared, progress=change, settings=SERIAL_SETTINGS)
    assert weights_at(REVISION) is None
    assert [] == [name for name in bucket.objects if "rev-1" in name]


def test_no_shared_snapshot_is_written_during_a_deletion(bucket: InMemoryBucket) -> None:
    """A writer that would reuse chunks during their deletion gives up."""
    bucket.objects["tiny/chunks/removing-" + "0" * 32] = b""
    with pytest.raises(StorageError, match="another process is deleting chunks here"):
        write_snapshot(IMAGE, MANIFEST, REVISION, shared=True)
    assert ["tiny/chunks/removing-" + "0" * 32] == list(bucket.objects)


def test_a_writer_whose_marker_was_removed_stops(bucket: InMemoryBucket) -> None:
    """A cleanup considered it dead and may have deleted its chunks."""

    def remove_marker(count: int) -> None:
        for name in [name for name in bucket.objects if name.endswith(".pending")]:
            del bucket.objects[name]

    with pytest.raises(StorageError, match="removed leftovers"):
        write_snapshot(IMAGE, MANIFEST, REVISION, shared=True, progress=remove_marker)
    assert None is weights_at(REVISION)


def test_a_read_only_store_is_refused() -> None:
    """No snapshot can be written to a web server."""
    with pytest.raises(SettingsError, match="read-only"):
        write_snapshot(IMAGE, MANIFEST, "https://127.0.0.1:1/models/")


def test_a_file_instead_of_the_folder_is_a_storage_error(tmp_path: Path) -> None:
    """It is a storage error of one line."""
    (tmp_path / "models").write_text("")
    with pytest.raises(StorageError, match="model-rank-000"):
        write_snapshot(IMAGE, MANIFEST, tmp_path / "models")


def test_concurrent_writers_of_one_snapshot_do_not_mix(tmp_path: Path) -> None:
    """The last one has written a complete snapshot, and no other file is left."""
    path, begun = tmp_path / "model.safetensors", False

    def write_concurrently(nbytes: int) -> None:
        nonlocal begun
        if not begun:
            begun = True
            write_snapshot(OTHER_IMAGE, OTHER_MANIFEST, path)

    write_snapshot(IMAGE, MANIFEST, path, progress=write_concurrently)
    manifest = path.with_name(f"{path.name}.manifest.json")
    assert MANIFEST.weights_id == weights_at(str(path))
    assert {path, manifest} == set(tmp_path.iterdir())


def test_an_interrupted_writer_cleans_up(tmp_path: Path) -> None:
    """Ctrl-C during a write leaves the folder unchanged."""

    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        write_snapshot(IMAGE, MANIFEST, tmp_path / "rev-1", progress=interrupt)
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]
