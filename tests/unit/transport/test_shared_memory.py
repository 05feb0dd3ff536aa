"""What is planned about shared memory: chunks in files, pages that are mapped, room."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.transport.shared_memory import file_layout, memory_maps
from rfork.transport.shared_memory.file_layout import (
    MAX_PIECES,
    MIN_MAPPED_BYTES,
    PAGE,
    FileLayout,
    FileRun,
    MappedRun,
    layout_request,
    split_mappable,
)
from rfork.transport.shared_memory.memory_budget import RESERVE, MemoryBudget, fits_in_memory
from rfork.transport.shared_memory.memory_maps import (
    MappedArea,
    ProcessMaps,
    ReplaceableMemory,
    has_private_mapping,
)
from tests.transport_contract import image_of

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("requested_layout", "expected"),
    [
        ([], ((1000,), (0,))),
        ([0, 64], ((1000,), (64,))),
        ([100, 64], ((1000, 1100), (0, PAGE + 64))),
        ([0, 64, 5000, 64], ((1000, 6000), (64, 2 * PAGE + 64))),
        ([0, 64, 4096, 64], ((1000, 5096), (64, PAGE + 64))),
    ],
)
def test_a_file_is_laid_out_as_wished(
    requested_layout: list[int], expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """Each place is the next one that begins at the byte of a page that was asked for."""
    layout = FileLayout.requested(1000, 11000, requested_layout)
    assert expected == (layout.starts, layout.file_offsets)


@pytest.mark.parametrize(
    "requested_layout",
    [[0], [5, 0, 4, 0], [0, 0, 0, 0], [10000, 0], [-1, 0], [0, PAGE], [0, -1], [0, 0] * 600],
)
def test_wishes_that_make_no_sense_are_refused(requested_layout: list[int]) -> None:
    """They come from another process."""
    with pytest.raises(ValueError, match=r"wishes|place"):
        FileLayout.requested(1000, 11000, requested_layout)


def test_what_is_told_is_the_layout_again() -> None:
    """A layout goes through a message."""
    layout = FileLayout.requested(1000, 11000, [0, 64, 5000, 7])
    assert layout == FileLayout.from_message(1000, 11000, layout.to_message())


@pytest.mark.parametrize("message", [[], [0], [1, 0], [0, 0, 0, 5], [0, -1], [0, 0, 10000, 5], [5, 0, 3, 0]])
def test_a_layout_that_is_none_is_refused(message: list[int]) -> None:
    """It comes from another process."""
    with pytest.raises(ValueError, match="lay out"):
        FileLayout.from_message(1000, 11000, message)


def test_runs_of_a_file() -> None:
    """A range of the image is found in as many runs as it was placed in."""
    layout = FileLayout(100, 400, (100, 200), (0, 1000))
    assert [FileRun(150, 50, 50), FileRun(200, 1000, 30)] == list(layout.runs(150, 230))
    assert 1200 == layout.size


def test_the_largest_runs_are_wished_for() -> None:
    """Where there are too many, those that are worth most, in their order."""
    runs = [FileRun(1000 + index * MIB, 64, 1000 + index) for index in range(MAX_PIECES + 1)]
    requested_layout = layout_request(1000, runs)
    assert (2 * MAX_PIECES, MIB, 64) == (len(requested_layout), requested_layout[0], requested_layout[1])


@pytest.mark.parametrize(
    ("mappable", "filed", "expected"),
    [
        # Whole pages are mapped, the edges are copied.
        (
            [FileRun(0, 10 * PAGE + 64, 40 * PAGE)],
            [FileRun(0, 64, 40 * PAGE)],
            (
                [MappedRun(PAGE - 64, 11 * PAGE, PAGE, 39 * PAGE)],
                [FileRun(0, 64, PAGE - 64), FileRun(40 * PAGE - 64, 40 * PAGE, 64)],
            ),
        ),
        # Bytes that lie elsewhere in their page are copied.
        ([FileRun(0, 10 * PAGE, 40 * PAGE)], [FileRun(0, 64, 40 * PAGE)], ([], [FileRun(0, 64, 40 * PAGE)])),
        # So is what is too little to be worth a mapping.
        ([FileRun(0, 0, 8 * PAGE)], [FileRun(0, 0, 8 * PAGE)], ([], [FileRun(0, 0, 8 * PAGE)])),
        # And what nothing can be mapped over.
        ([], [FileRun(5, 0, 40 * PAGE)], ([], [FileRun(5, 0, 40 * PAGE)])),
        # One run of memory may lie in two of the file, and the other way round.
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
def test_pages_are_mapped_where_they_fit(
    mappable: list[FileRun], filed: list[FileRun], expected: tuple[list[MappedRun], list[FileRun]]
) -> None:
    """What is mapped and what is copied is together what is read, and nothing twice."""
    assert expected == split_mappable(mappable, filed)
    lengths = [part.length for parts in expected for part in parts]
    assert sum(run.length for run in filed) == sum(lengths)
    assert MIN_MAPPED_BYTES == 16 * PAGE or PAGE > 4096


@pytest.mark.parametrize("length", [3000, 65536, 3 * 65536])
def test_pages_of_64_kib(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a kernel nothing is mapped that has no whole page, and each byte is read once."""
    page = 65536
    monkeypatch.setattr(file_layout, "PAGE", page)
    pages, copied = split_mappable([FileRun(0, 7 * page + 100, length)], [FileRun(0, 100, length)])
    read = sorted([(part.begin, part.length) for part in pages] + [(run.begin, run.length) for run in copied])
    assert all(part.length >= page for part in pages)
    assert [0, *(begin + count for begin, count in read)] == [*(begin for begin, _ in read), length]


