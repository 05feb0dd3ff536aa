"""Snapshots in a repository: listed, verified and removed, and leftovers of dead writers deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rfork.errors import SettingsError, StorageCorrupt
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.location import Location
from rfork.storage.snapshots.entry import SnapshotEntry, read_entry
from rfork.storage.snapshots.repository import DeleteResult, Listing, Repository, remove_leftovers, remove_snapshots
from rfork.storage.snapshots.verifier import SnapshotVerifier, VerifyResult
from rfork.storage.snapshots.writer import write_snapshot
from tests.memory_bucket import InMemoryBucket, bucket

__all__ = ["bucket"]

ROOT = Location.parse("s3://bucket/tiny/")
HEADER = 4096
SNAPSHOT_BYTES = HEADER + 3 * MIB
PENDING = f"tiny/rev-9/model-rank-000.safetensors.manifest.json.{'0' * 32}.pending"


def make_image(seed: int) -> Image:
    """Return an image of three chunks of 1 MiB: two of the seed's numbers, and one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    return image_from_tensors({"a": torch.randn(MIB // 2, generator=generator), "b": torch.zeros(MIB // 4)})


def write(revision: str, seed: int, *, shared: bool = True, tp: int = 0) -> None:
    image = make_image(seed)
    rank = Rank(tp=tp, tp_size=2)
    uri = f"{ROOT.uri}{revision}/"
    write_snapshot(image, image.manifest(), uri, rank=rank, model="tiny", shared=shared)


def contents() -> Listing:
    return Repository(ROOT).contents()


def in_revision(revision: str) -> list[SnapshotEntry]:
    folder = Repository(ROOT.child(f"{revision}/"))
    return folder.entries_in(folder.contents())


def verified() -> list[VerifyResult]:
    verifier = SnapshotVerifier(StorageSettings(concurrency=2))
    return [verifier.verify(found) for found in contents().snapshots]


def chunk_names(bucket: InMemoryBucket) -> list[str]:
    return [name for name in bucket.objects if name.startswith("tiny/chunks/")]


def test_a_repository_is_listed(bucket: InMemoryBucket) -> None:
    """Each snapshot is listed with its rank, its form and the share of chunks in common."""
    write("rev-1", 1)
    write("rev-2", 2, tp=1)
    write("rev-3", 3, shared=False)
    found = contents()
    expected = [
        ("s3://bucket/tiny/rev-1/model-rank-000.safetensors", "tiny", 0, SNAPSHOT_BYTES, False, MIB, None),
        ("s3://bucket/tiny/rev-2/model-rank-001.safetensors", "tiny", 1, SNAPSHOT_BYTES, False, MIB, None),
        ("s3://bucket/tiny/rev-3/model-rank-000.safetensors", "tiny", 0, SNAPSHOT_BYTES, True, 0, None),
    ]
    assert expected == [
        (
            each.uri,
            each.manifest_file.model,
            each.manifest_file.rank.tp,
            each.size,
            each.manifest_file.chunks is None,
            each.shared,
            each.problem,
        )
        for each in found.snapshots
        if each.manifest_file is not None
    ]
    assert () == found.leftovers
    assert 0 == bucket.open_blobs


def test_chunks_above_the_folder_are_checked(bucket: InMemoryBucket) -> None:
    """A listing of a single revision checks that its chunks exist."""
    write("rev-1", 1)
    assert [None] == [found.problem for found in in_revision("rev-1")]
    del bucket.objects[chunk_names(bucket)[0]]
    assert ["1 of 4 chunks"] == [(found.problem or "")[:13] for found in in_revision("rev-1")]


def test_a_listing_shows_obvious_damage(bucket: InMemoryBucket) -> None:
    """Missing data, data of another size and an invalid manifest are shown."""
    for revision in ("rev-1", "rev-2", "rev-3"):
        write(revision, 1, shared=False)
    del bucket.objects["tiny/rev-1/model-rank-000.safetensors"]
    bucket.objects["tiny/rev-2/model-rank-000.safetensors"] = b"x"
    bucket.objects["tiny/rev-3/model-rank-000.safetensors.manifest.json"] = b"{}"
    expected = [
        "the data is missing",
        f"the data has 1 bytes instead of {SNAPSHOT_BYTES}",
        "is not a manifest",
    ]
    found = contents().snapshots
    assert [True] * 3 == [message in (each.problem or "") for message, each in zip(expected, found, strict=True)]


