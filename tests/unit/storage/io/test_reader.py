"""Reading many ranges of blobs into memory concurrently."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork.errors import StorageChanged
from rfork.settings import StorageSettings
from rfork.storage import direct_io
from rfork.storage.direct_io import address_of
from rfork.storage.io import extents as reading_plan
from rfork.storage.io import reader
from rfork.storage.io.extents import MAX_GAP_BYTES, ExtentTable, ReadBlock, ReadPlan, block_bytes
from rfork.storage.io.reader import Extent, fill
from rfork.storage.local import LocalFile

MIB = 1 << 20
NEVER_S = 60.0
SETTINGS = StorageSettings(concurrency=4)


class PatternBlob:
    """Blob of which no two runs of bytes are alike; `before` is called with each read."""

    version = None

    def __init__(self, size: int, seed: int = 0, before: Callable[[int], None] | None = None) -> None:
        self.uri = f"s3://bucket/{seed}"
        self.size = size
        self.data = bytes((index * 31 + (index >> 8) + seed) % 251 for index in range(size))
        self.reads: list[tuple[int, int]] = []
        self._before = before

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        self.reads.append((offset, sum(view.nbytes for view in into)))
        if self._before is not None:
            self._before(offset)
        for view in into:
            view[:] = self.data[offset : offset + view.nbytes]
            offset += view.nbytes

    def close(self) -> None:
        """Do nothing."""


def content(extent: Extent) -> bytes:
    """Return the bytes in an extent's memory."""
    return bytes(extent.into.tolist())


def expected_bytes(extent: Extent) -> bytes:
    """Return the bytes that belong in an extent."""
    blob = extent.blob
    assert isinstance(blob, PatternBlob)
    return blob.data[extent.offset : extent.offset + extent.into.numel()]


BLOBS = (PatternBlob(700), PatternBlob(500, seed=7))
RANGES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 500), st.integers(0, 200), st.booleans()), max_size=30)


@settings(max_examples=60, deadline=None)
@given(RANGES, st.integers(1, 300), st.integers(0, 8), st.integers(1, 5))
def test_every_extent_is_filled(ranges: list[tuple[int, int, int, bool]], size: int, gap: int, streams: int) -> None:
    """Extents that overlap, touch or repeat all get their bytes, and no other bytes change."""
    extents, buffer = [], torch.full((10_000,), 255, dtype=torch.uint8)
    at = 0
    for which, offset, length, adjacent in ranges:
        offset = min(offset, BLOBS[which].size)
        length = min(length, BLOBS[which].size - offset)
        at += 0 if adjacent else 3
        extents.append(Extent(BLOBS[which], offset, buffer[at : at + length]))
        at += length
    filled: list[int] = []
    progress_bytes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_plan, "MAX_GAP_BYTES", gap)
        patch.setattr("rfork.storage.io.reader.block_bytes", lambda *_: size)
        fill(
            extents,
            StorageSettings(concurrency=streams),
            on_filled=filled.append,
            progress=progress_bytes.append,
        )
    expected = bytearray(b"\xff" * 10_000)
    for extent in extents:
        begin = extent.into.data_ptr() - buffer.data_ptr()
        expected[begin : begin + extent.into.numel()] = expected_bytes(extent)
    assert bytes(expected) == bytes(buffer.tolist())
    assert list(range(len(extents))) == sorted(filled)
    assert sum(extent.into.numel() for extent in extents) == sum(progress_bytes)


FAR = PatternBlob(0)
STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 5, 5 * MIB]),
        st.sampled_from([0, 1, MAX_GAP_BYTES - 1, MAX_GAP_BYTES, MAX_GAP_BYTES + 1, 3 * MIB]),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sampled_from([4 * MIB, 16 * MIB]))
def test_gaps_are_no_longer_than_their_memory(steps: list[tuple[int, int]], size: int) -> None:
    """For all sequences of extents, including empty ones, the views of a block equal its bytes, and no view
    is longer than its memory.
    """
    buffer = torch.empty(sum(length for length, _ in steps), dtype=torch.uint8)
    extents, offset, at = [], 0, 0
    for length, step in steps:
        extents.append(Extent(FAR, offset, buffer[at : at + length]))
        offset, at = offset + length + step, at + length
    plan = ReadPlan(extents, size)
    regions = [(buffer.data_ptr(), buffer.numel()), (plan._unwanted.data_ptr(), MAX_GAP_BYTES)]
    for block in plan.blocks():
        views = plan.host_views(block)
        assert block.end - block.begin == sum(view.nbytes for view in views)
        for view in views:
            begin = address_of(view)
            assert any(start <= begin and begin + view.nbytes <= start + capacity for start, capacity in regions)


