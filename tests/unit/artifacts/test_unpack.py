"""Unpacking an image into folders: which files are installed."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from rfork.artifacts.client import ArtifactReport, _with_timeout, install_image
from rfork.artifacts.metadata import bytes_of, read_metadata
from rfork.artifacts.pack import pack
from rfork.artifacts.unpack import remove_stale, unpack
from rfork.errors import DeadlineExceeded
from rfork.image.capture import image_from_tensors
from rfork.image.layout import allocate_buffer
from rfork.settings import InstanceSettings
from tests.unit.artifacts.file_trees import (
    FOREVER,
    KEY,
    SETTINGS,
    cache_dir,
    pack_tree,
    read_tree,
    unpack_tree,
    write_tree,
)


def test_a_link_in_the_target_is_not_written_through(tmp_path: Path) -> None:
    """Nothing is written outside a cache's folder, whatever links exist in it."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/k": b"k", "CD/k": b"k"})).image
    outside = write_tree(tmp_path / "outside", {})
    write_tree(tmp_path / "b", {})
    (tmp_path / "b" / "AB").symlink_to(outside)
    done = unpack_tree(image, tmp_path / "b")
    assert {} == read_tree(outside)
    assert 1 == done.files
    assert 1 == done.kept_existing


def test_existing_files_are_kept(tmp_path: Path) -> None:
    """An equal file is not written again, a different one is not overwritten, a missing one is added."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/same": b"1", "AB/other": b"2", "AB/new": b"3"})).image
    target = write_tree(tmp_path / "b", {"AB/same": b"1", "AB/other": b"mine"})
    done = unpack_tree(image, target)
    assert {"AB/same": b"1", "AB/other": b"mine", "AB/new": b"3"} == read_tree(target)
    assert 1 == done.files
    assert 1 == done.already_present
    assert 1 == done.kept_existing


def test_an_existing_build_folder_gets_no_other_files(tmp_path: Path) -> None:
    """Ninja's log and a library of two builds are incompatible, so such a folder is not changed."""
    source = write_tree(tmp_path / "a", {"op/op.so": b"so", "op/.ninja_log": b"theirs", "two/two.so": b"so"})
    image = pack_tree(source, "deep_gemm").image
    target = write_tree(tmp_path / "b", {"op/.ninja_log": b"mine"})
    unpack_tree(image, target, "deep_gemm")
    assert {"op/.ninja_log": b"mine", "two/two.so": b"so"} == read_tree(target)


def test_a_path_bound_cache_is_accepted_only_at_the_same_path(tmp_path: Path) -> None:
    """vLLM looks up graphs by absolute paths: at another path the cache is skipped with a reason."""
    image = pack_tree(write_tree(tmp_path / "a", {"hash/rank_0_0/graph": b"g"}), "vllm").image
    done = unpack_tree(image, tmp_path / "b", "vllm")
    assert 0 == done.files
    assert not (tmp_path / "b").exists()
    assert (f"vllm is valid only at {tmp_path}/a, but is at {tmp_path}/b here",) == done.skipped


def test_paths_in_triton_groups_are_rewritten(tmp_path: Path) -> None:
    """Groups contain absolute paths of their folder, which differ between source and target."""
    source = tmp_path / "a"
    group = {"child_paths": {"k.cubin": f"{source}/AB/k.cubin", "k.json": f"{source}/AB/k.json"}}
    write_tree(source, {"AB/k.cubin": b"c", "AB/k.json": b"j", "AB/__grp__k.json": json.dumps(group).encode()})
    unpack_tree(pack_tree(source).image, tmp_path / "b")
    expected = {"child_paths": {name: f"{tmp_path}/b/AB/{name}" for name in ("k.cubin", "k.json")}}
    assert expected == json.loads((tmp_path / "b/AB/__grp__k.json").read_text())
    assert 3 == unpack_tree(pack_tree(source).image, tmp_path / "b").already_present


