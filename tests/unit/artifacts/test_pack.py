"""Packing folders into an image: which files are included and which are not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from rfork.artifacts.cache_types import CACHE_TYPES, cache_dirs
from rfork.artifacts.metadata import MAX_FILES, METADATA_TENSOR, check_layout
from rfork.settings import ArtifactSettings, load
from tests.unit.artifacts.file_trees import cache_dir, pack_tree, read_tree, unpack_tree, write_tree


def test_an_unpacked_cache_equals_the_packed_one(tmp_path: Path) -> None:
    """Content, execute bit and modification time (used by Ninja) are equal, also for empty files."""
    files = {
        "AB/kernel.cubin": b"cubin" * 1000,
        "AB/kernel.json": b"{}",
        "CD/empty": b"",
        "CD/launch.so": b"elf",
    }
    source = write_tree(tmp_path / "a", files)
    (source / "CD/launch.so").chmod(0o4755)
    os.utime(source / "AB/kernel.json", ns=(5, 1_700_000_000_123_456_789))
    done = unpack_tree(pack_tree(source).image, tmp_path / "b")
    target = tmp_path / "b"
    restored_metadata = (
        (target / "CD/launch.so").stat().st_mode & 0o7777,
        (target / "AB/kernel.json").stat().st_mtime_ns,
    )
    assert files == read_tree(target)
    assert 4 == done.files
    assert (0o755, 1_700_000_000_123_456_789) == restored_metadata


def test_a_fetched_cache_packs_to_the_same_image(tmp_path: Path) -> None:
    """A target that fetched a cache serves the same image, so readers may read from both."""
    source = write_tree(tmp_path / "a", {"AB/kernel.cubin": b"x", "CD/e": b"y"})
    first = pack_tree(source).image
    unpack_tree(first, tmp_path / "b")
    os.rename(source, tmp_path / "gone")
    os.rename(tmp_path / "b", source)
    again = pack_tree(source).image
    assert first.manifest().weights_id == again.manifest().weights_id


def test_locks_links_and_unfinished_files_are_skipped(tmp_path: Path) -> None:
    """Only complete regular files are packed."""
    source = write_tree(
        tmp_path / "a",
        {"AB/k": b"k", "AB/lock": b"", "locks/x.lock": b"", "AB/tmp.pid_7_x/k": b"h",
         ".rfork-1.tmp/AB/k": b"s", "flashinfer_jit.log": b"", "AB/.12.34.tmp": b"half"},
    )  # fmt: skip
    (source / "AB/link").symlink_to("/etc/passwd")
    os.mkfifo(source / "AB/pipe")
    packed = pack_tree(source)
    unpack_tree(packed.image, tmp_path / "b")
    assert {"AB/k": b"k"} == read_tree(tmp_path / "b")
    assert {"not a regular file": 2} == packed.skipped


def test_a_linked_folder_is_not_followed(tmp_path: Path) -> None:
    """Content outside a cache's folder is not served."""
    source = write_tree(tmp_path / "a", {"AB/k": b"k"})
    (source / "home").symlink_to(write_tree(tmp_path / "secret", {"id_rsa": b"s"}))
    assert ["triton/AB/k", METADATA_TENSOR] == sorted(
        (spec.name for spec in pack_tree(source).image.layout.tensors), key=lambda name: name == METADATA_TENSOR
    )


def test_a_file_that_changes_during_the_read_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The complete entry of a file that grows between two checks is skipped."""
    source = write_tree(tmp_path / "a", {"AB/still": b"s", "AB/xgrows": b"1", "CD/k": b"k"})
    read = os.read

    def grows(descriptor: int, count: int) -> bytes:
        if os.path.samestat(os.fstat(descriptor), os.stat(source / "AB/xgrows")):
            with open(source / "AB/xgrows", "ab") as file:
                file.write(b"2")
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", grows)
    packed = pack_tree(source)
    unpack_tree(packed.image, tmp_path / "b")
    assert {"CD/k": b"k"} == read_tree(tmp_path / "b")
    assert {"changed while being read": 1, "same entry as a skipped file": 1} == packed.skipped


def test_a_recently_changed_file_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linker may still be writing its entry; settled entries are packed."""
    source = write_tree(tmp_path / "a", {"AB/old": b"o", "AB/new": b"n", "CD/old": b"o"})
    os.utime(source / "AB/old", (0, 0))
    os.utime(source / "CD/old", (0, 0))
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    packed = pack_tree(source, settings=load(ArtifactSettings, quiet_period_s=600.0))
    assert 1 == packed.files
    assert {"recently changed": 1, "same entry as a skipped file": 1} == packed.skipped
    assert 480 < waited[0] <= 600


