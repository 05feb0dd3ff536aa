"""From folders to an image and back: what travels, what does not, and what is never written."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from rfork.artifacts.contents import Told, bytes_of, check_layout, told_of
from rfork.artifacts.key import ArtifactKey
from rfork.artifacts.kinds import KINDS, Place, places
from rfork.artifacts.names import META
from rfork.artifacts.packing import Packed, pack
from rfork.artifacts.report import ArtifactReport
from rfork.artifacts.staging import sweep
from rfork.artifacts.taking import _bounded, place_image
from rfork.artifacts.unpacking import Unpacked, unpack
from rfork.errors import DeadlinePassed, LayoutMismatch, SourceCorrupt
from rfork.image.arena import allocate
from rfork.image.capture import image_of
from rfork.image.layout import Layout
from rfork.image.memory import Image
from rfork.image.specs import TensorSpec
from rfork.settings import ArtifactSettings, Settings, load

KEY = ArtifactKey(gpu="H100", driver="550.54", torch="2.13.0")
SETTINGS = load(ArtifactSettings, settle_s=0)
FOREVER = float("inf")
Tree = dict[str, bytes]


def place(folder: Path, kind: str = "triton") -> Place:
    return Place(KINDS[kind], folder)


def write(folder: Path, files: Tree) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)  # whatever the umask: one that others can write to is passed over
    return folder


def tree(folder: Path) -> Tree:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def packed(folder: Path, kind: str = "triton", settings: ArtifactSettings = SETTINGS) -> Packed:
    made = pack([place(folder, kind)], KEY, settings)
    if made is None:
        raise ValueError("nothing to pack")
    return made


def unpacked(image: Image, folder: Path, kind: str = "triton") -> Unpacked:
    return unpack(image, told_of(image), [place(folder, kind)], FOREVER)


def test_a_cache_comes_out_as_it_went_in(tmp_path: Path) -> None:
    """Content, the execute bit and the time of change (which Ninja goes by) are the same; empty files too."""
    files = {
        "AB/kernel.cubin": b"cubin" * 1000,
        "AB/kernel.json": b"{}",
        "CD/empty": b"",
        "CD/launch.so": b"elf",
    }
    source = write(tmp_path / "a", files)
    (source / "CD/launch.so").chmod(0o4755)
    os.utime(source / "AB/kernel.json", ns=(5, 1_700_000_000_123_456_789))
    done = unpacked(packed(source).image, tmp_path / "b")
    target = tmp_path / "b"
    told = (target / "CD/launch.so").stat().st_mode & 0o7777, (target / "AB/kernel.json").stat().st_mtime_ns
    assert (files, 4, (0o755, 1_700_000_000_123_456_789)) == (tree(target), done.files, told)


def test_a_fetched_cache_packs_to_the_same_image(tmp_path: Path) -> None:
    """Whoever took a cache gives the very same image: its readers may read from either."""
    source = write(tmp_path / "a", {"AB/kernel.cubin": b"x", "CD/e": b"y"})
    first = packed(source).image
    unpacked(first, tmp_path / "b")
    os.rename(source, tmp_path / "gone")
    os.rename(tmp_path / "b", source)
    again = packed(source).image
    assert first.manifest().weights_id == again.manifest().weights_id


def test_locks_links_and_what_is_being_written_stay_behind(tmp_path: Path) -> None:
    """Only whole, plain files of a cache travel."""
    source = write(
        tmp_path / "a",
        {"AB/k": b"k", "AB/lock": b"", "locks/x.lock": b"", "AB/tmp.pid_7_x/k": b"h",
         ".rfork-1.tmp/AB/k": b"s", "flashinfer_jit.log": b"", "AB/.12.34.tmp": b"half"},
    )  # fmt: skip
    (source / "AB/link").symlink_to("/etc/passwd")
    os.mkfifo(source / "AB/pipe")
    made = packed(source)
    unpacked(made.image, tmp_path / "b")
    assert ({"AB/k": b"k"}, {"no regular file": 2}) == (tree(tmp_path / "b"), made.left_out)


def test_a_folder_that_is_linked_in_is_not_followed(tmp_path: Path) -> None:
    """What lies outside of a cache's folder is not given."""
    source = write(tmp_path / "a", {"AB/k": b"k"})
    (source / "home").symlink_to(write(tmp_path / "secret", {"id_rsa": b"s"}))
    assert ["triton/AB/k", META] == sorted(
        (spec.name for spec in packed(source).image.layout.tensors), key=lambda name: name == META
    )


