"""Writing blocks to a device: buffers wait for their copies. The device is simulated by a dictionary."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch

from rfork.errors import StorageError
from rfork.image.staging import BufferPool, PendingCopy
from rfork.settings import StorageSettings
from rfork.storage.io import reader as reading
from rfork.storage.io.extents import ReadBlock
from rfork.storage.io.gds import DirectStorage
from rfork.storage.io.reader import Extent, fill
from tests.unit.storage.io.test_reader import PatternBlob

KIB = 1 << 10
BLOCK = 64 * KIB


class FakeDevice:
    """Device memory by offset in one address range (a tensor without bytes) that tests fill.

    Bytes are read from the source when a copy is waited for, not earlier: a buffer that is reused too early
    copies wrong ones. `fail` is called with the step that begins (copy, wait) and may raise.
    """

    def __init__(self, length: int) -> None:
        self.address_space = torch.empty(length, dtype=torch.uint8, device="meta")
        self.memory = bytearray(length)
        self.in_flight = 0
        self.max_in_flight = 0
        self.closed = False
        self.direct_blocks: set[int] = set()
        """Blocks that are read without staging, by their first byte."""
        self.fail: Callable[[str], None] = lambda _: None
        self._lock = threading.Lock()

    def read(self, block: ReadBlock, pieces: Sequence[tuple[int, torch.Tensor]]) -> bool:
        if block.begin not in self.direct_blocks:
            return False
        for offset, into in pieces:
            data = bytearray(into.numel())
            block.blob.read(offset, [memoryview(data)])
            self.put(into, bytes(data))
        return True

    def host_to_device(self, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> PendingCopy:
        self.fail("copy")
        with self._lock:
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
        return FakeCopy(self, into, source)

    def complete_copy(self, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        """Complete a copy."""
        with self._lock:
            self.in_flight -= 1
        self.fail("wait")
        for target, data in zip(into, source, strict=True):
            self.put(target, bytes(data.tolist()))

    def put(self, into: torch.Tensor, data: bytes) -> None:
        """Copy bytes into device memory."""
        begin = int(into.storage_offset())
        assert into.numel() == len(data)
        self.memory[begin : begin + into.numel()] = data

    def pinned(self, nbytes: int) -> torch.Tensor:
        raise NotImplementedError  # the tests' pool has its own buffers

    def finish_earlier_work(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


class FakeCopy:
    """Copy to the device; see `PendingCopy`."""

    def __init__(self, device: FakeDevice, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        self._device, self._into, self._source = device, into, source

    def wait(self) -> None:
        self._device.complete_copy(self._into, self._source)


class CountedBufferPool:
    """Buffer pool that counts its buffers in use."""

    def __init__(self, buffers: int) -> None:
        self.made = self.freed = 0
        self.staging = BufferPool(buffers * BLOCK, BLOCK, self._make)

    def _make(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.made += 1
        weakref.finalize(buffer, self._free)
        return buffer

    def _free(self) -> None:
        self.freed += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Replace CUDA with a device that has memory for twenty blocks."""
    device = FakeDevice(20 * BLOCK)

    def copier(devices: Iterable[torch.device]) -> FakeDevice:
        assert [torch.device("meta")] == list(devices)
        return device

    monkeypatch.setattr(reading, "CudaCopier", copier)
    monkeypatch.setattr(DirectStorage, "find", lambda _: device)
    monkeypatch.setattr(reading, "block_bytes", lambda *_: BLOCK)
    return device


@pytest.fixture(params=[1, 2, 3, 8], ids=lambda count: f"{count}-buffers")
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedBufferPool]:
    """Return a pool with that many buffers; a test must have released all of them at its end."""
    count: int = request.param
    pool = CountedBufferPool(count)
    monkeypatch.setattr(reading, "BufferPool", lambda *_: pool.staging)
    yield pool
    gc.collect()  # a test that failed to read has an exception whose frames refer to buffers
    assert pool.made <= count
    assert pool.made == pool.freed


