"""Setup of `benchmarks.storage`: images, timing, page cache, memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.memory_reserve import MemoryReserve
from benchmarks.storage.cases import LoadTarget
from benchmarks.storage.images import (
    StoredImage,
    bytes_of,
    check_free_space,
    digests_of,
    fingerprint,
    shapes_of,
    split_shards,
)
from benchmarks.storage.limits import BLOCK_BYTES, split_jobs
from benchmarks.storage.memory import are_mapped, resident, spans, touch
from benchmarks.storage.other_loaders import load_named
from benchmarks.storage.page_cache import PAGE, cached_bytes, make_cold, make_warm
from rfork.errors import RforkError


@pytest.mark.parametrize(
    ("name", "quick", "tensors", "size"),
    [
        ("dense", False, 282, 4_033_081_344),
        ("dense", True, 192, 769_742_848),
        ("small", False, 20_000, 1_064_955_904),
        ("small", True, 6_000, 319_488_000),
    ],
)
def test_images_have_the_documented_size(name: str, quick: bool, tensors: int, size: int) -> None:
    """The size is in tensors, and in bytes of bfloat16."""
    shapes = shapes_of(name, quick)
    assert tensors == len(shapes)
    assert size == bytes_of(shapes)


def test_shards_have_every_tensor_once_and_similar_sizes() -> None:
    """No shard differs from a quarter by more than a tenth."""
    shapes = shapes_of("dense", quick=False)
    shards = split_shards(shapes, 4)
    assert list(shapes) == [name for shard in shards for name in shard]
    assert all(abs(4 * bytes_of(shard) / bytes_of(shapes) - 1) < 0.1 for shard in shards)


def test_a_fingerprint_depends_on_bytes_names_shapes_and_types() -> None:
    """It does not depend on the order, because loaders yield tensors in their own."""
    tensor = torch.arange(4, dtype=torch.int16)

    def of(*named: tuple[str, torch.Tensor]) -> str:
        return fingerprint(digests_of(named))

    right = of(("a", tensor), ("b", tensor + 1))
    others = [
        of(("a", tensor), ("b", tensor)),
        of(("a", tensor), ("c", tensor + 1)),
        of(("a", tensor), ("b", (tensor + 1).view(2, 2))),
        of(("a", tensor), ("b", (tensor + 1).view(torch.uint16))),
        of(("a", tensor)),
    ]
    assert right == of(("b", tensor + 1), ("a", tensor))
    assert right not in others


def test_too_little_space_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised before anything is written."""
    usage = type("Usage", (), {"free": 10**9})
    monkeypatch.setattr("benchmarks.storage.images.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(
        RforkError, match=r"has 1\.0 GB free and the benchmark writes 42\.1 GB: free some space"
    ) as raised:
        check_free_space(tmp_path, 40 * 10**9)
    assert 1 == len(str(raised.value).splitlines())