def test_a_file_that_changes_while_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole or not at all: the entry of one that grows between its two looks does not travel."""
    source = write(tmp_path / "a", {"AB/still": b"s", "AB/xgrows": b"1", "CD/k": b"k"})
    read = os.read

    def grows(descriptor: int, count: int) -> bytes:
        if os.path.samestat(os.fstat(descriptor), os.stat(source / "AB/xgrows")):
            with open(source / "AB/xgrows", "ab") as file:
                file.write(b"2")
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", grows)
    made = packed(source)
    unpacked(made.image, tmp_path / "b")
    assert ({"CD/k": b"k"}, {"changed while it was read": 1, "of the same entry": 1}) == (
        tree(tmp_path / "b"),
        made.left_out,
    )


def test_a_file_that_was_changed_just_now_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linker may be at work on its entry still; those that have settled travel."""
    source = write(tmp_path / "a", {"AB/old": b"o", "AB/new": b"n", "CD/old": b"o"})
    os.utime(source / "AB/old", (0, 0))
    os.utime(source / "CD/old", (0, 0))
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    made = packed(source, settings=load(ArtifactSettings, settle_s=60.0))
    assert (1, {"changed just now": 1, "of the same entry": 1}, True) == (
        made.files,
        made.left_out,
        59 < waited[0] <= 60,
    )


def test_no_more_is_taken_than_the_settings_say(tmp_path: Path) -> None:
    """In bytes, and in files, and what is taken are whole entries."""
    names = [f"{entry}/{number}" for entry in ("AB", "CD", "EF") for number in range(2)]
    source = write(tmp_path / "a", {name: bytes(10_000) for name in names})
    few = load(ArtifactSettings, settle_s=0, most_files=3)
    small = load(ArtifactSettings, settle_s=0, most_bytes=55_000)
    for settings, count in ((few, 2), (small, 4)):
        made = packed(source, settings=settings)
        target = tmp_path / str(count)
        unpacked(made.image, target)
        assert names[:count] == sorted(tree(target))


def test_an_entry_travels_whole_or_not_at_all(tmp_path: Path) -> None:
    """Triton takes a group without its binary for a hit and fails, so half of an entry is worse than none."""
    children = {name: str(tmp_path / "a/AB" / name) for name in ("k.cubin", "k.json")}
    group = json.dumps({"child_paths": children}).encode()
    files = {"AB/__grp__k.json": group, "AB/k.cubin": bytes(200_000), "AB/k.json": b"{}", "CD/k": b"k"}
    small = load(ArtifactSettings, settle_s=0, most_bytes=100_000)
    made = packed(write(tmp_path / "a", files), settings=small)
    unpacked(made.image, tmp_path / "b")
    assert {"CD/k": b"k"} == tree(tmp_path / "b")
    assert {"too many or too large": 1, "of the same entry": 2} == made.left_out


def test_a_group_whose_files_are_gone_stays(tmp_path: Path) -> None:
    """Somebody cleaned up here: with the whole entry, as half of it ends the engine that finds it."""
    group = json.dumps({"child_paths": {"k.cubin": str(tmp_path / "a/AB/k.cubin")}}).encode()
    made = packed(write(tmp_path / "a", {"AB/__grp__k.json": group, "AB/k.json": b"{}", "CD/k": b"k"}))
    unpacked(made.image, tmp_path / "b")
    assert {"CD/k": b"k"} == tree(tmp_path / "b")


