"""From folders to an image: what travels, and what stays behind."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from rfork.artifacts.cache_types import CACHE_TYPES, cache_dirs
from rfork.artifacts.file_names import META
from rfork.artifacts.metadata import check_layout
from rfork.settings import ArtifactSettings, load
from tests.unit.artifacts.file_trees import cache_dir, pack_tree, read_tree, unpack_tree, write_tree


def test_a_cache_comes_out_as_it_went_in(tmp_path: Path) -> None:
    """Content, the execute bit and the time of change (which Ninja goes by) are the same; empty files too."""
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
    assert (files, 4, (0o755, 1_700_000_000_123_456_789)) == (
        read_tree(target),
        done.files,
        restored_metadata,
    )


def test_a_fetched_cache_packs_to_the_same_image(tmp_path: Path) -> None:
    """Whoever took a cache gives the very same image: its readers may read from either."""
    source = write_tree(tmp_path / "a", {"AB/kernel.cubin": b"x", "CD/e": b"y"})
    first = pack_tree(source).image
    unpack_tree(first, tmp_path / "b")
    os.rename(source, tmp_path / "gone")
    os.rename(tmp_path / "b", source)
    again = pack_tree(source).image
    assert first.manifest().weights_id == again.manifest().weights_id


def test_locks_links_and_what_is_being_written_stay_behind(tmp_path: Path) -> None:
    """Only whole, plain files of a cache travel."""
    source = write_tree(
        tmp_path / "a",
        {"AB/k": b"k", "AB/lock": b"", "locks/x.lock": b"", "AB/tmp.pid_7_x/k": b"h",
         ".rfork-1.tmp/AB/k": b"s", "flashinfer_jit.log": b"", "AB/.12.34.tmp": b"half"},
    )  # fmt: skip
    (source / "AB/link").symlink_to("/etc/passwd")
    os.mkfifo(source / "AB/pipe")
    made = pack_tree(source)
    unpack_tree(made.image, tmp_path / "b")
    assert ({"AB/k": b"k"}, {"no regular file": 2}) == (read_tree(tmp_path / "b"), made.skipped)


def test_a_folder_that_is_linked_in_is_not_followed(tmp_path: Path) -> None:
    """What lies outside of a cache's folder is not given."""
    source = write_tree(tmp_path / "a", {"AB/k": b"k"})
    (source / "home").symlink_to(write_tree(tmp_path / "secret", {"id_rsa": b"s"}))
    assert ["triton/AB/k", META] == sorted(
        (spec.name for spec in pack_tree(source).image.layout.tensors), key=lambda name: name == META
    )


def test_a_file_that_changes_while_it_is_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or not at all: the entry of one that grows between its two looks does not travel."""
    source = write_tree(tmp_path / "a", {"AB/still": b"s", "AB/xgrows": b"1", "CD/k": b"k"})
    read = os.read

    def grows(descriptor: int, count: int) -> bytes:
        if os.path.samestat(os.fstat(descriptor), os.stat(source / "AB/xgrows")):
            with open(source / "AB/xgrows", "ab") as file:
                file.write(b"2")
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", grows)
    made = pack_tree(source)
    unpack_tree(made.image, tmp_path / "b")
    assert ({"CD/k": b"k"}, {"changed while it was read": 1, "of the same entry": 1}) == (
        read_tree(tmp_path / "b"),
        made.skipped,
    )


def test_a_file_that_was_changed_just_now_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linker may be at work on its entry still; those that have settled travel."""
    source = write_tree(tmp_path / "a", {"AB/old": b"o", "AB/new": b"n", "CD/old": b"o"})
    os.utime(source / "AB/old", (0, 0))
    os.utime(source / "CD/old", (0, 0))
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    made = pack_tree(source, settings=load(ArtifactSettings, quiet_period_s=600.0))
    assert (1, {"changed just now": 1, "of the same entry": 1}, True) == (
        made.files,
        made.skipped,
        480 < waited[0] <= 600,
    )