def extents_of(device: FakeDevice, blob: PatternBlob, sizes: Iterable[int], offset: int = 0) -> list[Extent]:
    """Return extents that are adjacent in the blob and in device memory."""
    extents, at = [], 0
    for size in sizes:
        extents.append(Extent(blob, offset + at, device.address_space[at : at + size]))
        at += size
    return extents


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("sizes", [[10 * BLOCK], [1000] * 500, [3, 5 * BLOCK + 7, 1, 0, 2 * BLOCK]])
def test_every_byte_is_written(device: FakeDevice, pool: CountedBufferPool, streams: int, sizes: list[int]) -> None:
    """However few buffers and many threads there are, no buffer is reused before its copy has finished."""
    blob, filled = PatternBlob(sum(sizes) + 4321), list[int]()
    extents = extents_of(device, blob, sizes, 4321)
    fill(extents, StorageSettings(concurrency=streams), on_filled=filled.append)
    assert blob.data[4321:] == bytes(device.memory[: sum(sizes)])
    assert list(range(len(sizes))) == sorted(filled)
    assert device.closed
    assert 0 == device.in_flight


def test_a_copy_overlaps_with_the_next_read(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread with two buffers reads a block while the previous one is copied."""
    pool, in_flight = CountedBufferPool(2), list[int]()
    monkeypatch.setattr(reading, "BufferPool", lambda *_: pool.staging)
    blob = PatternBlob(4 * BLOCK, before=lambda _: in_flight.append(device.in_flight))
    fill(extents_of(device, blob, [4 * BLOCK]), StorageSettings(concurrency=1))
    assert [0, 1, 1, 1] == in_flight
    assert 2 == device.max_in_flight
    assert 2 == pool.made


def test_an_extent_is_reported_after_its_bytes_arrive(device: FakeDevice, pool: CountedBufferPool) -> None:
    """When an extent is reported, its bytes are on the device."""
    blob, right = PatternBlob(10 * BLOCK), list[bool]()
    extents = extents_of(device, blob, [BLOCK // 2] * 20)

    def on_filled(index: int) -> None:
        begin = index * BLOCK // 2
        here = bytes(device.memory[begin : begin + BLOCK // 2])
        right.append(here == blob.data[begin : begin + BLOCK // 2])

    fill(extents, StorageSettings(concurrency=3), on_filled=on_filled)
    assert [True] * 20 == right


def test_some_blocks_need_no_staging(device: FakeDevice, pool: CountedBufferPool) -> None:
    """Blocks that the device reads directly use no buffer, and all other blocks are correct."""
    device.direct_blocks = {0, 3 * BLOCK}
    blob, filled = PatternBlob(5 * BLOCK), list[int]()
    fill(extents_of(device, blob, [BLOCK] * 5), StorageSettings(concurrency=2), on_filled=filled.append)
    assert blob.data == bytes(device.memory[: 5 * BLOCK])
    assert [0, 1, 2, 3, 4] == sorted(filled)


@pytest.mark.parametrize("failing_step", ["copy", "read", "wait"])
def test_an_error_waits_for_running_copies(device: FakeDevice, pool: CountedBufferPool, failing_step: str) -> None:
    """Whichever step fails, no copy still reads a buffer after the call, and no thread hangs."""
    calls: list[str] = []
    counting = threading.Lock()

    def fail(step: str, when: int = 4) -> None:
        with counting:
            calls.append(step)
            count = calls.count(step)
        if count == when and step == failing_step:
            raise StorageError("it broke")

    device.fail = fail
    blob = PatternBlob(12 * BLOCK, before=lambda _: fail("read"))
    with pytest.raises(StorageError, match="it broke"):
        fill(extents_of(device, blob, [12 * BLOCK]), StorageSettings(concurrency=3))
    assert 0 == device.in_flight
    assert device.closed


def test_host_extents_between_device_extents_are_read_directly(device: FakeDevice, pool: CountedBufferPool) -> None:
    """Host extents between device extents are read directly into their memory."""
    blob, host = PatternBlob(4 * BLOCK), torch.zeros(BLOCK, dtype=torch.uint8)
    extents = extents_of(device, blob, [BLOCK] * 4)
    extents[1] = Extent(blob, BLOCK, host)
    fill(extents, StorageSettings(concurrency=2))
    device.memory[BLOCK : 2 * BLOCK] = bytes(host.tolist())
    assert blob.data == bytes(device.memory[: 4 * BLOCK])