@pytest.mark.parametrize(
    ("areas", "expected"),
    [
        ([], []),
        ([(0x5000, 0)], []),
        ([(0x1000, 1)], [(0x1000, 0x2000)]),
        ([(0x1FFF, 2)], [(0x1000, 0x3000)]),
        ([(0x1000, 0x1000), (0x2000, 0x1000)], [(0x1000, 0x3000)]),
        ([(0x9000, 1), (0x1000, 1)], [(0x1000, 0x2000), (0x9000, 0xA000)]),
        ([(0x1000, 0x5000), (0x2000, 1), (0x6000, 1)], [(0x1000, 0x7000)]),
    ],
)
def test_spans_are_the_pages_of_the_tensors_only(areas: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    """Adjacent pages are joined; a page between tensors may be unmapped."""
    assert expected == list(spans(areas))


def test_touching_reads_one_byte_of_each_page() -> None:
    """The result is the sum of the first bytes of all pages."""
    tensor = torch.ones(64 * PAGE, dtype=torch.uint8)
    shift = -tensor.data_ptr() % PAGE
    assert 8 == touch({"a": tensor[shift : shift + 5 * PAGE], "b": tensor[shift + 9 * PAGE : shift + 12 * PAGE]})


def test_views_of_a_file_are_detected(tmp_path: Path) -> None:
    """Otherwise a loader that only maps would pass for one that reads."""
    path = tmp_path / "bytes"
    path.write_bytes(bytes(4 * PAGE))
    mapped = torch.from_file(str(path), size=4 * PAGE, dtype=torch.uint8)
    own = {"own": torch.zeros(4 * PAGE)}
    assert not are_mapped(own)
    assert are_mapped(own | {"tail": mapped[3 * PAGE :]})


def test_files_can_be_dropped_from_and_read_into_the_page_cache(tmp_path: Path) -> None:
    """The kernel's own count shows it."""
    device = tmp_path.stat().st_dev
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    filesystem_types = {mount[2]: mount[mount.index("-") + 1] for mount in mounts}
    if filesystem_types.get(f"{os.major(device)}:{os.minor(device)}") == "tmpfs":
        pytest.skip("files of a tmpfs never leave memory")
    path = tmp_path / "bytes"
    path.write_bytes(bytes(64 * PAGE))
    make_cold([path])
    cold = cached_bytes(path)
    make_warm([path])
    assert 0 == cold
    assert 64 * PAGE == cached_bytes(path)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([8], [(0, 0, 2), (0, 2, 4), (0, 4, 6), (0, 6, 8)]),
        ([3], [(0, 0, 1), (0, 1, 2), (0, 2, 3)]),
        ([2, 2, 2, 2], [(0, 0, 2), (1, 0, 2), (2, 0, 2), (3, 0, 2)]),
        ([4, 4], [(0, 0, 2), (0, 2, 4), (1, 0, 2), (1, 2, 4)]),
    ],
)
def test_four_readers_share_the_files(tmp_path: Path, blocks: list[int], expected: list[tuple[int, int, int]]) -> None:
    """Parts are file, first block and end, in complete blocks, as O_DIRECT requires."""
    paths = [tmp_path / str(index) for index in range(len(blocks))]
    for path, count in zip(paths, blocks, strict=True):
        path.touch()
        with path.open("r+b") as file:
            file.truncate(count * BLOCK_BYTES + 1)
    cuts = [(paths.index(path), begin // BLOCK_BYTES, end // BLOCK_BYTES) for path, begin, end in split_jobs(paths)]
    assert expected == cuts


def test_tensors_reach_their_destination(tmp_path: Path) -> None:
    """They are copied into existing ones, cloned if mapped, or unchanged."""
    stored = StoredImage("dense", tmp_path, 0, (), (), (), "", "")
    source, destination = torch.ones(2), torch.zeros(2)
    copied = load_named(LoadTarget(stored, None, "existing", {"a": destination}), [("a", source)], mapped=True)
    cloned = load_named(LoadTarget(stored, None, "fresh"), [("a", source)], mapped=True)
    handed = load_named(LoadTarget(stored, None, "mapped"), [("a", source)], mapped=True)
    owned = load_named(LoadTarget(stored, None, "fresh"), [("a", source)])
    assert [destination.data_ptr(), source.data_ptr(), source.data_ptr()] == [
        tensors["a"].data_ptr() for tensors in (copied, handed, owned)
    ]
    assert cloned["a"].data_ptr() != source.data_ptr()
    assert [1.0, 1.0] == destination.tolist()


def test_the_reserve_is_allocated_from_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It must not evict the page cache; one GiB stays free."""
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr("benchmarks.memory_reserve.MEMINFO", meminfo)
    reserve = MemoryReserve()

    def reserve_with(kib: int) -> int:
        meminfo.write_text(f"MemTotal: 9 kB\nMemFree: {kib} kB\n")
        return reserve.acquire(8 << 20)

    gib = 1 << 20
    assert [8 << 20, 4 << 20, 0, 0] == [
        reserve_with(2 * gib),
        reserve_with(gib + (4 << 10)),
        reserve_with(gib),
        reserve_with(0),
    ]


def test_the_reserve_is_resident_until_released(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process's resident memory shows it."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree: 2097152 kB\n")
    monkeypatch.setattr("benchmarks.memory_reserve.MEMINFO", meminfo)
    reserve, size = MemoryReserve(), 64 << 20
    before = resident()
    reserve.acquire(size)
    resident_with_reserve = resident()
    reserve.release()
    assert resident_with_reserve - before > size // 2
    assert resident_with_reserve - resident() > size // 2
