"""The image in memory: which bytes of the image lie at which address, to read, to fill and to digest.

An `Image` copies nothing and owns nothing but references: its bytes are the tensors' own. Readers on
the source take them by `segments` (one-sided transports) or `readable` (transports that send from the
host); the target fills them by `segments` or `writable` and checks them by `digest`.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

import torch

from rfork.image.digest import digest_bytes, digest_tensors
from rfork.image.host_memory import HUGE_PAGE, advise_huge_pages, host_view
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.image.regions import CPU, Regions

MOST_DIGEST_THREADS = 8
"""Past this many cores the memory bus is the limit of a manifest, not the hash."""


class Segment(NamedTuple):
    """A run of image bytes that is one run of memory: image offset, memory address, length in bytes."""

    begin: int
    address: int
    length: int


_Part = TypeVar("_Part", memoryview, torch.Tensor)


class Image:
    """The bytes of one rank's weights as one line of bytes. Immutable and thread-safe; the bytes are not.

    `regions` are the image's storages in image order: uint8 tensors, 1-D, contiguous, that together
    have `layout.image_bytes` bytes. The image holds them, so addresses stay valid while it lives.

    CUDA: bytes are copied on a stream of the image's own, which does not wait for kernels under way.
    The constructor waits for them once; whoever changes weights in place later synchronises first.
    """

    def __init__(self, layout: Layout, regions: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        # Keeps the storages, and so the addresses, alive.
        self._regions = regions if isinstance(regions, Regions) else Regions.of(regions)
        self._runs = self._regions.joined()
        *self._begins, held = accumulate(self._runs.lengths, initial=0)
        if held != layout.image_bytes:
            raise ValueError(f"the regions hold {held} bytes, the layout {layout.image_bytes}")
        self._device = _most(self._regions)
        self._streams = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in self.devices
            if device.type == "cuda"
        }
        for device in self._streams:
            torch.cuda.synchronize(device)
        # Made once, as making one costs more than hashing a small tensor, and when they are wanted, as
        # making all at once costs more than all else here.
        self._views: list[memoryview | None] = [None] * len(self._runs)
        self._memories: list[torch.Tensor | None] = [None] * len(self._runs)

    @property
    def regions(self) -> Regions:
        """The image's storages in image order: uint8 tensors, 1-D, over the tensors' own memory."""
        return self._regions

    @property
    def device(self) -> torch.device:
        """Where most of the bytes lie; a module may keep others elsewhere."""
        return self._device

    @property
    def devices(self) -> frozenset[torch.device]:
        """Where any of the bytes lie."""
        return self._regions.devices

    def same_memory(self, other: Image) -> bool:
        """Whether the other image is these very bytes: one layout, over the same addresses."""
        whole = self.layout.image_bytes
        return self.layout.layout_id == other.layout.layout_id and (
            self.segments(0, whole) == other.segments(0, whole)
        )

    def segments(self, begin: int, end: int) -> list[Segment]:
        """The memory of image range `[begin, end)` in image order; runs that touch in both are one.

        Costs O(log n + answer). Raises ValueError for a range outside the image.
        """
        first, stop = self._covering(begin, end)
        columns = self._begins, self._runs.addresses, self._runs.lengths
        found = list(map(Segment, *(column[first:stop] for column in columns)))
        if found:
            address = found[0].address + begin - found[0].begin
            found[0] = Segment(begin, address, found[0].begin + found[0].length - begin)
            found[-1] = found[-1]._replace(length=end - found[-1].begin)
        return found

    def parts(self, begin: int, end: int) -> list[torch.Tensor]:
        """The memory of image range `[begin, end)` as uint8 tensors, 1-D, where it lies, in image order."""
        return self._cut(self._memories, self._runs.memory, begin, end)

    def allocations(self) -> list[tuple[int, int]]:
        """The (address, length) areas that hold the image: few, sorted, disjoint.

        Areas less than a page (4096 bytes) apart are one: all bytes between them lie on the two
        pages that hold their ends, so the whole area is mapped. On CUDA an area never crosses
        from one block of the allocator to the next: devices register one block at a time.
        """
        areas: list[tuple[int, int, int]] = []
        blocks = _device_blocks() if self._streams else []
        for address, length, device in sorted(self._lengths(), key=itemgetter(0)):
            block = bisect_right(blocks, address) if device.type == "cuda" else -1
            if areas and areas[-1][2] == block and address - areas[-1][1] < mmap.PAGESIZE:
                areas[-1] = (areas[-1][0], max(areas[-1][1], address + length), block)
            else:
                areas.append((address, address + length, block))
        return [(address, end - address) for address, end, _ in areas]

    @contextmanager
    def readable(self, begin: int, end: int) -> Iterator[Sequence[memoryview]]:
        """The bytes of `[begin, end)` as host views in image order, to read inside the `with` block only.

        CPU tensors: their own memory. CUDA tensors: a pinned host copy, made on the copy engine.
        """
        views, staged = self._host_views(begin, end)
        for memory, host in staged:
            with torch.cuda.stream(self._streams[memory.device]):
                host.copy_(memory, non_blocking=True)
        self._synchronise(staged)
        yield views

    @contextmanager
    def writable(self, begin: int, end: int) -> Iterator[Sequence[memoryview]]:
        """Views of `[begin, end)` in image order, to fill inside the `with` block only.

        CPU tensors: their own memory. CUDA tensors: pinned host memory, of undefined content, that is
        copied into the tensors when the block ends without an exception.
        """
        views, staged = self._host_views(begin, end)
        yield views
        for memory, host in staged:
            with torch.cuda.stream(self._streams[memory.device]):
                memory.copy_(host, non_blocking=True)
        self._synchronise(staged)

    def digest(self, chunk: int) -> bytes:
        """The 16-byte digest of chunk `chunk`, computed where its bytes lie.

        In a chunk whose bytes lie on several devices, all are brought to the device of the first
        that is not the CPU: never from a GPU to the host.
        """
        begin, end = self.layout.chunks[chunk]
        if not self._streams:
            return digest_bytes(self._cut(self._views, self._runs.view, begin, end))
        memories = self.parts(begin, end)
        devices = {memory.device for memory in memories if memory.device.type != "cpu"}
        if not devices:
            return digest_bytes([_view(memory) for memory in memories])
        device = min(devices, key=str)
        return digest_tensors([memory.to(device) for memory in memories])

    def manifest(self, progress: Callable[[int], None] | None = None, threads: int | None = None) -> Manifest:
        """The digests of all chunks, on `threads` threads (default: as torch uses, at most 8).

        `progress` is called on the calling thread, after each chunk, with that chunk's bytes.
        """
        chunks = self.layout.chunks
        threads = threads or min(torch.get_num_threads(), MOST_DIGEST_THREADS)
        digests: list[bytes] = []
        with ThreadPoolExecutor(threads, thread_name_prefix="rfork-digest") as pool:
            for (begin, end), digest in zip(chunks, pool.map(self.digest, range(len(chunks))), strict=True):
                digests.append(digest)
                if progress is not None:
                    progress(end - begin)
        return Manifest(self.layout, tuple(digests))

    def advise_huge_pages(self) -> int:
        """Ask Linux to back CPU memory that was not touched yet by 2 MiB pages; the bytes asked for.

        Best effort, and worth it before a fork fills a new model: fresh memory is written at 1.8 GB/s
        in 4 KiB pages and at 4.5 GB/s in huge ones.
        """
        return sum(
            advise_huge_pages(address, length)
            for address, length, device in self._lengths()
            if length >= HUGE_PAGE and device.type == "cpu"
        )

    def _lengths(self) -> Iterator[tuple[int, int, torch.device]]:
        """Address, length and device of each run."""
        devices = map(attrgetter("device"), self._runs.storages)
        return zip(self._runs.addresses, self._runs.lengths, devices, strict=True)

    def _covering(self, begin: int, end: int) -> tuple[int, int]:
        """The runs (first, stop) that hold image range `[begin, end)`."""
        size = self.layout.image_bytes
        if not 0 <= begin <= end <= size:
            raise ValueError(f"[{begin}, {end}) is not within the image's {size} bytes")
        if begin == end:
            return 0, 0
        return bisect_right(self._begins, begin) - 1, bisect_left(self._begins, end)

    def _cut(
        self, made: list[_Part | None], make: Callable[[int], _Part], begin: int, end: int
    ) -> list[_Part]:
        """Of one part a run, those of `[begin, end)`, the first and last cut to it; `made` keeps them."""
        first, stop = self._covering(begin, end)
        found: list[_Part] = []
        for index, part in enumerate(made[first:stop], first):
            if part is None:
                part = made[index] = make(index)
            found.append(part)
        if found:
            found[-1] = found[-1][: end - self._begins[stop - 1]]
            found[0] = found[0][begin - self._begins[first] :]
        return found

    def _host_views(
        self, begin: int, end: int
    ) -> tuple[list[memoryview], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Host views of a range; and of each part on a device, its tensor and the staging it is seen by."""
        if not self._streams:
            # Views of our own views: the caller may release what it is given.
            return [view[:] for view in self._cut(self._views, self._runs.view, begin, end)], []
        memories = self.parts(begin, end)
        needed = sum(memory.numel() for memory in memories if memory.device.type != "cpu")
        staging = torch.empty(needed, dtype=torch.uint8, pin_memory=needed > 0)
        hosts: list[torch.Tensor] = []
        used = 0
        for memory in memories:
            if memory.device.type == "cpu":
                hosts.append(memory)
            else:
                hosts.append(staging[used : used + memory.numel()])
                used += memory.numel()
        staged = [(memory, host) for memory, host in zip(memories, hosts, strict=True) if host is not memory]
        return [_view(host) for host in hosts], staged

    def _synchronise(self, staged: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for device in {memory.device for memory, _ in staged}:
            self._streams[device].synchronize()


def _most(regions: Regions) -> torch.device:
    """The device that holds most bytes."""
    if regions.devices <= {CPU}:  # or of no memory at all
        return CPU
    share: Counter[torch.device] = Counter()
    for storage, length in zip(regions.storages, regions.lengths, strict=True):
        share[storage.device] += length
    return share.most_common(1)[0][0]


def _view(memory: torch.Tensor) -> memoryview:
    return host_view(memory.data_ptr(), memory.numel())


def _device_blocks() -> list[int]:
    """The first address of each block that torch's CUDA allocator holds, sorted."""
    blocks = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sorted(int(block["address"]) for block in blocks)
