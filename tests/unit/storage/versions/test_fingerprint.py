"""Fingerprints of weight files: equal for equal files, and different for others except in unsampled blocks."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from rfork.errors import (
    SettingsError,
    StorageAccessDenied,
    StorageChanged,
    StorageCorrupt,
    StorageError,
    StorageNotFound,
)
from rfork.image.capture import image_from_tensors
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import BlobEntry
from rfork.storage.location import Location
from rfork.storage.registry import open_store
from rfork.storage.snapshots.entry import read_manifest
from rfork.storage.snapshots.writer import write_snapshot
from rfork.storage.versions import local_files, weight_files
from rfork.storage.versions.fingerprint import fingerprint_of
from rfork.storage.versions.weight_files import BLOCK_BYTES, MAX_FULLY_READ_BYTES, sampled_ranges
from tests.memory_bucket import InMemoryBlobStore, InMemoryBucket, bucket
from tests.unit.storage.recording_store import RecordingStore as WebStore

torch = pytest.importorskip("torch")
__all__ = ["bucket"]

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LARGE = 8 << 20
FOLDER = "s3://bucket/llama/"
SHARED = pytest.mark.parametrize("shared", [False, True], ids=["file", "shared"])


def safetensors(size: int, fill: int = 7) -> bytes:
    """Return a safetensors file with one tensor of `size` bytes."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([fill]) * size


def index_of(*names: str) -> bytes:
    """Return an index that names one tensor in each file."""
    return json.dumps({"weight_map": {f"t{turn}": name for turn, name in enumerate(names)}}).encode()


def checkpoint(folder: Path, *, reverse: bool = False) -> Path:
    """Write a folder of two shards, a small and a large one, with an index and a configuration."""
    folder.mkdir(parents=True)
    files = {
        "config.json": b"{}",
        INDEX: index_of(*SHARDS),
        SHARDS[0]: safetensors(1000),
        SHARDS[1]: safetensors(LARGE),
    }
    for name in sorted(files, reverse=reverse):
        (folder / name).write_bytes(files[name])
    return folder


def next_tick(path: Path) -> None:
    """Return once the clock of the file system is later than the file's last change."""
    probe = path.parent.parent / "probe"
    probe.touch()
    while probe.stat().st_ctime_ns <= path.stat().st_ctime_ns:
        os.utime(probe)


def change_byte(path: Path, offset: int) -> None:
    """Change one byte of a file in place."""
    next_tick(path)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def unsampled_offset(path: Path) -> int:
    """Return an offset of a file that no sampled block covers."""
    size, header = path.stat().st_size, 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    covered = sampled_ranges(size, header)
    return next(
        offset
        for offset in range(0, size, BLOCK_BYTES)
        if not any(begin <= offset < begin + length for begin, length in covered)
    )


