"""Planning of shared memory: chunk files, mapped pages and the memory budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.image.host_memory import MIN_MAPPED_BYTES
from rfork.transport.shared_memory import file_layout, page_remapper
from rfork.transport.shared_memory.file_layout import (
    MAX_PIECES,
    PAGE,
    FileLayout,
    FileRun,
    MappedRun,
    alignment_request,
    split_mappable,
)
from rfork.transport.shared_memory.memory_budget import RESERVE, MemoryBudget, fits_in_memory
from rfork.transport.shared_memory.page_remapper import (
    MappedArea,
    ProcessMaps,
    ReplaceableMemory,
    has_private_mapping,
)
from tests.transport_contract import image_of

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ([], ((1000,), (0,))),
        ([0, 64], ((1000,), (64,))),
        ([100, 64], ((1000, 1100), (0, PAGE + 64))),
        ([0, 64, 5000, 64], ((1000, 6000), (64, 2 * PAGE + 64))),
        ([0, 64, 4096, 64], ((1000, 5096), (64, PAGE + 64))),
    ],
)
def test_a_file_layout_matches_the_requested_alignment(
    requested: list[int], expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """Each run starts at the next file offset with the requested offset within a page."""
    layout = FileLayout.requested(1000, 11000, requested)
    assert expected == (layout.starts, layout.file_offsets)


@pytest.mark.parametrize(
    "requested",
    [[0], [5, 0, 4, 0], [0, 0, 0, 0], [10000, 0], [-1, 0], [0, PAGE], [0, -1], [0, 0] * 600],
)
def test_an_invalid_alignment_request_is_rejected(requested: list[int]) -> None:
    """Alignment requests come from another process."""
    with pytest.raises(ValueError, match=r"alignment|place"):
        FileLayout.requested(1000, 11000, requested)


def test_a_layout_survives_encoding() -> None:
    """Decoding an encoded layout returns an equal one."""
    layout = FileLayout.requested(1000, 11000, [0, 64, 5000, 7])
    assert layout == FileLayout.from_message(1000, 11000, layout.to_message())


@pytest.mark.parametrize("message", [[], [0], [1, 0], [0, 0, 0, 5], [0, -1], [0, 0, 10000, 5], [5, 0, 3, 0]])
def test_an_invalid_layout_is_rejected(message: list[int]) -> None:
    """Layouts come from another process."""
    with pytest.raises(ValueError, match="not a layout"):
        FileLayout.from_message(1000, 11000, message)


def test_a_range_may_span_several_runs_of_a_file() -> None:
    """A range of the image is split where the layout is."""
    layout = FileLayout(100, 400, (100, 200), (0, 1000))
    assert [FileRun(150, 50, 50), FileRun(200, 1000, 30)] == list(layout.runs(150, 230))
    assert 1200 == layout.size


def test_the_longest_runs_are_requested() -> None:
    """If there are too many runs, only the longest are aligned, in image order."""
    runs = [FileRun(1000 + index * MIB, 64, 1000 + index) for index in range(MAX_PIECES + 1)]
    requested = alignment_request(1000, runs)
    assert 2 * MAX_PIECES == len(requested)
    assert MIB == requested[0]
    assert 64 == requested[1]


@pytest.mark.parametrize(
    ("mappable", "file_runs", "expected"),
    [
        # Full pages are mapped, the edges are copied.
        (
            [FileRun(0, 10 * PAGE + 64, 40 * PAGE)],
            [FileRun(0, 64, 40 * PAGE)],
            (
                [MappedRun(PAGE - 64, 11 * PAGE, PAGE, 39 * PAGE)],
                [FileRun(0, 64, PAGE - 64), FileRun(40 * PAGE - 64, 40 * PAGE, 64)],
            ),
        ),
        # Bytes with another offset within their page are copied.
        ([FileRun(0, 10 * PAGE, 40 * PAGE)], [FileRun(0, 64, 40 * PAGE)], ([], [FileRun(0, 64, 40 * PAGE)])),
        # Runs that are too short for a mapping are copied.
        ([FileRun(0, 0, 8 * PAGE)], [FileRun(0, 0, 8 * PAGE)], ([], [FileRun(0, 0, 8 * PAGE)])),
        # Bytes without replaceable memory are copied.
        ([], [FileRun(5, 0, 40 * PAGE)], ([], [FileRun(5, 0, 40 * PAGE)])),
        # A run of memory may span two runs of the file, and vice versa.
        (
            [FileRun(0, 0, 64 * PAGE)],
            [FileRun(0, 0, 32 * PAGE), FileRun(32 * PAGE, 100 * PAGE, 32 * PAGE)],
            ([MappedRun(0, 0, 0, 32 * PAGE), MappedRun(32 * PAGE, 32 * PAGE, 100 * PAGE, 32 * PAGE)], []),
        ),
        (
            [FileRun(0, 0, 32 * PAGE), FileRun(32 * PAGE + 10, 100 * PAGE + 10, 32 * PAGE)],
            [FileRun(0, 0, 65 * PAGE)],
            (
                [MappedRun(0, 0, 0, 32 * PAGE), MappedRun(33 * PAGE, 101 * PAGE, 33 * PAGE, 31 * PAGE)],
                [FileRun(32 * PAGE, 32 * PAGE, PAGE), FileRun(64 * PAGE, 64 * PAGE, PAGE)],
            ),
        ),
    ],
)
def test_aligned_pages_are_mapped(
    mappable: list[FileRun], file_runs: list[FileRun], expected: tuple[list[MappedRun], list[FileRun]]
) -> None:
    """Mapped and copied parts together cover the range exactly once."""
    assert expected == split_mappable(mappable, file_runs)
    lengths = [part.length for parts in expected for part in parts]
    assert sum(run.length for run in file_runs) == sum(lengths)
    assert MIN_MAPPED_BYTES == 16 * PAGE or PAGE > 4096


@pytest.mark.parametrize("length", [3000, 65536, 3 * 65536])
def test_only_full_pages_of_64_kib_are_mapped(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With larger pages, only full pages are mapped, and each byte is read once."""
    page = 65536
    monkeypatch.setattr(file_layout, "PAGE", page)
    pages, copied = split_mappable([FileRun(0, 7 * page + 100, length)], [FileRun(0, 100, length)])
    read = sorted([(part.begin, part.length) for part in pages] + [(run.begin, run.length) for run in copied])
    assert all(part.length >= page for part in pages)
    assert [0, *(begin + count for begin, count in read)] == [*(begin for begin, _ in read), length]