def test_empty_extents_do_not_join_distant_blocks() -> None:
    """Distant extents are two blocks, whatever empty tensors lie between."""
    offsets = range(0, 50 * 60_000, 60_000)
    lengths = [100, *[0] * 48, 100]
    extents = [
        Extent(FAR, offset, torch.empty(length, dtype=torch.uint8))
        for offset, length in zip(offsets, lengths, strict=True)
    ]
    plan = ReadPlan(extents, 16 * MIB)
    assert [[100], [100]] == [[view.nbytes for view in plan.host_views(block)] for block in plan.blocks()]


def test_a_gap_without_memory_is_an_error() -> None:
    """No view of missing memory is created."""
    extents = [Extent(FAR, offset, torch.empty(9, dtype=torch.uint8)) for offset in (0, MAX_GAP_BYTES + 10)]
    block = ReadBlock(FAR, torch.device("cpu"), 0, MAX_GAP_BYTES + 19, 18, 0, 2)
    with pytest.raises(ValueError, match=f"a gap of {MAX_GAP_BYTES + 1} bytes"):
        ReadPlan(extents, 16 * MIB).host_views(block)


def test_dense_memory_of_any_type_is_filled() -> None:
    """Bytes are read in memory order, for each dtype, shape and order of dimensions."""
    blob = PatternBlob(100)
    plain, turned = torch.empty(3, 4, dtype=torch.int16), torch.empty(4, 3, dtype=torch.int16).t()
    fill([Extent(blob, 7, plain), Extent(blob, 50, turned)], SETTINGS)
    words = [torch.frombuffer(bytearray(blob.data[at : at + 24]), dtype=torch.int16) for at in (7, 50)]
    assert words[0].view(3, 4).tolist() == plain.tolist()
    assert words[1].view(4, 3).t().tolist() == turned.tolist()


def test_close_extents_are_read_together() -> None:
    """Adjacent or almost adjacent extents are one read; distant ones are not."""
    blob = PatternBlob(4 * MAX_GAP_BYTES)
    offsets = [*range(0, 1000, 10), 1000 + MAX_GAP_BYTES, 1010 + 2 * MAX_GAP_BYTES + 1]
    fill([Extent(blob, offset, torch.empty(10, dtype=torch.uint8)) for offset in offsets], SETTINGS)
    assert [(0, 1010 + MAX_GAP_BYTES), (1010 + 2 * MAX_GAP_BYTES + 1, 10)] == sorted(blob.reads)


def test_blocks_end_at_multiples_of_their_size() -> None:
    """A long extent at an odd offset is cut at block boundaries of the disk."""
    extent = Extent(PatternBlob(0), 4321, torch.empty(40 * MIB, dtype=torch.uint8))
    blocks = list(ReadPlan([extent], 16 * MIB).blocks())
    assert [16 * MIB, 32 * MIB, 4321 + 40 * MIB] == [block.end for block in blocks]
    assert all(one.end == other.begin for one, other in pairwise(blocks))


@pytest.mark.parametrize(
    ("total", "streams", "memory", "expected"),
    [
        (4 << 30, 8, 128 * MIB, 16 * MIB),
        (64 * MIB, 8, 128 * MIB, 8 * MIB),
        (MIB, 8, 128 * MIB, 4 * MIB),
        (4 << 30, 1, 16 * MIB, 16 * MIB),
        (65 * MIB, 8, 128 * MIB, 9 * MIB),
    ],
)
def test_the_block_size_depends_on_the_bytes_to_read(total: int, streams: int, memory: int, expected: int) -> None:
    """Blocks have 16 MiB if there is much to read, less so that no stream is idle, and are never tiny."""
    assert expected == block_bytes(total, streams, memory)


def test_an_error_stops_the_other_reads() -> None:
    """The first error is raised after running reads have ended, and no read is started any more."""
    other_reads, failed = threading.Barrier(4), threading.Event()
    failing: list[threading.Thread] = []
    ended: list[int] = []

    def before(offset: int) -> None:
        if offset == 0:
            failing.append(threading.current_thread())
        other_reads.wait(NEVER_S)
        if offset == 0:
            failed.set()
            raise StorageChanged("was replaced")
        failed.wait(NEVER_S)
        failing[0].join(NEVER_S)  # only then all streams have certainly been notified of the error
        ended.append(offset)

    blob = PatternBlob(16 * 2 * MAX_GAP_BYTES, before=before)
    extents = [Extent(blob, index * 2 * MAX_GAP_BYTES, torch.empty(10, dtype=torch.uint8)) for index in range(16)]
    with pytest.raises(StorageChanged, match="was replaced"):
        fill(extents, SETTINGS)
    assert 3 == len(ended)
    assert 4 == len(blob.reads)


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
@pytest.mark.parametrize("which", ["on_filled", "progress"])
def test_an_error_of_a_callback_is_raised(which: str, error: BaseException) -> None:
    """An exception of a callback ends the call unchanged."""

    def fail(_: int) -> None:
        raise error

    extents = [Extent(PatternBlob(100), 0, torch.empty(100, dtype=torch.uint8))]
    with pytest.raises(type(error)):
        fill(extents, SETTINGS, **{which: fail})