def test_an_intact_snapshot_is_verified(bucket: InMemoryBucket) -> None:
    """Every byte is read in pieces; shared chunks are read once."""
    write("rev-1", 1)
    write("rev-2", 1, tp=1)
    write("rev-3", 1, shared=False)
    bucket.log.clear()
    results, weights_id = verified(), make_image(1).manifest().weights_id
    assert [(weights_id, 3, 3 * MIB, ())] * 3 == [
        (result.weights_id, result.chunks, result.nbytes, result.mismatches) for result in results
    ]
    chunk_reads = [path for path in bucket.paths_of("read") if path.endswith(f"-{MIB}")]
    assert 3 == len(set(chunk_reads))
    assert 0 == bucket.open_blobs
    assert len(chunk_reads) == len(set(chunk_reads))


@pytest.mark.parametrize("shared", [False, True], ids=["file", "shared"])
def test_damage_is_named(bucket: InMemoryBucket, shared: bool) -> None:
    """A changed byte is reported with its chunk, and a missing object by its name."""
    write("rev-1", 1, shared=shared)
    digest = make_image(1).manifest().digests[1].hex()
    name = f"tiny/chunks/{digest[:2]}/{digest}-{MIB}" if shared else "tiny/rev-1/model-rank-000.safetensors"
    data = bytearray(bucket.objects[name])
    data[0 if shared else HEADER + MIB] ^= 255
    bucket.objects[name] = bytes(data)
    where = name if shared else f"bytes {HEADER + MIB}-{HEADER + 2 * MIB}"
    uri = "s3://bucket/tiny/rev-1/model-rank-000.safetensors"
    assert [(f"{uri}: chunk 1 ({where}) does not match its digest",)] == [each.mismatches for each in verified()]
    if shared:
        del bucket.objects[name]
        assert [True] == ["cannot be read: " in each.mismatches[0] for each in verified()]


def test_damage_of_a_shared_chunk_is_reported_for_both(bucket: InMemoryBucket) -> None:
    """The chunk is read once."""
    write("rev-1", 1)
    write("rev-2", 2, tp=1)
    digest = make_image(1).manifest().digests[2].hex()
    bucket.objects[f"tiny/chunks/{digest[:2]}/{digest}-{MIB}"] = bytes(MIB - 1) + b"x"
    assert [1, 1] == [len(result.mismatches) for result in verified()]


def test_damage_outside_of_the_chunks_is_reported(bucket: InMemoryBucket) -> None:
    """Damaged headers, manifest hashes, manifests, chunk folders and missing data are reported."""
    for revision in ("rev-1", "rev-2", "rev-3"):
        write(revision, 1, shared=False)
    head = bytearray(bucket.objects["tiny/rev-1/model-rank-000.safetensors"])
    head[HEADER - 1] = ord("\t")
    bucket.objects["tiny/rev-1/model-rank-000.safetensors"] = bytes(head)
    name = "tiny/rev-2/model-rank-000.safetensors.manifest.json"
    digest = make_image(1).manifest().digests[0].hex().encode()
    bucket.objects[name] = bucket.objects[name].replace(digest, b"0" * 32)
    bucket.objects["tiny/rev-3/model-rank-000.safetensors.manifest.json"] = b"{}"
    write("rev-4", 1, shared=False)
    del bucket.objects["tiny/rev-4/model-rank-000.safetensors"]
    write("rev-5", 1)
    name = "tiny/rev-5/model-rank-000.safetensors.manifest.json"
    bucket.objects[name] = bucket.objects[name].replace(b'"../chunks/"', b'"../../../chunks/"')
    expected = ["header does not match", "do not match", "not a manifest", "no such object", "no parent folder"]
    assert [True] * 5 == [message in result.mismatches[0] for message, result in zip(expected, verified(), strict=True)]


def test_removal_keeps_shared_chunks(bucket: InMemoryBucket) -> None:
    """The manifest is removed first, then the chunks that no other rank or revision references."""
    write("rev-1", 1)
    write("rev-2", 2)
    bucket.log.clear()
    assert DeleteResult(1, HEADER + 2 * MIB, MIB) == remove_snapshots(in_revision("rev-1"))
    first = bucket.paths_of("remove")[0]
    assert "tiny/rev-1/model-rank-000.safetensors.manifest.json" == first
    assert [()] == [result.mismatches for result in verified()]
    assert DeleteResult(1, SNAPSHOT_BYTES, 0) == remove_snapshots(in_revision("rev-2"))
    assert {} == bucket.objects


def test_all_ranks_of_a_revision_are_removed_together(bucket: InMemoryBucket) -> None:
    """Chunks that two of them share are removed too, and so is a plain file of a rank."""
    write("rev-1", 1)
    write("rev-1", 2, tp=1)
    write("rev-2", 1, shared=False)
    assert DeleteResult(2, 2 * SNAPSHOT_BYTES - MIB, 0) == remove_snapshots(in_revision("rev-1"))
    assert DeleteResult(1, SNAPSHOT_BYTES, 0) == remove_snapshots(in_revision("rev-2"))
    assert {} == bucket.objects