def sampled_offset(path: Path) -> int:
    """Return an offset in the middle of a file that a sampled block covers."""
    return sampled_ranges(path.stat().st_size, 100)[32][0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a checkpoint of two shards."""
    return checkpoint(tmp_path / "model")


@pytest.fixture
def fingerprint_before(model: Path) -> str:
    """Return the fingerprint of `model` before a test changes it."""
    found = fingerprint_of(model)
    assert found is not None
    return found


def test_a_fingerprint_is_a_prefix_and_32_hex_digits(fingerprint_before: str) -> None:
    """A fingerprint is `files:` and 32 hex digits."""
    prefix, _, digits = fingerprint_before.partition(":")
    assert "files" == prefix
    assert 32 == len(digits)
    assert set(digits) <= set("0123456789abcdef")


def test_the_fingerprint_needs_no_torch(model: Path, fingerprint_before: str) -> None:
    """The fingerprint of local files imports no torch."""
    code = (
        "import sys; from rfork.storage.versions.version import version_of;"
        "print(version_of(sys.argv[1]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    assert [fingerprint_before, "False"] == done.stdout.split()


def test_equal_files_under_two_paths_are_equal(tmp_path: Path, fingerprint_before: str) -> None:
    """Neither paths, inodes and times nor the order of creation are covered."""
    assert fingerprint_before == fingerprint_of(checkpoint(tmp_path / "elsewhere" / "copy", reverse=True))


def test_links_are_followed(model: Path, tmp_path: Path, fingerprint_before: str) -> None:
    """A folder of links to the files has the fingerprint of the files."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    assert fingerprint_before == fingerprint_of(linked)


def test_uri_and_path_are_equal(model: Path, fingerprint_before: str) -> None:
    """A file URI equals its path, with and without a slash at the end."""
    assert fingerprint_before == fingerprint_of(model.as_uri())
    assert fingerprint_before == fingerprint_of(f"{model}/")


def test_other_files_are_not_covered(model: Path, fingerprint_before: str) -> None:
    """Configuration, training state, hidden files and subfolders do not count."""
    (model / "config.json").write_text('{"a": 1}')
    (model / "training_args.bin").write_bytes(b"x")
    (model / "._copy.safetensors").write_bytes(b"x")
    (model / "original").mkdir()
    (model / "original" / "consolidated.safetensors").write_bytes(b"x")
    assert fingerprint_before == fingerprint_of(model)


def test_a_renamed_shard_differs(model: Path, fingerprint_before: str) -> None:
    """The name of a shard counts."""
    (model / SHARDS[0]).rename(model / "model-1.safetensors")
    (model / INDEX).write_bytes(index_of("model-1.safetensors", SHARDS[1]))
    assert fingerprint_before != fingerprint_of(model)


def test_a_changed_index_differs(model: Path, fingerprint_before: str) -> None:
    """All bytes of an index count, even if it names the same files."""
    (model / INDEX).write_bytes(index_of(*reversed(SHARDS)))
    assert fingerprint_before != fingerprint_of(model)


def test_a_changed_header_differs(model: Path, fingerprint_before: str) -> None:
    """Each byte of a safetensors header counts."""
    path = model / SHARDS[1]
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"b"'))
    assert fingerprint_before != fingerprint_of(model)


def test_a_changed_byte_in_a_small_file_differs(model: Path, fingerprint_before: str) -> None:
    """Small files are covered completely."""
    change_byte(model / SHARDS[0], 500)
    assert fingerprint_before != fingerprint_of(model)


def test_a_changed_byte_in_a_sampled_block_differs(model: Path, fingerprint_before: str) -> None:
    """Sampled blocks of large files are covered."""
    change_byte(model / SHARDS[1], sampled_offset(model / SHARDS[1]))
    assert fingerprint_before != fingerprint_of(model)


def test_a_changed_last_byte_differs(model: Path, fingerprint_before: str) -> None:
    """The last block of a large file is covered."""
    change_byte(model / SHARDS[1], (model / SHARDS[1]).stat().st_size - 1)
    assert fingerprint_before != fingerprint_of(model)


def test_a_changed_byte_in_an_unsampled_block_is_not_noticed(model: Path, fingerprint_before: str) -> None:
    """A change of a large file outside of sampled blocks does not change the fingerprint."""
    change_byte(model / SHARDS[1], unsampled_offset(model / SHARDS[1]))
    assert fingerprint_before == fingerprint_of(model)


def test_a_truncated_file_differs(model: Path, fingerprint_before: str) -> None:
    """The size counts."""
    path = model / SHARDS[1]
    os.truncate(path, path.stat().st_size - 1)
    assert fingerprint_before != fingerprint_of(model)


def test_an_added_weight_file_differs(model: Path, fingerprint_before: str) -> None:
    """A weight file counts even if the index does not name it, because some engines load it."""
    (model / "consolidated.safetensors").write_bytes(safetensors(10))
    assert fingerprint_before != fingerprint_of(model)


def test_a_replaced_file_of_the_same_size_is_noticed(model: Path, fingerprint_before: str) -> None:
    """A file that replaces another has its own digest."""
    new = model / "new"
    new.write_bytes(safetensors(LARGE, fill=8))
    new.rename(model / SHARDS[1])
    assert fingerprint_before != fingerprint_of(model)


def test_an_in_place_rewrite_with_restored_times_is_noticed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache compares the inode's change time, which programs cannot set."""
    monkeypatch.setattr(weight_files, "MIN_CACHE_AGE_NS", 0)
    path = model / SHARDS[1]
    before, times = fingerprint_of(model), path.stat()
    next_tick(path)
    path.write_bytes(safetensors(LARGE, fill=8))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert times.st_mtime_ns == path.stat().st_mtime_ns
    assert before != fingerprint_of(model)


class DigestedFiles:
    """Counter of digested files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        real = weight_files.sampled_digest

        def counted(uri: str, size: int, read: weight_files.ReadBytes, count: int = weight_files.SAMPLES) -> bytes:
            self.paths.append(Path(uri).name)
            return real(uri, size, read, count)

        monkeypatch.setattr(weight_files, "sampled_digest", counted)


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> DigestedFiles:
    """Count the files that are digested from now on."""
    return DigestedFiles(monkeypatch)


def test_digests_of_old_files_are_cached(model: Path, digested: DigestedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged file is read once; a changed one is read again."""
    monkeypatch.setattr(weight_files, "MIN_CACHE_AGE_NS", 0)
    first = fingerprint_of(model)
    assert sorted(SHARDS) == sorted(digested.paths)
    assert first == fingerprint_of(model)
    assert 2 == len(digested.paths)
    change_byte(model / SHARDS[0], 500)
    assert first != fingerprint_of(model)
    assert [SHARDS[0]] == digested.paths[2:]


def test_digests_of_new_files_are_not_cached(
    model: Path, digested: DigestedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within one tick of the file system's clock would not be noticed."""
    monkeypatch.setattr(weight_files, "MIN_CACHE_AGE_NS", 1 << 62)
    fingerprint_of(model)
    fingerprint_of(model)
    assert 4 == len(digested.paths)


def test_concurrent_calls_agree(model: Path, fingerprint_before: str) -> None:
    """Concurrent threads get the same result."""
    with ThreadPoolExecutor(8) as pool:
        assert {fingerprint_before} == set(pool.map(lambda _: fingerprint_of(model), range(32)))


def on_digest(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]) -> None:
    """Call `act` before each digest of a file, to simulate another program."""
    real = weight_files.digest_of_file

    def digest_of_file(path: Path, state: weight_files.FileState) -> bytes:
        act(path)
        return real(path, state)

    monkeypatch.setattr(local_files, "digest_of_file", digest_of_file)


def test_files_changed_during_the_digest_are_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One change during the read yields the fingerprint of the changed files."""
    left = [1]

    def change_once(path: Path) -> None:
        if path.name == SHARDS[1] and left:
            left.pop()
            change_byte(model / SHARDS[0], 500)

    on_digest(monkeypatch, change_once)
    found = fingerprint_of(model)
    other = checkpoint(tmp_path / "other")
    change_byte(other / SHARDS[0], 500)
    assert [] == left
    assert fingerprint_of(other) == found


def test_files_that_keep_changing_are_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is being written has no fingerprint."""
    on_digest(monkeypatch, lambda path: os.truncate(path, path.stat().st_size + 1))
    with pytest.raises(StorageChanged, match=r"changed during .* 3 times"):
        fingerprint_of(model)


def test_a_file_added_during_the_digest_is_covered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is listed again after its files were read."""
    late = model / "late.safetensors"

    def add_once(path: Path) -> None:
        if not late.exists():
            late.write_bytes(safetensors(10))

    on_digest(monkeypatch, add_once)
    found = fingerprint_of(model)
    monkeypatch.undo()
    assert fingerprint_of(model) == found


@pytest.mark.parametrize("names", [(), ("config.json", "tokenizer.json"), ("config.json", INDEX)])
def test_a_folder_without_weight_files_has_no_version(tmp_path: Path, names: tuple[str, ...]) -> None:
    """An index alone is no checkpoint: downloads without weights contain it."""
    for name in names:
        (tmp_path / name).write_bytes(index_of(*SHARDS))
    assert fingerprint_of(tmp_path) is None


@pytest.mark.parametrize("name", ["model.gguf", "model.tensors", "pytorch_model.bin", "model.pt", "m.pth"])
def test_weights_in_other_formats_are_covered(tmp_path: Path, name: str) -> None:
    """Weights in other formats are covered, by folder and by file name."""
    found = set()
    for fill in (b"a", b"b"):
        (tmp_path / name).write_bytes(fill * 100_000)
        folder, file = fingerprint_of(tmp_path), fingerprint_of(tmp_path / name)
        assert folder == file
        found.add(folder)
    assert 2 == len(found - {None})


def test_pickles_next_to_safetensors_do_not_count(model: Path, fingerprint_before: str) -> None:
    """Engines ignore pickled weights if there are others."""
    (model / "pytorch_model.bin").write_bytes(b"x")
    assert fingerprint_before == fingerprint_of(model)


def test_one_file_is_independent_of_its_neighbours(model: Path) -> None:
    """The name of a file means this file only."""
    before = fingerprint_of(model / SHARDS[1])
    change_byte(model / SHARDS[0], 500)
    assert before == fingerprint_of(model / SHARDS[1])


def test_the_name_of_an_index_means_its_shards(model: Path) -> None:
    """The name of an index means all files that it names."""
    (model / "other.safetensors").write_bytes(safetensors(10))
    before = fingerprint_of(model / INDEX)
    (model / "other.safetensors").unlink()
    assert before == fingerprint_of(model / INDEX)
    change_byte(model / SHARDS[0], 500)
    assert before != fingerprint_of(model / INDEX)


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"),
        ("m.tensors", "m-00002-of-00002.tensors"),
        ("m-rank-%03d.tensors", "m-rank-001.tensors"),
    ],
)
def test_the_name_of_a_set_means_all_files(tmp_path: Path, named: str, part: str) -> None:
    """The first part of a split file, and a template of ranks, mean every part."""
    first = part.replace("2-of", "1-of").replace("rank-001", "rank-000")
    (tmp_path / first).write_bytes(b"a")
    found = set()
    for content in (b"a", b"b"):
        (tmp_path / part).write_bytes(content)
        found.add(fingerprint_of(tmp_path / named))
    assert 2 == len(found)


@pytest.mark.parametrize("name", ["nothing", "nothing/model.safetensors", "nothing.safetensors"])
def test_a_missing_path_is_named(tmp_path: Path, name: str) -> None:
    """A wrong path is an error, unlike a folder without weights."""
    with pytest.raises(StorageNotFound, match=f"{tmp_path / name}: No such file or directory"):
        fingerprint_of(tmp_path / name)


def test_a_path_with_a_null_byte_does_not_exist(tmp_path: Path) -> None:
    """No file can have such a name."""
    with pytest.raises(StorageNotFound, match="No such file or directory"):
        fingerprint_of(f"{tmp_path}/a\0b/c")


def test_a_missing_shard_is_named(model: Path) -> None:
    """A checkpoint that lacks a shard of its index is incomplete."""
    (model / SHARDS[0]).unlink()
    with pytest.raises(StorageNotFound, match=f"lacks the shard {SHARDS[0]}"):
        fingerprint_of(model)


def test_a_broken_link_is_named(model: Path) -> None:
    """A link into a cache that was deleted is an error that names the link."""
    (model / SHARDS[0]).unlink()
    (model / SHARDS[0]).symlink_to("../blobs/gone")
    with pytest.raises(StorageNotFound, match=rf"{SHARDS[0]} is a broken link: \.\./blobs/gone"):
        fingerprint_of(model)


def test_an_unreadable_file_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without read permission is an error that names the file."""
    real = os.open

    def denied(path: str | Path, flags: int, *rest: int) -> int:
        if str(path).endswith(SHARDS[0]):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(StorageAccessDenied, match=f"{SHARDS[0]}: Permission denied"):
        fingerprint_of(model)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100, safetensors(5)[:20]])
