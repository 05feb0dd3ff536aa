"""Reads of local files with and without the page cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork.image.host_memory import copy_block, host_view
from rfork.image.staging import BufferPool, allocate_host
from rfork.storage import direct_io
from rfork.storage.direct_io import (
    FIRST_SAMPLE_BYTES,
    SAMPLE_INTERVAL_BYTES,
    SAMPLES,
    DirectFile,
    DirectIoMode,
    EndOfFile,
    ReadModeSelector,
    selector_for_device,
)

MIB = 1 << 20
SIZE = 3 * MIB + 777
Preadv = Callable[[int, Sequence[memoryview], int], int]

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of just over three MiB on the file system of the tests."""
    path = tmp_path_factory.mktemp("direct") / "data"
    path.write_bytes(os.urandom(SIZE))
    return path


def view_of(memory: torch.Tensor) -> memoryview:
    """Return a tensor's bytes."""
    return host_view(memory.data_ptr(), memory.numel())


@contextmanager
def opened(path: Path, read_options: DirectIoMode, staging: BufferPool | None = None) -> Iterator[DirectFile]:
    """Open a file for reading."""
    descriptor = os.open(path, os.O_RDONLY)
    file = DirectFile(descriptor, read_options, staging or BufferPool(16 * MIB))
    try:
        yield file
    finally:
        file.close()
        os.close(descriptor)


@pytest.fixture
def reset_selectors() -> Iterator[None]:
    """Forget the measurements of all devices before and after a test."""
    selector_for_device.cache_clear()
    yield
    selector_for_device.cache_clear()