def test_an_expired_deadline_leaves_nothing(tmp_path: Path) -> None:
    """No partial file and no staging folder remains."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/k": b"k"})).image
    with pytest.raises(DeadlineExceeded):
        unpack(image, read_metadata(image), [cache_dir(tmp_path / "b")], time.monotonic() - 1)
    assert [] == list((tmp_path / "b").iterdir())


def test_only_selected_cache_types_are_installed(tmp_path: Path) -> None:
    """Other caches in the image are ignored."""
    both = [
        cache_dir(write_tree(tmp_path / "a", {"AB/k": b"k"})),
        cache_dir(write_tree(tmp_path / "i", {"x/y.so": b"s"}), "inductor"),
    ]
    packed = pack(both, KEY, SETTINGS)
    if packed is None:
        raise ValueError("nothing to pack")
    unpack(packed.image, read_metadata(packed.image), [cache_dir(tmp_path / "b")], FOREVER)
    assert {"AB/k": b"k"} == read_tree(tmp_path / "b")


def test_a_transferred_image_has_the_same_bytes(tmp_path: Path) -> None:
    """Its layout is allocated as one that a fork fills, file by file."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/k": b"kernel", "AB/e": b""})).image
    copy = image_from_tensors(allocate_buffer(image.layout)[1])
    with (
        image.readable(0, image.layout.image_bytes) as views,
        copy.writable(0, image.layout.image_bytes) as into,
    ):
        content = b"".join(views)
        for view in into:
            view[:] = content[: view.nbytes]
            content = content[view.nbytes :]
    assert image.layout.layout_id == copy.layout.layout_id
    assert [bytes_of(image, spec) for spec in image.layout.tensors] == [
        bytes_of(copy, spec) for spec in copy.layout.tensors
    ]


def test_installed_files_are_reported_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk ends the call with a report of the installed files, and no other source is tried."""
    both = [
        cache_dir(write_tree(tmp_path / "a", {"AB/k": b"kernel"})),
        cache_dir(write_tree(tmp_path / "i", {"x/y.so": b"s"}), "inductor"),
    ]
    packed = pack(both, KEY, SETTINGS)
    assert packed is not None
    utime = os.utime

    def full(file: int, *, ns: tuple[int, int]) -> None:
        if os.fstat(file).st_size == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        utime(file, ns=ns)

    monkeypatch.setattr(os, "utime", full)
    targets = [cache_dir(tmp_path / "b"), cache_dir(tmp_path / "j", "inductor")]
    initial_report = ArtifactReport("m", KEY.id, source="other")
    report = install_image(packed.image, targets, KEY, SETTINGS, FOREVER, initial_report)
    assert {"AB/k": b"kernel"} == read_tree(tmp_path / "b")
    assert 1 == report.files
    assert 6 == report.bytes
    assert "other" == report.source
    assert (report.reason or "").startswith("StorageFull: ")


def test_stale_folders_are_removed_without_locks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If folders cannot be locked, their age decides: a recent one may be in use."""
    old, young = tmp_path / ".rfork-old.tmp", tmp_path / ".rfork-young.tmp"
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert 1 == remove_stale(tmp_path)
    assert not old.exists()
    assert young.exists()


def test_a_staging_folder_removed_by_another_process_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is locked, it looks like the leftover of a dead process."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/k": b"k"})).image
    removed: list[int] = []
    mkdtemp = tempfile.mkdtemp

    def mkdtemp_then_remove_stale(**named: str) -> str:
        folder = mkdtemp(**named)
        if not removed:
            removed.append(remove_stale(tmp_path / "b"))
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp_then_remove_stale)
    done = unpack_tree(image, tmp_path / "b")
    assert [1] == removed
    assert 1 == done.files
    assert {"AB/k": b"k"} == read_tree(tmp_path / "b")


def test_artifacts_are_always_verified() -> None:
    """RFORK_VERIFY_CHUNKS=0 is for benchmarks of weights; programs are always verified."""
    assert True is _with_timeout(InstanceSettings(verify_chunks=False), 10.0).verify_chunks
