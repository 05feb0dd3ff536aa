"""From an image to folders: what is put in place, and what is there afterwards."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from rfork.artifacts.client import _with_timeout, install_image
from rfork.artifacts.metadata import bytes_of, read_metadata
from rfork.artifacts.pack import pack
from rfork.artifacts.report import ArtifactReport
from rfork.artifacts.staging_dir import remove_stale
from rfork.artifacts.unpack import unpack
from rfork.errors import DeadlineExceeded
from rfork.image.buffer_views import allocate_buffer
from rfork.image.capture import image_from_tensors
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
    """Nothing leaves the folder of a kind, wherever somebody made a link there lead."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/k": b"k", "CD/k": b"k"})).image
    outside = write_tree(tmp_path / "outside", {})
    write_tree(tmp_path / "b", {})
    (tmp_path / "b" / "AB").symlink_to(outside)
    done = unpack_tree(image, tmp_path / "b")
    assert ({}, 1, 1) == (read_tree(outside), done.files, done.kept_existing)


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    """The same file is not written again, another one is not written over, a missing one is added."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/same": b"1", "AB/other": b"2", "AB/new": b"3"})).image
    target = write_tree(tmp_path / "b", {"AB/same": b"1", "AB/other": b"mine"})
    done = unpack_tree(image, target)
    assert {"AB/same": b"1", "AB/other": b"mine", "AB/new": b"3"} == read_tree(target)
    assert (1, 1, 1) == (done.files, done.already_present, done.kept_existing)


def test_an_entry_that_somebody_builds_gets_no_foreign_files(tmp_path: Path) -> None:
    """Ninja's log and a library of two builds do not fit one another, so such a folder is left alone."""
    source = write_tree(tmp_path / "a", {"op/op.so": b"so", "op/.ninja_log": b"theirs", "two/two.so": b"so"})
    image = pack_tree(source, "deep_gemm").image
    target = write_tree(tmp_path / "b", {"op/.ninja_log": b"mine"})
    unpack_tree(image, target, "deep_gemm")
    assert {"op/.ninja_log": b"mine", "two/two.so": b"so"} == read_tree(target)


def test_a_kind_that_holds_paths_is_only_taken_at_its_place(tmp_path: Path) -> None:
    """vLLM finds its graphs again by absolute paths: elsewhere they are passed over, and it is said."""
    image = pack_tree(write_tree(tmp_path / "a", {"hash/rank_0_0/graph": b"g"}), "vllm").image
    done = unpack_tree(image, tmp_path / "b", "vllm")
    assert (0, False) == (done.files, (tmp_path / "b").exists())
    assert (f"vllm only fits {tmp_path}/a, here it lies in {tmp_path}/b",) == done.skipped


def test_groups_of_triton_are_made_to_fit(tmp_path: Path) -> None:
    """They hold absolute paths, of the folder where they are: here after the move, there before."""
    source = tmp_path / "a"
    group = {"child_paths": {"k.cubin": f"{source}/AB/k.cubin", "k.json": f"{source}/AB/k.json"}}
    write_tree(source, {"AB/k.cubin": b"c", "AB/k.json": b"j", "AB/__grp__k.json": json.dumps(group).encode()})
    unpack_tree(pack_tree(source).image, tmp_path / "b")
    expected = {"child_paths": {name: f"{tmp_path}/b/AB/{name}" for name in ("k.cubin", "k.json")}}
    assert expected == json.loads((tmp_path / "b/AB/__grp__k.json").read_text())
    assert 3 == unpack_tree(pack_tree(source).image, tmp_path / "b").already_present


def test_the_time_being_over_leaves_nothing(tmp_path: Path) -> None:
    """Neither half a file nor the folder that it was put together in."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/k": b"k"})).image
    with pytest.raises(DeadlineExceeded):
        unpack(image, read_metadata(image), [cache_dir(tmp_path / "b")], time.monotonic() - 1)
    assert [] == list((tmp_path / "b").iterdir())


def test_only_the_kinds_that_are_asked_for_are_put_in_place(tmp_path: Path) -> None:
    """A giver of more kinds than the settings here name changes nothing else."""
    both = [
        cache_dir(write_tree(tmp_path / "a", {"AB/k": b"k"})),
        cache_dir(write_tree(tmp_path / "i", {"x/y.so": b"s"}), "inductor"),
    ]
    made = pack(both, KEY, SETTINGS)
    if made is None:
        raise ValueError("nothing to pack")
    unpack(made.image, read_metadata(made.image), [cache_dir(tmp_path / "b")], FOREVER)
    assert {"AB/k": b"k"} == read_tree(tmp_path / "b")


def test_an_image_that_was_carried_holds_the_same_bytes(tmp_path: Path) -> None:
    """Its layout allocates to one that a fork fills, file by file."""
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


def test_what_was_put_in_place_is_told_though_the_rest_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up half way is the end, with a report of what is there: nobody else is asked."""
    both = [
        cache_dir(write_tree(tmp_path / "a", {"AB/k": b"kernel"})),
        cache_dir(write_tree(tmp_path / "i", {"x/y.so": b"s"}), "inductor"),
    ]
    made = pack(both, KEY, SETTINGS)
    assert made is not None
    utime = os.utime

    def full(file: int, *, ns: tuple[int, int]) -> None:
        if os.fstat(file).st_size == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        utime(file, ns=ns)

    monkeypatch.setattr(os, "utime", full)
    targets = [cache_dir(tmp_path / "b"), cache_dir(tmp_path / "j", "inductor")]
    initial_report = ArtifactReport("m", KEY.id, source="somebody")
    report = install_image(made.image, targets, KEY, SETTINGS, FOREVER, initial_report)
    assert ({"AB/k": b"kernel"}, 1, 6, "somebody", True) == (
        read_tree(tmp_path / "b"), report.files, report.bytes, report.source,
        (report.reason or "").startswith("StorageFull: "),
    )  # fmt: skip


def test_what_a_dead_process_left_is_swept_without_locks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders cannot be locked, by its age: a young one may have somebody at work in it."""
    old, young = tmp_path / ".rfork-old.tmp", tmp_path / ".rfork-young.tmp"
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert (1, False, True) == (remove_stale(tmp_path), old.exists(), young.exists())


def test_a_folder_that_others_sweep_as_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is locked, it looks like one that a dead process left."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/k": b"k"})).image
    swept: list[int] = []
    mkdtemp = tempfile.mkdtemp

    def at_once(**named: str) -> str:
        made = mkdtemp(**named)
        if not swept:
            swept.append(remove_stale(tmp_path / "b"))
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", at_once)
    done = unpack_tree(image, tmp_path / "b")
    assert ([1], 1, {"AB/k": b"k"}) == (swept, done.files, read_tree(tmp_path / "b"))


def test_what_is_taken_is_always_verified() -> None:
    """RFORK_VERIFY_CHUNKS=0 is for measuring how fast weights come; programs are another thing."""
    assert True is _with_timeout(InstanceSettings(verify_chunks=False), 10.0).verify_chunks