def test_cached_maps_limit_the_number_of_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads between two reads of the maps share the remaining mappings."""
    maps = ProcessMaps((MappedArea(0, 1 << 62),), 0, by_device=False)
    monkeypatch.setattr(page_remapper, "_read_maps", lambda: (maps, 3))
    monkeypatch.setattr(page_remapper, "CACHE_TTL_S", 1e9)
    monkeypatch.setattr(ReplaceableMemory, "_is_replaceable", lambda self, run, maps: True)
    image = image_of((MIB, MIB, MIB, MIB))
    memory = ReplaceableMemory(image)
    mappable_counts = [len(memory.remappable_ranges(at, at + 2 * MIB)) for at in (0, 2 * MIB, 0)]
    assert [2, 1, 0] == mappable_counts


def test_reserved_memory_is_not_granted_twice() -> None:
    """The reservation ends when its file has been created or has failed."""
    budget, reserved = MemoryBudget(), list[int]()

    def fits(nbytes: int) -> bool:
        reserved.append(nbytes)
        return nbytes <= 10

    with budget.reserve(6, fits) as first, budget.reserve(5, fits) as second:
        pass
    with budget.reserve(10, fits) as third:
        pass
    assert first
    assert not second
    assert third
    assert [6, 11, 10] == reserved


MAPS = """\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/python
00e03000-00e24000 rw-p 00000000 00:00 0           [heap]
7f0000000000-7f0000010000 rw-p 00000000 00:00 0
7f0000010000-7f0000020000 rw-p 00001000 00:01 42  /memfd:rfork-chunk (deleted)
7f0000020000-7f0000030000 rw-p 00000000 00:01 43  /memfd:other (deleted)
7f0000030000-7f0000040000 rw-s 00000000 00:01 44  /dev/zero (deleted)
7f0000040000-7f0000050000 r--p 00000000 00:00 0
7f0000050000-7f0000060000 rw-p 00000000 00:0f 9   /anon_hugepage (deleted)
7f0000060000-7f0000070000 rw-p 00000000 00:00 0   [anon:weights]
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0   [stack]
something else
"""


def test_replaceable_memory_is_private_and_anonymous() -> None:
    """Also a previously mapped chunk; not heap, stack, files or shared memory."""
    maps = ProcessMaps.parse(MAPS)
    areas = (MappedArea(0x7F0000000000, 0x7F0000020000), MappedArea(0x7F0000060000, 0x7F0000070000))
    assert areas == maps.areas
    assert not maps.by_device
    assert maps.is_contiguous(0x7F0000001000, 0x7F0000011000)
    assert not maps.is_contiguous(0x7F0000011000, 0x7F0000021000)
    assert not maps.is_contiguous(0x7EFFFFFFF000, 0x7F0000001000)


def test_memory_of_a_process_with_a_device_is_not_replaceable() -> None:
    """A GPU driver or a network card may access physical pages."""
    line = "7f0000070000-7f0000080000 rw-s 00000000 00:05 600 /dev/nvidiactl\n"
    assert ProcessMaps.parse(MAPS + line).by_device


@pytest.mark.parametrize(
    ("before", "size", "expected"),
    [
        (0x30, 0x100000 - 0x30 | 2, True),  # aligned to 64 bytes by glibc
        (0, 0x100000 | 2, False),  # its mapping would not start on a page
        (0x30, 0x100000 - 0x30 | 3, False),  # heap memory
        (0x30, 0x100000 - 0x30, False),
        (0x30, 0x80000 - 0x30 | 2, False),  # its mapping would end before the tensor
        (0, 0, False),
    ],
)
def test_a_separate_mapping_is_recognized_by_its_header(before: int, size: int, expected: bool) -> None:
    """The two words before the tensor identify an allocation with a separate mapping."""
    assert expected is has_private_mapping(0x7F0000000040, 0xFF000, before, size)


@pytest.mark.parametrize(
    ("files", "nbytes", "expected"),
    [
        ({}, GIB, True),
        ({}, 11 * GIB, False),
        ({"sys/fs/cgroup/memory.max": f"{4 * GIB}", "sys/fs/cgroup/memory.current": f"{2 * GIB}"}, GIB, True),
        (
            {"sys/fs/cgroup/memory.max": f"{4 * GIB}", "sys/fs/cgroup/memory.current": f"{3 * GIB}"},
            GIB,
            False,
        ),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": f"{3 * GIB}"}, GIB, True),
        (
            {
                "sys/fs/cgroup/memory.max": f"{4 * GIB}",
                "sys/fs/cgroup/memory.current": f"{4 * GIB}",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            },
            GIB,
            True,
        ),
        (
            {
                "sys/fs/cgroup/pod/one/memory.max": "max",
                "sys/fs/cgroup/pod/one/memory.current": "1",
                "sys/fs/cgroup/pod/memory.max": f"{2 * GIB}",
                "sys/fs/cgroup/pod/memory.current": f"{2 * GIB - RESERVE}",
            },
            MIB,
            False,
        ),
    ],
)
def test_free_memory_is_limited_by_machine_and_control_groups(
    tmp_path: Path, files: dict[str, str], nbytes: int, expected: bool
) -> None:
    """All control groups of the process up to the root are checked."""
    defaults = {
        "proc/meminfo": f"MemTotal: {16 * MIB} kB\nMemAvailable: {11 * MIB} kB\n",
        "proc/self/cgroup": "0::/pod/one\n",
    }
    for name, text in (defaults | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert expected is fits_in_memory(nbytes, tmp_path)