def test_a_group_that_comes_without_its_files_is_refused(tmp_path: Path) -> None:
    """Whoever gave it: nothing of that image is put in place."""
    group = json.dumps({"child_paths": {"k.cubin": "k.cubin", "k.json": "k.json"}}).encode()
    image = image_with({"triton/AB/__grp__k.json": group, "triton/AB/k.json": b"{}"}, KEY)
    with pytest.raises(SourceCorrupt, match=r"lacks 'k.cubin'"):
        place_image(image, [place(tmp_path / "b")], KEY, SETTINGS, FOREVER, ArtifactReport("m", KEY.id))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("kind", "path", "entry"),
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
def test_what_travels_whole_is_an_entry(kind: str, path: str, entry: str) -> None:
    """What one compilation wrote; not all that was ever compiled, where a folder holds that."""
    assert entry == KINDS[kind].entry_of(path)


def test_what_is_packed_to_the_brim_is_taken(tmp_path: Path) -> None:
    """What the image says of its files counts: whatever the bound, takers of the same bound accept it."""
    source = write(tmp_path / "a", {f"{entry}/kernel": bytes(1000) for entry in range(50)})
    whole = packed(source).image.layout.image_bytes
    for most_bytes in (whole, whole - 1, whole // 2):
        settings = load(ArtifactSettings, settle_s=0, most_bytes=most_bytes)
        layout = packed(source, settings=settings).image.layout
        check_layout(layout, KINDS, settings.most_files, settings.most_bytes)
        assert most_bytes - 1200 <= layout.image_bytes <= most_bytes


def test_what_an_image_says_of_its_files_is_bounded() -> None:
    """About 1.2 KiB a file: memory is not taken for more, before any byte is asked for."""
    specs = [("triton/a", "uint8", (1,), (1,), 0), (META, "uint8", (1 << 20,), (1,), 1)]
    layout = Layout((TensorSpec(*spec) for spec in specs), (1 << 20) + 1)
    with pytest.raises(SourceCorrupt, match="to say"):
        check_layout(layout, KINDS, 100, 1 << 30)


def image_with(files: Tree, key: ArtifactKey | None = None) -> Image:
    """An image that says it holds these files, as a giver that means harm would make one."""
    told = Told(
        key=asdict(key) if key else {}, places={"triton": "/a"}, files=dict.fromkeys(files, (True, 0))
    )
    contents = {**files, META: told.model_dump_json().encode()}
    return image_of(
        {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in contents.items()}
    )


@pytest.mark.parametrize(
    "name",
    ["triton/../../outside", "triton//etc/cron.d/x", "/etc/passwd", "triton/a/./b", "triton/", "triton",
     "triton/a\\b", "triton/a\nb", "triton/" + "x" * 256, "triton/AB/lock", "../triton/a",
     "triton/.rfork-x.tmp/a", "triton/a\0b"],
)  # fmt: skip
def test_a_hostile_name_refuses_all_that_comes_with_it(name: str, tmp_path: Path) -> None:
    """Before any byte is asked for; a name of a good file beside it changes nothing."""
    layout = image_with({name: b"evil", "triton/AB/good": b"good"}).layout
    with pytest.raises(SourceCorrupt):
        check_layout(layout, KINDS, 100, 1 << 20)


def test_a_file_cannot_be_a_folder_too() -> None:
    """One of the two would be written through the other."""
    with pytest.raises(SourceCorrupt, match="as a file and as a folder"):
        check_layout(image_with({"triton/a": b"1", "triton/a/b": b"2"}).layout, KINDS, 100, 1 << 20)


@pytest.mark.parametrize(
    ("most_files", "most_bytes", "named"),
    [(1, 1 << 20, "RFORK_ARTIFACTS_MOST_FILES"), (100, 10, "larger than RFORK_ARTIFACTS_MOST_BYTES")],
)
def test_an_image_beyond_the_bounds_is_refused(most_files: int, most_bytes: int, named: str) -> None:
    """Before memory is taken for it; the setting is named."""
    layout = image_with({"triton/a": b"1", "triton/b": b"2"}).layout
    with pytest.raises(SourceCorrupt, match=named):
        check_layout(layout, KINDS, most_files, most_bytes)


@pytest.mark.parametrize(
    ("shape", "offset"), [((9,), 0), ((1,), 8), ((1,), -1), ((-1,), 0), ((8,), 0)], ids=str
)
def test_a_file_that_is_not_in_the_image_is_refused(shape: tuple[int], offset: int) -> None:
    """Outside of its bytes, or (the last one) on bytes that are another file's too."""
    specs = [("triton/a", "uint8", shape, (1,), offset), (META, "uint8", (4,), (1,), 0)]
    with pytest.raises(SourceCorrupt):
        check_layout(Layout((TensorSpec(*spec) for spec in specs), 8), KINDS, 100, 1 << 20)


def test_weights_are_no_artifacts() -> None:
    """An image of a model is refused for what it is."""
    with pytest.raises(SourceCorrupt, match="which is no file"):
        check_layout(image_of({"weight": torch.zeros(2, 2)}).layout, KINDS, 100, 1 << 20)


def test_a_link_in_the_target_is_not_written_through(tmp_path: Path) -> None:
    """Nothing leaves the folder of a kind, wherever somebody made a link there lead."""
    image = packed(write(tmp_path / "a", {"AB/k": b"k", "CD/k": b"k"})).image
    outside = write(tmp_path / "outside", {})
    write(tmp_path / "b", {})
    (tmp_path / "b" / "AB").symlink_to(outside)
    done = unpacked(image, tmp_path / "b")
    assert ({}, 1, 1) == (tree(outside), done.files, done.kept)


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    """The same file is not written again, another one is not written over, a missing one is added."""
    image = packed(write(tmp_path / "a", {"AB/same": b"1", "AB/other": b"2", "AB/new": b"3"})).image
    target = write(tmp_path / "b", {"AB/same": b"1", "AB/other": b"mine"})
    done = unpacked(image, target)
    assert {"AB/same": b"1", "AB/other": b"mine", "AB/new": b"3"} == tree(target)
    assert (1, 1, 1) == (done.files, done.there, done.kept)


def test_an_entry_that_somebody_builds_gets_no_foreign_files(tmp_path: Path) -> None:
    """Ninja's log and a library of two builds do not fit one another, so such a folder is left alone."""
    source = write(tmp_path / "a", {"op/op.so": b"so", "op/.ninja_log": b"theirs", "two/two.so": b"so"})
    image = packed(source, "deep_gemm").image
    target = write(tmp_path / "b", {"op/.ninja_log": b"mine"})
    unpacked(image, target, "deep_gemm")
    assert {"op/.ninja_log": b"mine", "two/two.so": b"so"} == tree(target)


def test_a_kind_that_holds_paths_is_only_taken_at_its_place(tmp_path: Path) -> None:
    """vLLM finds its graphs again by absolute paths: elsewhere they are passed over, and it is said."""
    image = packed(write(tmp_path / "a", {"hash/rank_0_0/graph": b"g"}), "vllm").image
    done = unpacked(image, tmp_path / "b", "vllm")
    assert (0, False) == (done.files, (tmp_path / "b").exists())
    assert (f"vllm only fits {tmp_path}/a, here it lies in {tmp_path}/b",) == done.passed_over


def test_groups_of_triton_are_made_to_fit(tmp_path: Path) -> None:
    """They hold absolute paths, of the folder where they are: here after the move, there before."""
    source = tmp_path / "a"
    group = {"child_paths": {"k.cubin": f"{source}/AB/k.cubin", "k.json": f"{source}/AB/k.json"}}
    write(source, {"AB/k.cubin": b"c", "AB/k.json": b"j", "AB/__grp__k.json": json.dumps(group).encode()})
    unpacked(packed(source).image, tmp_path / "b")
    expected = {"child_paths": {name: f"{tmp_path}/b/AB/{name}" for name in ("k.cubin", "k.json")}}
    assert expected == json.loads((tmp_path / "b/AB/__grp__k.json").read_text())
    assert 3 == unpacked(packed(source).image, tmp_path / "b").there


def test_the_time_being_over_leaves_nothing(tmp_path: Path) -> None:
    """Neither half a file nor the folder that it was put together in."""
    image = packed(write(tmp_path / "a", {"AB/k": b"k"})).image
    with pytest.raises(DeadlinePassed):
        unpack(image, told_of(image), [place(tmp_path / "b")], time.monotonic() - 1)
    assert [] == list((tmp_path / "b").iterdir())


def test_another_key_is_refused_and_named(tmp_path: Path) -> None:
    """Each value that differs, as here and there."""
    image = packed(write(tmp_path / "a", {"AB/k": b"k"})).image
    here = replace(KEY, driver="560.1", torch="2.14.0")
    with pytest.raises(LayoutMismatch) as caught:
        place_image(image, [place(tmp_path / "b")], here, SETTINGS, FOREVER, ArtifactReport("m", here.id))
    told = "driver: here 560.1, there 550.54; torch: here 2.14.0, there 2.13.0"
    assert f"these artifacts were made for another machine: {told}" == str(caught.value)
    assert not (tmp_path / "b").exists()


def test_only_the_kinds_that_are_asked_for_are_put_in_place(tmp_path: Path) -> None:
    """A giver of more kinds than the settings here name changes nothing else."""
    both = [
        place(write(tmp_path / "a", {"AB/k": b"k"})),
        place(write(tmp_path / "i", {"x/y.so": b"s"}), "inductor"),
    ]
    made = pack(both, KEY, SETTINGS)
    if made is None:
        raise ValueError("nothing to pack")
    unpack(made.image, told_of(made.image), [place(tmp_path / "b")], FOREVER)
    assert {"AB/k": b"k"} == tree(tmp_path / "b")


def test_an_image_that_was_carried_holds_the_same_bytes(tmp_path: Path) -> None:
    """Its layout allocates to one that a fork fills, file by file."""
    image = packed(write(tmp_path / "a", {"AB/k": b"kernel", "AB/e": b""})).image
    copy = image_of(allocate(image.layout)[1])
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


def test_nothing_travels_unless_it_is_named() -> None:
    """Off is the default."""
    assert [] == places(load(ArtifactSettings))


def test_what_was_put_in_place_is_told_though_the_rest_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up half way is the end, with a report of what is there: nobody else is asked."""
    both = [
        place(write(tmp_path / "a", {"AB/k": b"kernel"})),
        place(write(tmp_path / "i", {"x/y.so": b"s"}), "inductor"),
    ]
    made = pack(both, KEY, SETTINGS)
    assert made is not None
    utime = os.utime

    def full(file: int, *, ns: tuple[int, int]) -> None:
        if os.fstat(file).st_size == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        utime(file, ns=ns)

    monkeypatch.setattr(os, "utime", full)
    targets = [place(tmp_path / "b"), place(tmp_path / "j", "inductor")]
    asked = ArtifactReport("m", KEY.id, source="somebody")
    report = place_image(made.image, targets, KEY, SETTINGS, FOREVER, asked)
    assert ({"AB/k": b"kernel"}, 1, 6, "somebody", True) == (
        tree(tmp_path / "b"), report.files, report.bytes, report.source,
        (report.reason or "").startswith("StorageFull: "),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "trouble"),
    [(0o755, False), (0o775, True), (0o757, True), (0o777, True), (0o1777, False), (0o700, False)],
)
def test_a_folder_that_others_can_write_to_is_passed_over(mode: int, trouble: bool, tmp_path: Path) -> None:
    """What somebody else can put into a folder of programs must not be spread."""
    source = write(tmp_path / "a", {"AB/k": b"k"})
    source.chmod(mode)
    assert trouble is (place(source).trouble() is not None)


@pytest.mark.parametrize("uid", [0, 1000])
def test_only_ones_own_folders_are_given(uid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs this, root too: a folder of another user is that user's."""
    source = write(tmp_path / "a", {"AB/k": b"k"})
    monkeypatch.setattr(os, "geteuid", lambda: source.stat().st_uid + 1 + uid)
    assert "it belongs to another user" in (place(source).trouble() or "")


def test_what_a_dead_process_left_is_swept_without_locks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where folders cannot be locked, by its age: a young one may have somebody at work in it."""
    old, young = tmp_path / ".rfork-old.tmp", tmp_path / ".rfork-young.tmp"
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert (1, False, True) == (sweep(tmp_path), old.exists(), young.exists())


def test_what_is_taken_is_always_verified() -> None:
    """RFORK_VERIFY=0 is for measuring how fast weights come; programs are another thing."""
    assert True is _bounded(Settings(verify=False), 10.0).verify