def test_an_interrupt_ends_the_reads() -> None:
    """Ctrl-C is raised once the running reads have ended, so that no thread writes into the memory."""
    signalled = threading.Event()
    ended: list[int] = []

    def on_signal(*_: object) -> None:
        signalled.set()
        raise KeyboardInterrupt

    def before(offset: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        signalled.wait(NEVER_S)
        ended.append(offset)

    extent = Extent(PatternBlob(100, before=before), 0, torch.zeros(100, dtype=torch.uint8))
    handler = signal.signal(signal.SIGINT, on_signal)
    try:
        with pytest.raises(KeyboardInterrupt):
            fill([extent], SETTINGS)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [0] == ended
    assert expected_bytes(extent) == content(extent)


def test_progress_calls_do_not_overlap() -> None:
    """`progress` is called by one thread at a time."""
    lock = threading.Lock()
    acquired: list[bool] = []

    def progress(_: int) -> None:
        acquired.append(lock.acquire(blocking=False))
        lock.release()

    blob = PatternBlob(32 * 2 * MAX_GAP_BYTES)
    extents = [Extent(blob, index * 2 * MAX_GAP_BYTES, torch.empty(10, dtype=torch.uint8)) for index in range(32)]
    fill(extents, SETTINGS, progress=progress)
    assert [True] * 32 == acquired


def test_empty_extents_complete_without_a_read() -> None:
    """Without extents, or with empty ones only, all are complete and nothing is read."""
    blob, filled = PatternBlob(10), list[int]()
    fill([], SETTINGS, on_filled=filled.append)
    fill([Extent(blob, 10, torch.empty(0, dtype=torch.uint8))], SETTINGS, on_filled=filled.append)
    assert [0] == filled
    assert [] == blob.reads


def test_concurrent_reads_are_limited() -> None:
    """At most `streams` reads run concurrently."""
    lock, in_flight, in_flight_counts = threading.Lock(), set[int](), list[int]()
    full = threading.Barrier(4)

    def before(offset: int) -> None:
        with lock:
            in_flight.add(offset)
            in_flight_counts.append(len(in_flight))
        full.wait(NEVER_S)
        with lock:
            in_flight.remove(offset)
        full.wait(NEVER_S)

    blob = PatternBlob(16 * 2 * MAX_GAP_BYTES, before=before)
    extents = [Extent(blob, index * 2 * MAX_GAP_BYTES, torch.empty(10, dtype=torch.uint8)) for index in range(16)]
    fill(extents, SETTINGS)
    assert 4 == max(in_flight_counts)
    assert [content(extent) for extent in extents] == [expected_bytes(e) for e in extents]


@pytest.mark.parametrize(
    ("cached_fraction", "processors", "expected"), [(1.0, 2, 2), (1.0, 1, 2), (1.0, 16, 8), (0.0, 2, 8)]
)
def test_cached_files_are_read_by_as_many_threads_as_processors(
    cached_fraction: float, processors: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads from the page cache are copies, so that more threads would only wait; two overlap planning and copying."""
    (tmp_path / "file").write_bytes(bytes(100))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setattr(direct_io, "resident", lambda descriptor, offset, length: int(length * cached_fraction))
    with closing(LocalFile(tmp_path / "file", SETTINGS)) as file:
        table = ExtentTable.of([Extent(file, at, torch.empty(9, dtype=torch.uint8)) for at in (0, 91)])
        assert expected == reader._max_streams(table, 8)


@pytest.mark.parametrize("cached", [(0,), (0, 1), (0, 2)], ids=["beginning", "all but the end", "all but the middle"])
def test_a_partly_cached_file_is_read_by_all_threads(
    cached: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a header caches the beginning of the data, which may be one extent."""
    part = 1 << 20
    (tmp_path / "file").write_bytes(bytes(3 * part))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(
        direct_io, "resident", lambda descriptor, offset, length: length if offset // part in cached else 0
    )
    with closing(LocalFile(tmp_path / "file", SETTINGS)) as file:
        table = ExtentTable.of([Extent(file, 0, torch.empty(3 * part, dtype=torch.uint8))])
        assert 8 == reader._max_streams(table, 8)


def test_remote_blobs_are_read_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes a round trip, whatever the number of processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    table = ExtentTable.of([Extent(PatternBlob(9), 0, torch.empty(9, dtype=torch.uint8))])
    assert 8 == reader._max_streams(table, 8)


def test_a_table_contains_its_extents() -> None:
    """Each extent is found by its index, and slices are sequences of them."""
    blobs = PatternBlob(9), PatternBlob(9)
    extents = [Extent(blobs[at % 2], at, torch.empty(at, dtype=torch.uint8)) for at in range(4)]
    table = ExtentTable.of(extents)
    assert 4 == len(table)
    assert list(blobs) == list(table.blobs)
    for index, extent in enumerate(extents):
        assert extent.blob is table[index].blob
        assert extent.offset == table[index].offset
        assert extent.into is table[index].into
    assert [1, 2] == [extent.offset for extent in table[1:3]]