def test_chunks_reserved_by_a_writer_stay(bucket: InMemoryBucket) -> None:
    """A running writer has recorded the chunks that it needs."""
    write("rev-1", 1)
    bucket.objects[PENDING] = bucket.objects["tiny/rev-1/model-rank-000.safetensors.manifest.json"]
    assert DeleteResult(1, 0, SNAPSHOT_BYTES) == remove_snapshots(in_revision("rev-1"))


def test_a_writer_that_finishes_during_a_removal_does_not_fail_it(bucket: InMemoryBucket) -> None:
    """If its marker was removed before it is read, its manifest exists already."""
    write("rev-1", 1)
    manifest = "tiny/rev-1/model-rank-000.safetensors.manifest.json"
    bucket.objects[PENDING] = bucket.objects[manifest]

    def finish_write(operation: str, path: str) -> None:
        if operation == "open" and path == PENDING:
            bucket.objects[PENDING.rsplit(".", 2)[0]] = bucket.objects.pop(PENDING)

    found = in_revision("rev-1")
    bucket.fault = finish_write
    assert DeleteResult(1, 0, SNAPSHOT_BYTES) == remove_snapshots(found)


def test_an_unreadable_manifest_prevents_removal(bucket: InMemoryBucket) -> None:
    """It may reference the same chunks."""
    write("rev-1", 1)
    write("rev-2", 2)
    bucket.objects["tiny/rev-2/model-rank-000.safetensors.manifest.json"] = b"{}"
    before = dict(bucket.objects)
    with pytest.raises(StorageCorrupt, match="rev-2"):
        remove_snapshots(in_revision("rev-1"))
    assert before == bucket.objects


def test_leftovers_are_listed_and_removed(bucket: InMemoryBucket) -> None:
    """Marker, chunks and data of a dead writer are removed; snapshots and unrelated files stay."""
    write("rev-1", 1)
    write("rev-9", 9)
    kept = {name for name in bucket.objects if "rev-9" not in name}
    bucket.objects[PENDING] = bucket.objects.pop("tiny/rev-9/model-rank-000.safetensors.manifest.json")
    bucket.objects["tiny/rev-8/speculative-rank-000.safetensors"] = b"data"
    bucket.objects["tiny/rev-8/model-00001-of-00002.safetensors"] = b"another checkpoint"
    bucket.objects[f"tiny/chunks/removing-{'1' * 32}"] = b""
    kept = kept - set(chunk_names(bucket)) | {"tiny/rev-8/model-00001-of-00002.safetensors"}
    assert [f"chunks/removing-{'1' * 32}", "rev-8/speculative-rank-000.safetensors", PENDING[5:]] == [
        left.name for left in contents().leftovers
    ]
    marker_bytes = len(bucket.objects[PENDING])
    assert DeleteResult(3 + 3, 4 + marker_bytes + HEADER + 2 * MIB) == remove_leftovers(Repository(ROOT))
    assert kept == set(bucket.objects) - set(chunk_names(bucket))
    assert 4 == len(chunk_names(bucket))
    assert [()] == [result.mismatches for result in verified()]
    assert () == contents().leftovers


def test_temporary_files_are_leftovers(tmp_path: Path) -> None:
    """On a disk, a killed writer leaves its temporary file."""
    image = make_image(1)
    write_snapshot(image, image.manifest(), tmp_path / "rev-1")
    temporary = tmp_path / "rev-1" / f".model-rank-001.safetensors.{'0' * 32}.tmp"
    temporary.write_bytes(b"data")
    repository = Repository(Location.parse(tmp_path))
    assert [f"rev-1/{temporary.name}"] == [left.name for left in repository.contents().leftovers]
    assert DeleteResult(1, 4) == remove_leftovers(repository)
    assert not temporary.exists()
    assert 1 == len(repository.contents().snapshots)


def test_one_snapshot_is_found_without_a_listing(bucket: InMemoryBucket) -> None:
    """It is found by its name, also in storage that cannot be listed."""
    write("rev-1", 1)
    folder = ROOT.child("rev-1/")
    assert contents().snapshots[0].manifest_file == read_entry(folder, "model-rank-000.safetensors").manifest_file


def test_a_web_server_cannot_be_listed() -> None:
    """The error names the alternative."""
    with pytest.raises(SettingsError, match="cannot be listed"):
        Repository(Location.parse("http://127.0.0.1:1/models/")).contents()