def test_the_size_limits_are_respected(tmp_path: Path) -> None:
    """They limit bytes and files, and only complete entries are packed."""
    names = [f"{entry}/{number}" for entry in ("AB", "CD", "EF") for number in range(2)]
    source = write_tree(tmp_path / "a", {name: bytes(10_000) for name in names})
    few = pack_tree(source, max_files=3)
    small = pack_tree(source, settings=load(ArtifactSettings, quiet_period_s=0, max_bytes=55_000))
    for packed, count in ((few, 2), (small, 4)):
        target = tmp_path / str(count)
        unpack_tree(packed.image, target)
        assert names[:count] == sorted(read_tree(target))


def test_an_entry_is_packed_completely_or_not_at_all(tmp_path: Path) -> None:
    """Triton treats a group without its binary as a hit and fails, so half an entry is worse than none."""
    children = {name: str(tmp_path / "a/AB" / name) for name in ("k.cubin", "k.json")}
    group = json.dumps({"child_paths": children}).encode()
    files = {"AB/__grp__k.json": group, "AB/k.cubin": bytes(200_000), "AB/k.json": b"{}", "CD/k": b"k"}
    small = load(ArtifactSettings, quiet_period_s=0, max_bytes=100_000)
    packed = pack_tree(write_tree(tmp_path / "a", files), settings=small)
    unpack_tree(packed.image, tmp_path / "b")
    assert {"CD/k": b"k"} == read_tree(tmp_path / "b")
    assert {"too many or too large": 1, "same entry as a skipped file": 2} == packed.skipped


def test_an_incomplete_group_is_skipped_with_its_entry(tmp_path: Path) -> None:
    """Half of an entry would crash the engine that finds it."""
    group = json.dumps({"child_paths": {"k.cubin": str(tmp_path / "a/AB/k.cubin")}}).encode()
    packed = pack_tree(write_tree(tmp_path / "a", {"AB/__grp__k.json": group, "AB/k.json": b"{}", "CD/k": b"k"}))
    unpack_tree(packed.image, tmp_path / "b")
    assert {"CD/k": b"k"} == read_tree(tmp_path / "b")


@pytest.mark.parametrize(
    ("type_name", "path", "entry"),
    [
        ("triton", "HASH/k.cubin", "HASH"),
        ("inductor", "ab/cab.so", "ab"),
        ("inductor", "fxgraph/ab/HASH/graph", "fxgraph/ab/HASH"),
        ("inductor", "triton/0/HASH/k.cubin", "triton/0/HASH"),
        ("flashinfer", "0.5/90a/cached_ops/norm/norm.so", "0.5/90a/cached_ops/norm"),
        ("flashinfer", "0.5/90a/log", "0.5/90a/log"),
        ("deep_gemm", "cache/kernel.gemm.1/kernel.cubin", "cache/kernel.gemm.1"),
        ("vllm", "HASH/rank_0_0/backbone/graph", "HASH"),
        ("tvm_ffi", "alone.so", "alone.so"),
    ],
)
def test_an_entry_is_the_output_of_one_compilation(type_name: str, path: str, entry: str) -> None:
    """An entry is the output of one compilation, not a folder of many."""
    assert entry == CACHE_TYPES[type_name].entry_of(path)


def test_an_image_at_the_size_limit_is_accepted(tmp_path: Path) -> None:
    """The metadata counts too, so a target with the same limit accepts every packed image."""
    source = write_tree(tmp_path / "a", {f"{entry}/kernel": bytes(1000) for entry in range(50)})
    full_bytes = pack_tree(source).image.layout.image_bytes
    for max_bytes in (full_bytes, full_bytes - 1, full_bytes // 2):
        settings = load(ArtifactSettings, quiet_period_s=0, max_bytes=max_bytes)
        layout = pack_tree(source, settings=settings).image.layout
        check_layout(layout, CACHE_TYPES, MAX_FILES, settings.max_bytes)
        assert max_bytes - 1200 <= layout.image_bytes <= max_bytes


def test_nothing_is_packed_by_default() -> None:
    """Artifacts are disabled unless cache types are selected."""
    assert [] == cache_dirs(load(ArtifactSettings))


@pytest.mark.parametrize(
    ("mode", "has_problem"),
    [(0o755, False), (0o775, True), (0o757, True), (0o777, True), (0o1777, False), (0o700, False)],
)
def test_a_folder_writable_by_others_is_skipped(mode: int, has_problem: bool, tmp_path: Path) -> None:
    """It may contain programs of other users, which must not be distributed."""
    source = write_tree(tmp_path / "a", {"AB/k": b"k"})
    source.chmod(mode)
    assert has_problem is (cache_dir(source).problem() is not None)


@pytest.mark.parametrize("uid", [0, 1000])
def test_only_folders_of_the_current_user_are_served(uid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for root too."""
    source = write_tree(tmp_path / "a", {"AB/k": b"k"})
    monkeypatch.setattr(os, "geteuid", lambda: source.stat().st_uid + 1 + uid)
    assert "it belongs to another user" in (cache_dir(source).problem() or "")