def test_mappings_are_counted_until_the_kernel_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that come between two looks do not each take all that there was."""
    known = ProcessMaps((MappedArea(0, 1 << 62),), 0, by_device=False)
    monkeypatch.setattr(memory_maps, "_read_maps", lambda: (known, 3))
    monkeypatch.setattr(memory_maps, "CACHE_TTL_S", 1e9)
    monkeypatch.setattr(ReplaceableMemory, "_is_free", lambda self, run, known: True)
    image = image_of((MIB, MIB, MIB, MIB))
    memory = ReplaceableMemory(image)
    mappable_counts = [len(memory.remappable_ranges(at, at + 2 * MIB)) for at in (0, 2 * MIB, 0)]
    assert [2, 1, 0] == mappable_counts


def test_room_that_is_promised_is_nobody_elses() -> None:
    """Until the file that it was promised for is made, or was not."""
    budget, reserved = MemoryBudget(), list[int]()

    def fits(nbytes: int) -> bool:
        reserved.append(nbytes)
        return nbytes <= 10

    with budget.reserve(6, fits) as first, budget.reserve(5, fits) as second:
        pass
    with budget.reserve(10, fits) as third:
        pass
    assert ([True, False, True], [6, 11, 10]) == ([first, second, third], reserved)


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


def test_memory_that_may_be_mapped_over() -> None:
    """Private and anonymous, or a chunk that was mapped before; not heap, stack, files or shared memory."""
    known = ProcessMaps.of(MAPS)
    areas = (MappedArea(0x7F0000000000, 0x7F0000020000), MappedArea(0x7F0000060000, 0x7F0000070000))
    assert (areas, False) == (known.areas, known.by_device)
    assert [True, False, False] == [
        known.is_contiguous(0x7F0000001000, 0x7F0000011000),
        known.is_contiguous(0x7F0000011000, 0x7F0000021000),
        known.is_contiguous(0x7EFFFFFFF000, 0x7F0000001000),
    ]


def test_a_driver_that_knows_memory_by_its_pages() -> None:
    """A process that has opened a GPU or a network card keeps its pages."""
    line = "7f0000070000-7f0000080000 rw-s 00000000 00:05 600 /dev/nvidiactl\n"
    assert ProcessMaps.of(MAPS + line).by_device


@pytest.mark.parametrize(
    ("before", "size", "expected"),
    [
        (0x30, 0x100000 - 0x30 | 2, True),  # aligned to 64 bytes, by glibc
        (0, 0x100000 | 2, False),  # its mapping would not begin on a page
        (0x30, 0x100000 - 0x30 | 3, False),  # of a heap
        (0x30, 0x100000 - 0x30, False),
        (0x30, 0x80000 - 0x30 | 2, False),  # it would end before the tensor does
        (0, 0, False),
    ],
)
def test_an_allocation_with_a_mapping_of_its_own(before: int, size: int, expected: bool) -> None:
    """Two words in front of the tensor tell."""
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
def test_room(tmp_path: Path, files: dict[str, str], nbytes: int, expected: bool) -> None:
    """What the machine has, and each control group of the process up to the top."""
    known = {
        "proc/meminfo": f"MemTotal: {16 * MIB} kB\nMemAvailable: {11 * MIB} kB\n",
        "proc/self/cgroup": "0::/pod/one\n",
    }
    for name, text in (known | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert expected is fits_in_memory(nbytes, tmp_path)
