"""What is planned about shared memory: chunks in files, pages that are mapped, room."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.transport.shared_memory import own_memory, placement
from rfork.transport.shared_memory.own_memory import Area, MemoryMap, OwnMemory, is_of_its_own
from rfork.transport.shared_memory.placement import (
    LEAST_MAPPED,
    MOST_PLACES,
    PAGE,
    Layout,
    Mapped,
    Run,
    split,
    wishes_of,
)
from rfork.transport.shared_memory.room import RESERVE, Room, has_room
from tests.transport_contract import image_of

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ([], ((1000,), (0,))),
        ([0, 64], ((1000,), (64,))),
        ([100, 64], ((1000, 1100), (0, PAGE + 64))),
        ([0, 64, 5000, 64], ((1000, 6000), (64, 2 * PAGE + 64))),
        ([0, 64, 4096, 64], ((1000, 5096), (64, PAGE + 64))),
    ],
)
def test_a_file_is_laid_out_as_wished(
    wishes: list[int], expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """Each place is the next one that begins at the byte of a page that was asked for."""
    layout = Layout.wished(1000, 11000, wishes)
    assert expected == (layout.starts, layout.places)


@pytest.mark.parametrize(
    "wishes", [[0], [5, 0, 4, 0], [0, 0, 0, 0], [10000, 0], [-1, 0], [0, PAGE], [0, -1], [0, 0] * 600]
)
def test_wishes_that_make_no_sense_are_refused(wishes: list[int]) -> None:
    """They come from another process."""
    with pytest.raises(ValueError, match=r"wishes|place"):
        Layout.wished(1000, 11000, wishes)


def test_what_is_told_is_the_layout_again() -> None:
    """A layout goes through a message."""
    layout = Layout.wished(1000, 11000, [0, 64, 5000, 7])
    assert layout == Layout.of(1000, 11000, layout.told())


@pytest.mark.parametrize("told", [[], [0], [1, 0], [0, 0, 0, 5], [0, -1], [0, 0, 10000, 5], [5, 0, 3, 0]])
def test_a_layout_that_is_none_is_refused(told: list[int]) -> None:
    """It comes from another process."""
    with pytest.raises(ValueError, match="lay out"):
        Layout.of(1000, 11000, told)


def test_runs_of_a_file() -> None:
    """A range of the image is found in as many runs as it was placed in."""
    layout = Layout(100, 400, (100, 200), (0, 1000))
    assert [Run(150, 50, 50), Run(200, 1000, 30)] == list(layout.runs(150, 230))
    assert 1200 == layout.size


def test_the_largest_runs_are_wished_for() -> None:
    """Where there are too many, those that are worth most, in their order."""
    runs = [Run(1000 + index * MIB, 64, 1000 + index) for index in range(MOST_PLACES + 1)]
    wishes = wishes_of(1000, runs)
    assert (2 * MOST_PLACES, MIB, 64) == (len(wishes), wishes[0], wishes[1])


@pytest.mark.parametrize(
    ("mappable", "filed", "expected"),
    [
        # Whole pages are mapped, the edges are copied.
        (
            [Run(0, 10 * PAGE + 64, 40 * PAGE)],
            [Run(0, 64, 40 * PAGE)],
            (
                [Mapped(PAGE - 64, 11 * PAGE, PAGE, 39 * PAGE)],
                [Run(0, 64, PAGE - 64), Run(40 * PAGE - 64, 40 * PAGE, 64)],
            ),
        ),
        # Bytes that lie elsewhere in their page are copied.
        ([Run(0, 10 * PAGE, 40 * PAGE)], [Run(0, 64, 40 * PAGE)], ([], [Run(0, 64, 40 * PAGE)])),
        # So is what is too little to be worth a mapping.
        ([Run(0, 0, 8 * PAGE)], [Run(0, 0, 8 * PAGE)], ([], [Run(0, 0, 8 * PAGE)])),
        # And what nothing can be mapped over.
        ([], [Run(5, 0, 40 * PAGE)], ([], [Run(5, 0, 40 * PAGE)])),
        # One run of memory may lie in two of the file, and the other way round.
        (
            [Run(0, 0, 64 * PAGE)],
            [Run(0, 0, 32 * PAGE), Run(32 * PAGE, 100 * PAGE, 32 * PAGE)],
            ([Mapped(0, 0, 0, 32 * PAGE), Mapped(32 * PAGE, 32 * PAGE, 100 * PAGE, 32 * PAGE)], []),
        ),
        (
            [Run(0, 0, 32 * PAGE), Run(32 * PAGE + 10, 100 * PAGE + 10, 32 * PAGE)],
            [Run(0, 0, 65 * PAGE)],
            (
                [Mapped(0, 0, 0, 32 * PAGE), Mapped(33 * PAGE, 101 * PAGE, 33 * PAGE, 31 * PAGE)],
                [Run(32 * PAGE, 32 * PAGE, PAGE), Run(64 * PAGE, 64 * PAGE, PAGE)],
            ),
        ),
    ],
)
def test_pages_are_mapped_where_they_fit(
    mappable: list[Run], filed: list[Run], expected: tuple[list[Mapped], list[Run]]
) -> None:
    """What is mapped and what is copied is together what is read, and nothing twice."""
    assert expected == split(mappable, filed)
    lengths = [part.length for parts in expected for part in parts]
    assert sum(run.length for run in filed) == sum(lengths)
    assert LEAST_MAPPED == 16 * PAGE or PAGE > 4096


@pytest.mark.parametrize("length", [3000, 65536, 3 * 65536])
def test_pages_of_64_kib(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a kernel nothing is mapped that has no whole page, and each byte is read once."""
    page = 65536
    monkeypatch.setattr(placement, "PAGE", page)
    pages, copied = split([Run(0, 7 * page + 100, length)], [Run(0, 100, length)])
    read = sorted([(part.begin, part.length) for part in pages] + [(run.begin, run.length) for run in copied])
    assert all(part.length >= page for part in pages)
    assert [0, *(begin + count for begin, count in read)] == [*(begin for begin, _ in read), length]