def test_an_invalid_safetensors_file_is_named(model: Path, content: bytes) -> None:
    """A file with the extension of safetensors and other content is an error."""
    (model / SHARDS[0]).write_bytes(content)
    with pytest.raises(StorageCorrupt, match=SHARDS[0]):
        fingerprint_of(model)


def test_a_git_lfs_pointer_is_named(model: Path) -> None:
    """A clone without its large files is an error with a hint."""
    (model / SHARDS[0]).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(StorageCorrupt) as caught:
        fingerprint_of(model)
    assert "git lfs pull" in (caught.value.hint or "")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": []}', index_of("../out.safetensors")])
def test_an_invalid_index_is_named(model: Path, content: bytes) -> None:
    """An index that is unreadable, or names a file outside of its folder, is an error."""
    (model / INDEX).write_bytes(content)
    with pytest.raises(StorageCorrupt, match=INDEX):
        fingerprint_of(model)


def test_a_folder_with_the_name_of_a_weight_file_is_named(model: Path) -> None:
    """Only regular files are weight files."""
    (model / "x.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"x\.safetensors is not a regular file"):
        fingerprint_of(model)


@pytest.mark.parametrize(
    "size", [MAX_FULLY_READ_BYTES + 1, MAX_FULLY_READ_BYTES + BLOCK_BYTES, LARGE + 13, 5_000_000_000]
)
def test_each_part_of_a_file_has_a_sampled_block(size: int) -> None:
    """Blocks are within the file, one in each 64th part, after the header and before the last block."""
    head, *blocks, last = sampled_ranges(size, 1000)
    assert (0, 1000) == head
    assert (size - BLOCK_BYTES, BLOCK_BYTES) == last
    pages = -(-size // BLOCK_BYTES)
    assert list(range(64)) == [((offset // BLOCK_BYTES + 1) * 64 - 1) // pages for offset, _ in blocks]
    assert all(0 < length and offset + length <= size for offset, length in blocks)


# Object stores and web servers.


@pytest.fixture
def remote(bucket: InMemoryBucket) -> InMemoryBucket:
    """Return a bucket with a checkpoint of two shards in `FOLDER`."""
    bucket.objects |= {
        "llama/config.json": b"{}",
        f"llama/{INDEX}": index_of(*SHARDS),
        f"llama/{SHARDS[0]}": safetensors(100),
        f"llama/{SHARDS[1]}": safetensors(LARGE),
    }
    return bucket


def test_objects_are_covered_by_their_entity_tags(remote: InMemoryBucket) -> None:
    """No content of weight files is read, and a new entity tag is a new fingerprint."""
    before = fingerprint_of(FOLDER)
    assert [f"llama/{INDEX}"] == remote.paths_of("read")
    remote.objects[f"llama/{SHARDS[1]}"] = safetensors(LARGE, fill=8)
    assert before != fingerprint_of(FOLDER)


def test_equal_objects_in_another_folder_are_equal(remote: InMemoryBucket) -> None:
    """The path in the bucket is not covered."""
    copied = {path.replace("llama", "copy/of"): data for path, data in remote.objects.items()}
    before = fingerprint_of(FOLDER)
    remote.objects |= copied
    assert before == fingerprint_of("s3://bucket/copy/of")


def test_a_missing_object_is_named(remote: InMemoryBucket) -> None:
    """An object that the index names and the bucket lacks is an error."""
    del remote.objects[f"llama/{SHARDS[0]}"]
    with pytest.raises(StorageNotFound, match=f"lacks the shard {SHARDS[0]}"):
        fingerprint_of(FOLDER)


def test_objects_without_weights_have_no_version(bucket: InMemoryBucket) -> None:
    """A folder of objects without weight files has no fingerprint; one without objects does not exist."""
    bucket.objects["llama/config.json"] = b"{}"
    assert fingerprint_of(FOLDER) is None
    with pytest.raises(StorageNotFound, match="has no files"):
        fingerprint_of("s3://bucket/lama/")


def test_the_name_of_an_object_means_this_object(remote: InMemoryBucket) -> None:
    """The name of an object means this object only."""
    before = fingerprint_of(FOLDER + SHARDS[0])
    remote.objects[f"llama/{SHARDS[1]}"] += b"x"
    assert before == fingerprint_of(FOLDER + SHARDS[0])
    remote.objects[f"llama/{SHARDS[0]}"] += b"x"
    assert before != fingerprint_of(FOLDER + SHARDS[0])


def test_without_permission_to_list_files_are_found_by_their_names(
    remote: InMemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index and its shards are found by their names."""
    listed = fingerprint_of(FOLDER)

    def denied(_: InMemoryBlobStore, prefix: str = "") -> Iterator[BlobEntry]:
        raise StorageAccessDenied("no permission to list")

    monkeypatch.setattr(InMemoryBlobStore, "list", denied)
    assert listed == fingerprint_of(FOLDER)


def test_a_web_server_without_entity_tags_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a server sends no validator, headers and a few blocks are read."""
    found = set()
    for fill in (1, 2):
        files = {INDEX: index_of(*SHARDS), SHARDS[0]: safetensors(10), SHARDS[1]: safetensors(LARGE, fill)}
        store = WebStore("http://models/m/", files, SettingsError("a web server"))

        def open_store(folder: Location, settings: StorageSettings, store: WebStore = store) -> WebStore:
            return store

        monkeypatch.setattr(registry, "open_store", open_store)
        found.add(fingerprint_of("http://models/m/"))
        assert sum(blob.read_bytes for blob in store.blobs) < LARGE // 10
    assert 2 == len(found)


def test_a_folder_that_cannot_be_listed_is_ambiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights may have any name, so the user must specify one."""
    store = WebStore("http://models/m/", {"config.json": b"{}"}, SettingsError("a web server"))
    monkeypatch.setattr(registry, "open_store", lambda *_: store)
    with pytest.raises(StorageNotFound, match="no weight file with a well-known name"):
        fingerprint_of("http://models/m/")


# Snapshots.

IMAGE = image_from_tensors({"a": torch.arange(1000.0)})
OTHER_IMAGE = image_from_tensors({"a": torch.arange(1000.0) + 1})
RANKS = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))


@SHARED
def test_a_snapshot_has_its_recorded_version(tmp_path: Path, shared: bool) -> None:
    """The recorded version is found by folder and by file name."""
    folder = tmp_path / "rev-1"
    written = write_snapshot(IMAGE, IMAGE.manifest(), folder, version="v7", shared=shared)
    assert "v7" == fingerprint_of(folder)
    assert "v7" == fingerprint_of(written.uri)
    with closing(open_store(Location.parse(folder).folder)) as store:
        assert "v7" == read_manifest(store, "model-rank-000.safetensors.manifest.json").version


@SHARED
def test_a_snapshot_without_a_version_has_its_weights_id(tmp_path: Path, shared: bool) -> None:
    """The version is `weights:` and the weights_id of the one rank."""
    folder = tmp_path / "rev-1"
    written = write_snapshot(IMAGE, IMAGE.manifest(), folder, shared=shared)
    assert f"weights:{written.weights_id}" == fingerprint_of(folder)


def test_snapshots_of_several_ranks_have_one_version(tmp_path: Path) -> None:
    """Without a recorded version, it is derived from the weights of all ranks."""
    found = set()
    for number, image in enumerate((IMAGE, OTHER_IMAGE)):
        folder = tmp_path / str(number)
        write_snapshot(IMAGE, IMAGE.manifest(), folder, rank=RANKS[0])
        write_snapshot(image, image.manifest(), folder, rank=RANKS[1])
        found.add(fingerprint_of(folder))
    assert 2 == len(found)
    assert all(version is not None and version.startswith("weights:") for version in found)


@pytest.mark.parametrize("second", ["v2", None])
def test_snapshots_of_several_versions_are_refused(tmp_path: Path, second: str | None) -> None:
    """Ranks of two versions in one folder are an error."""
    write_snapshot(IMAGE, IMAGE.manifest(), tmp_path, rank=RANKS[0], version="v1")
    write_snapshot(IMAGE, IMAGE.manifest(), tmp_path, rank=RANKS[1], version=second)
    with pytest.raises(StorageCorrupt, match=f"several versions: .*{second or 'none'}"):
        fingerprint_of(tmp_path)


def test_a_snapshot_with_replaced_data_is_refused(tmp_path: Path) -> None:
    """A manifest does not apply to another file's data."""
    write_snapshot(IMAGE, IMAGE.manifest(), tmp_path / "a.safetensors", version="v1")
    write_snapshot(OTHER_IMAGE, OTHER_IMAGE.manifest(), tmp_path / "b.safetensors", version="v2")
    (tmp_path / "b.safetensors").replace(tmp_path / "a.safetensors")
    with pytest.raises(StorageCorrupt, match="different weights"):
        fingerprint_of(tmp_path / "a.safetensors")


def test_the_version_of_a_snapshot_in_an_object_store_is_the_recorded_one(bucket: InMemoryBucket) -> None:
    """The recorded version is read from the manifest."""
    write_snapshot(IMAGE, IMAGE.manifest(), FOLDER, version="v7")
    assert "v7" == fingerprint_of(FOLDER)
    assert "v7" == fingerprint_of(f"{FOLDER}model-rank-000.safetensors")


def test_a_snapshot_next_to_a_checkpoint_does_not_change_its_version(model: Path, fingerprint_before: str) -> None:
    """Engines load the checkpoint; the snapshot is selected by its own name only."""
    write_snapshot(IMAGE, IMAGE.manifest(), model, version="v7")
    assert fingerprint_before == fingerprint_of(model)
    assert "v7" == fingerprint_of(model / "model-rank-000.safetensors")


@pytest.mark.parametrize("version", ["", "a\nb", "x" * 257])
def test_a_version_is_one_short_line(tmp_path: Path, version: str) -> None:
    """A snapshot with an unusable version is refused before anything is written."""
    with pytest.raises(SettingsError, match="is not a valid version"):
        write_snapshot(IMAGE, IMAGE.manifest(), tmp_path / "rev", version=version)
    assert not (tmp_path / "rev").exists()