def test_no_more_is_taken_than_the_settings_say(tmp_path: Path) -> None:
    """In bytes, and in files, and what is taken are whole entries."""
    names = [f"{entry}/{number}" for entry in ("AB", "CD", "EF") for number in range(2)]
    source = write_tree(tmp_path / "a", {name: bytes(10_000) for name in names})
    few = load(ArtifactSettings, quiet_period_s=0, max_files=3)
    small = load(ArtifactSettings, quiet_period_s=0, max_bytes=55_000)
    for settings, count in ((few, 2), (small, 4)):
        made = pack_tree(source, settings=settings)
        target = tmp_path / str(count)
        unpack_tree(made.image, target)
        assert names[:count] == sorted(read_tree(target))


def test_an_entry_travels_whole_or_not_at_all(tmp_path: Path) -> None:
    """Triton takes a group without its binary for a hit and fails, so half of an entry is worse than none."""
    children = {name: str(tmp_path / "a/AB" / name) for name in ("k.cubin", "k.json")}
    group = json.dumps({"child_paths": children}).encode()
    files = {"AB/__grp__k.json": group, "AB/k.cubin": bytes(200_000), "AB/k.json": b"{}", "CD/k": b"k"}
    small = load(ArtifactSettings, quiet_period_s=0, max_bytes=100_000)
    made = pack_tree(write_tree(tmp_path / "a", files), settings=small)
    unpack_tree(made.image, tmp_path / "b")
    assert {"CD/k": b"k"} == read_tree(tmp_path / "b")
    assert {"too many or too large": 1, "of the same entry": 2} == made.skipped


def test_a_group_whose_files_are_gone_stays(tmp_path: Path) -> None:
    """Somebody cleaned up here: with the whole entry, as half of it ends the engine that finds it."""
    group = json.dumps({"child_paths": {"k.cubin": str(tmp_path / "a/AB/k.cubin")}}).encode()
    made = pack_tree(write_tree(tmp_path / "a", {"AB/__grp__k.json": group, "AB/k.json": b"{}", "CD/k": b"k"}))
    unpack_tree(made.image, tmp_path / "b")
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
def test_what_travels_whole_is_an_entry(type_name: str, path: str, entry: str) -> None:
    """What one compilation wrote; not all that was ever compiled, where a folder holds that."""
    assert entry == CACHE_TYPES[type_name].entry_of(path)


def test_what_is_packed_to_the_brim_is_taken(tmp_path: Path) -> None:
    """What the image says of its files counts: whatever the bound, takers of the same bound accept it."""
    source = write_tree(tmp_path / "a", {f"{entry}/kernel": bytes(1000) for entry in range(50)})
    full_bytes = pack_tree(source).image.layout.image_bytes
    for max_bytes in (full_bytes, full_bytes - 1, full_bytes // 2):
        settings = load(ArtifactSettings, quiet_period_s=0, max_bytes=max_bytes)
        layout = pack_tree(source, settings=settings).image.layout
        check_layout(layout, CACHE_TYPES, settings.max_files, settings.max_bytes)
        assert max_bytes - 1200 <= layout.image_bytes <= max_bytes


def test_nothing_travels_unless_it_is_named() -> None:
    """Off is the default."""
    assert [] == cache_dirs(load(ArtifactSettings))


@pytest.mark.parametrize(
    ("mode", "has_problem"),
    [(0o755, False), (0o775, True), (0o757, True), (0o777, True), (0o1777, False), (0o700, False)],
)
def test_a_folder_that_others_can_write_to_is_passed_over(mode: int, has_problem: bool, tmp_path: Path) -> None:
    """What somebody else can put into a folder of programs must not be spread."""
    source = write_tree(tmp_path / "a", {"AB/k": b"k"})
    source.chmod(mode)
    assert has_problem is (cache_dir(source).problem() is not None)


@pytest.mark.parametrize("uid", [0, 1000])
def test_only_ones_own_folders_are_given(uid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs this, root too: a folder of another user is that user's."""
    source = write_tree(tmp_path / "a", {"AB/k": b"k"})
    monkeypatch.setattr(os, "geteuid", lambda: source.stat().st_uid + 1 + uid)
    assert "it belongs to another user" in (cache_dir(source).problem() or "")