def test_mappings_are_counted_until_the_kernel_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that come between two looks do not each take all that there was."""
    known = MemoryMap((Area(0, 1 << 62),), 0, by_device=False)
    monkeypatch.setattr(own_memory, "_look", lambda: (known, 3))
    monkeypatch.setattr(own_memory, "LOOKED_S", 1e9)
    monkeypatch.setattr(OwnMemory, "_is_free", lambda self, run, known: True)
    image = image_of((MIB, MIB, MIB, MIB))
    memory = OwnMemory(image)
    taken = [len(memory.mappable(at, at + 2 * MIB)) for at in (0, 2 * MIB, 0)]
    assert [2, 1, 0] == taken


def test_room_that_is_promised_is_nobody_elses() -> None:
    """Until the file that it was promised for is made, or was not."""
    room, asked = Room(), list[int]()

    def enough(nbytes: int) -> bool:
        asked.append(nbytes)
        return nbytes <= 10

    with room.promised(6, enough) as first, room.promised(5, enough) as second:
        pass
    with room.promised(10, enough) as third:
        pass
    assert ([True, False, True], [6, 11, 10]) == ([first, second, third], asked)


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
    known = MemoryMap.of(MAPS)
    areas = (Area(0x7F0000000000, 0x7F0000020000), Area(0x7F0000060000, 0x7F0000070000))
    assert (areas, False) == (known.areas, known.by_device)
    assert [True, False, False] == [
        known.holds(0x7F0000001000, 0x7F0000011000),
        known.holds(0x7F0000011000, 0x7F0000021000),
        known.holds(0x7EFFFFFFF000, 0x7F0000001000),
    ]


def test_a_driver_that_knows_memory_by_its_pages() -> None:
    """A process that has opened a GPU or a network card keeps its pages."""
    line = "7f0000070000-7f0000080000 rw-s 00000000 00:05 600 /dev/nvidiactl\n"
    assert MemoryMap.of(MAPS + line).by_device


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
    assert expected is is_of_its_own(0x7F0000000040, 0xFF000, before, size)


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
    assert expected is has_room(nbytes, tmp_path)