@pytest.fixture
def is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an empty page cache."""
    monkeypatch.setattr(direct_io, "resident", lambda *_: 0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the mode of each read, in order: `direct` or `cached`."""
    import fcntl

    made: list[str] = []
    preadv = os.preadv

    def record_read(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        made.append("direct" if flags & os.O_DIRECT else "cached")
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", record_read)
    return made


@settings(max_examples=60, deadline=None)
@given(
    read_options=st.sampled_from(["auto", "always", "never"]),
    begin=st.one_of(st.integers(0, SIZE), st.sampled_from([0, 511, 512, 4096, SIZE - 1])),
    sizes=st.lists(st.integers(0, 300_000), max_size=6),
    buffer=st.sampled_from([4096, 8192, 1 << 20]),
)
def test_every_range_is_read(read_options: DirectIoMode, begin: int, sizes: list[int], buffer: int, path: Path) -> None:
    """For all offsets, lengths and numbers of views, the bytes equal those of the file."""
    while begin + sum(sizes) > SIZE:
        sizes = sizes[1:]
    views = [bytearray(size) for size in sizes]
    with (
        pytest.MonkeyPatch.context() as patch,
        opened(path, read_options, BufferPool(buffer, buffer)) as file,
    ):
        patch.setattr(direct_io, "MIN_DIRECT_BYTES", 1)
        patch.setattr(direct_io, "resident", lambda *_: 0)
        file.read(begin, [memoryview(view) for view in views])
    assert path.read_bytes()[begin : begin + sum(sizes)] == b"".join(views)


@settings(max_examples=40, deadline=None)
@given(begin=st.integers(0, 10_000), length=st.integers(2 * MIB, SIZE - 10_000), shift=st.sampled_from([0, 8]))
def test_huge_pages_are_filled_completely(begin: int, length: int, shift: int, path: Path) -> None:
    """Memory in huge pages that is aligned like the file is filled without a copy; otherwise it is filled
    completely too.
    """
    memory = allocate_host(length + shift, begin)[shift:]
    with opened(path, "always") as file:
        file.read(begin, [view_of(memory)])
    assert path.read_bytes()[begin : begin + length] == memory.numpy().tobytes()


def test_memory_aligned_like_the_file_needs_no_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only both ends, which share a disk block with other bytes, pass through staging."""
    copied: list[int] = []

    def record_copy(block: memoryview, views: Sequence[memoryview]) -> None:
        copied.append(block.nbytes)
        copy_block(block, views)

    monkeypatch.setattr("rfork.storage.direct_io.copy_block", record_copy)
    monkeypatch.setattr(direct_io, "direct_alignment", lambda _: 4096)
    monkeypatch.setattr(direct_io, "page_stats", lambda _, length: direct_io.PageStats(length, length))
    memory = allocate_host(2 * MIB + 10_000, 100)
    with opened(path, "always") as file:
        file.read(100, [view_of(memory)])
    assert [3996, (2 * MIB + 10_100) % 4096] == copied


HUGE = 2 * MIB


@pytest.mark.parametrize(
    ("present", "huge", "aligned"),
    [(0, 0, True), (HUGE, HUGE, True), (HUGE, 0, False), (2 * HUGE, HUGE, False)],
    ids=["none present", "a neighbour's huge page", "a neighbour's small pages", "mixed pages"],
)
def test_new_memory_is_populated_before_the_read(
    present: int, huge: int, aligned: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no page is present, or only a neighbour's huge page, no byte passes through staging."""
    copied: list[int] = []
    populated: list[tuple[int, int]] = []

    def record_copy(block: memoryview, views: Sequence[memoryview]) -> None:
        copied.append(block.nbytes)
        copy_block(block, views)

    def populate(address: int, length: int) -> bool:
        populated.append((address, length))
        return True

    def mapped(_: int, length: int) -> direct_io.PageStats:
        return direct_io.PageStats(length, length) if populated else direct_io.PageStats(present, huge)

    monkeypatch.setattr("rfork.storage.direct_io.copy_block", record_copy)
    monkeypatch.setattr(direct_io, "direct_alignment", lambda _: 4096)
    monkeypatch.setattr(direct_io, "page_stats", mapped)
    monkeypatch.setattr(direct_io, "populate", populate)
    memory = allocate_host(HUGE + MIB)
    with opened(path, "always") as file:
        file.read(0, [view_of(memory)])
    assert path.read_bytes()[: HUGE + MIB] == memory.numpy().tobytes()
    if aligned:
        assert [] == copied
        assert [(memory.data_ptr(), HUGE + MIB)] == populated
    else:
        assert HUGE + MIB == sum(copied)
        assert [] == populated


@pytest.mark.usefixtures("reset_selectors")
def test_cached_blocks_are_read_from_the_cache(path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If most of a block is resident, it is not read from the disk."""
    monkeypatch.setattr(direct_io, "resident", lambda _, __, length: length // 2 + 1)
    with opened(path, "auto") as file:
        file.read(0, [memoryview(bytearray(2 * MIB))])
    assert {"cached"} == set(reads)


@pytest.mark.usefixtures("reset_selectors", "is_cold")
def test_small_reads_use_the_cache(path: Path, reads: list[str]) -> None:
    """Headers and small tensors are read through the cache without a check."""
    with opened(path, "auto") as file:
        file.read(5, [memoryview(bytearray(1000))])
    assert ["cached"] == reads


@pytest.mark.usefixtures("reset_selectors", "is_cold")
@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_direct_reads_uses_the_page_cache(
    path: Path, refusal: int, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first direct read is refused, this one and all others use the page cache."""
    preadv, refused = os.preadv, list[int]()

    def refuse(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        count = preadv(descriptor, views, offset)
        if reads[-1] == "direct":
            refused.append(offset)
            raise OSError(refusal, os.strerror(refusal))
        return count

    monkeypatch.setattr(os, "preadv", refuse)
    got = [bytearray(2 * MIB), bytearray(MIB)]
    with opened(path, "always") as file:
        file.read(3, [memoryview(got[0])])
        file.read(4, [memoryview(got[1])])
    data = path.read_bytes()
    assert [data[3 : 2 * MIB + 3], data[4 : MIB + 4]] == [bytes(view) for view in got]
    assert 1 == len(refused)


def test_a_disk_error_is_no_refusal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error is raised, not retried through the page cache."""
    tried: list[int] = []

    def fail(_: int, __: Sequence[memoryview], offset: int) -> int:
        tried.append(offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with opened(path, "always") as file, pytest.raises(OSError, match="Input/output"):
        file.read(0, [memoryview(bytearray(2 * MIB))])
    assert [0] == tried


@pytest.mark.parametrize("read_options", ["always", "never"])
@pytest.mark.parametrize("begin", [SIZE - 1000, SIZE - 2 * MIB, SIZE, SIZE + 4096])
def test_a_truncated_file_is_an_error(read_options: DirectIoMode, begin: int, path: Path, reads: list[str]) -> None:
    """Missing bytes are an error, never zeros, and do not change the mode."""
    with opened(path, read_options) as file:
        for _ in range(2):
            with pytest.raises(EndOfFile):
                file.read(begin, [memoryview(bytearray(2 * MIB + 1))])
    assert {"direct" if read_options == "always" else "cached"} == set(reads)


BLOCK = 16 * MIB
UNTIL_CHOSEN = (FIRST_SAMPLE_BYTES + (SAMPLES - 1) * SAMPLE_INTERVAL_BYTES) // BLOCK + 1
"""Blocks that are read before a mode is chosen."""


def chosen_modes(selector: ReadModeSelector, cached_s: float, direct_s: float, blocks: int) -> list[str]:
    """Return the modes of `blocks` blocks if a read in each mode needs that many seconds."""
    used: list[str] = []
    for _ in range(blocks):
        mode = selector.next(BLOCK)
        used.append(mode)
        selector.record(mode, cached_s if mode == "cached" else direct_s)
    return used


@pytest.mark.parametrize(
    ("cached_s", "direct_s", "kept"),
    [(1.0, 2.0, "cached"), (2.0, 1.0, "direct"), (1.0, 1.05, "direct")],
)
def test_the_faster_mode_is_kept(cached_s: float, direct_s: float, kept: str) -> None:
    """A few blocks are read through the cache; then one mode is kept, direct reads if they are close."""
    used = chosen_modes(ReadModeSelector(), cached_s, direct_s, UNTIL_CHOSEN + 2 * SAMPLE_INTERVAL_BYTES // BLOCK)
    samples = [index for index, mode in enumerate(used[:UNTIL_CHOSEN]) if mode == "cached"]
    assert [(FIRST_SAMPLE_BYTES + sample * SAMPLE_INTERVAL_BYTES) // BLOCK for sample in range(SAMPLES)] == samples
    assert {kept} == set(used[UNTIL_CHOSEN:])


def test_a_short_read_is_not_sampled() -> None:
    """A short read is not slowed down by measurements."""
    assert ["direct"] * (FIRST_SAMPLE_BYTES // BLOCK) == chosen_modes(
        ReadModeSelector(), 1.0, 2.0, FIRST_SAMPLE_BYTES // BLOCK
    )


def test_no_samples_are_added_while_the_last_are_pending() -> None:
    """While the last samples are pending, further blocks are read directly."""
    selector = ReadModeSelector()
    used = [selector.next(BLOCK) for _ in range(2 * UNTIL_CHOSEN)]
    assert SAMPLES == used.count("cached")
    assert selector.chosen is None


@pytest.mark.usefixtures("reset_selectors", "is_cold")
def test_measurements_apply_to_the_device(path: Path, reads: list[str]) -> None:
    """The next file on the device is read in the mode that was faster for previous ones."""
    selector_for_device(path.stat().st_dev).chosen = "cached"
    with opened(path, "auto") as file:
        file.read(0, [memoryview(bytearray(2 * MIB))])
    assert {"cached"} == set(reads)


def test_resident_pages_are_detected(path: Path) -> None:
    """A file that was just read is in the page cache; new memory has no pages before it is populated."""
    path.read_bytes()
    with path.open("rb") as file:
        there = direct_io.resident(file.fileno(), 5, MIB), direct_io.resident_when_mapped(file.fileno(), 0, MIB)
    memory = allocate_host(8 * MIB)
    before = direct_io.page_stats(memory.data_ptr(), memory.numel())
    direct_io.populate(memory.data_ptr(), memory.numel())
    after = direct_io.page_stats(memory.data_ptr(), memory.numel())
    assert {there[0], there[1]} <= {None, MIB + 4096, MIB}
    assert before in (None, (0, 0))
    assert after is None or after.present == 8 * MIB


def test_view_addresses_equal_those_of_the_tensors() -> None:
    """The address of a view is that of its tensor."""
    memory = torch.empty(100, dtype=torch.uint8)
    assert memory.data_ptr() == direct_io.address_of(view_of(memory))
