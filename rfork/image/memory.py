"""The image in memory: maps image bytes to addresses, to read, fill and digest them.

An `Image` copies nothing and owns only references: its bytes are the tensors' own. Readers on the source use
`segments` (one-sided transports) or `reading` (transports that send from the host). The target fills the
image through `segments` or `writing` and checks it with `digest`. `readable` and `writable` do the same in a
single step.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch

from rfork.errors import SourceWeightsChanged
from rfork.image.digest import digest_bytes, digest_tensors
from rfork.image.host_memory import host_view
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.image.staging import STEP_BYTES, CudaCopier, DeviceCopier, PinnedStaging
from rfork.image.storages import StorageTable
from rfork.logs import logger

MAX_DIGEST_THREADS = 8
"""With more threads, memory bandwidth limits a manifest, not hashing."""
MIN_CUDA_DIGEST_THREADS = 4
"""Minimum number of digest threads on a GPU: while one waits for its chunk, others submit theirs."""

log = logger(__name__)


class Segment(NamedTuple):
    """Contiguous image bytes in contiguous memory: image offset, memory address, length in bytes."""

    begin: int
    address: int
    length: int


_Part = TypeVar("_Part", memoryview, torch.Tensor)


class Image:
    """The bytes of one rank's weights as one byte range. Immutable and thread-safe, except for the bytes themselves.

    `regions` are the image's storages in image order: uint8 tensors, 1-D, contiguous, with
    `layout.image_bytes` bytes in total. The image references them, so addresses stay valid while it exists.

    CUDA: bytes are copied and digested on the image's own streams, which do not wait for running kernels. The
    constructor waits for running kernels once; a caller that later changes weights in place must synchronise
    first. Methods that copy or digest return after completion, so the caller may continue on any stream.

    `copier` defaults to a copier for the devices of the bytes.
    """

    def __init__(self, layout: Layout, regions: Sequence[torch.Tensor], copier: DeviceCopier | None = None) -> None:
        self.layout = layout
        # Keeps the storages, and therefore the addresses, alive.
        self._regions = regions if isinstance(regions, StorageTable) else StorageTable.of(regions)
        self._runs = self._regions.coalesced()
        *self._begins, total_bytes = accumulate(self._runs.lengths, initial=0)
        if total_bytes != layout.image_bytes:
            raise ValueError(f"the regions have {total_bytes} bytes, the layout {layout.image_bytes}")
        self._streams = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in self.devices
            if device.type == "cuda"
        }
        for device in self._streams:
            torch.cuda.synchronize(device)
        if copier is None and self._streams:
            copier = CudaCopier(self._streams)
        self._staging = None if copier is None else PinnedStaging(copier)
        self._released = False
        # Created once, because creating one costs more than hashing a small tensor, and lazily, because
        # creating all of them would dominate the cost of the constructor.
        self._views: list[memoryview | None] = [None] * len(self._runs)
        self._memories: list[torch.Tensor | None] = [None] * len(self._runs)

    @classmethod
    def without_memory(cls, layout: Layout) -> Image:
        """Return an image whose memory was released: every access to its bytes raises SourceWeightsChanged."""
        image = cls(layout, [torch.empty(layout.image_bytes, dtype=torch.uint8, device="meta")])
        image._released = True
        return image

    @property
    def is_released(self) -> bool:
        """True if its memory was released: its bytes cannot be accessed."""
        return self._released

    @property
    def regions(self) -> StorageTable:
        """The image's storages in image order: uint8 tensors, 1-D, over the tensors' own memory."""
        return self._regions

    @property
    def runs(self) -> StorageTable:
        """The image's memory in the fewest runs that each fit in one tensor or view, in image order."""
        return self._runs

    @property
    def device(self) -> torch.device:
        """The device of most of the bytes; a module may keep others elsewhere."""
        return self._regions.device

    @property
    def devices(self) -> frozenset[torch.device]:
        """All devices of the bytes."""
        return self._regions.devices

    def shares_memory_with(self, other: Image) -> bool:
        """Return True if the other image has the same layout over the same addresses."""
        image_bytes = self.layout.image_bytes
        return self.layout.layout_id == other.layout.layout_id and (
            self.segments(0, image_bytes) == other.segments(0, image_bytes)
        )

    def segments(self, begin: int, end: int) -> list[Segment]:
        """Return the memory of image range `[begin, end)` in image order, adjacent runs merged.

        Costs O(log n + result). Raises ValueError for a range outside the image.
        """
        first, stop = self._segments_covering(begin, end)
        columns = self._begins, self._runs.addresses, self._runs.lengths
        found = list(map(Segment, *(column[first:stop] for column in columns)))
        if found:
            address = found[0].address + begin - found[0].begin
            found[0] = Segment(begin, address, found[0].begin + found[0].length - begin)
            found[-1] = found[-1]._replace(length=end - found[-1].begin)
        return found

    def tensor_slices(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return the memory of image range `[begin, end)` as uint8 tensors, 1-D, on their devices, in image order."""
        return self._slice(self._memories, self._runs.memory, begin, end)

    @contextmanager
    def reading(self, begin: int, end: int, step: int = STEP_BYTES) -> Iterator[Iterator[Sequence[memoryview]]]:
        """Yield the bytes of `[begin, end)` step by step as host views in image order, for the `with` block.

        CPU tensors: one step over their own memory. CUDA tensors: steps of `step` bytes, copied to pinned
        memory. The views of a step are valid until the next is requested; the next is copied in the meantime.
        No byte outside the range is read, and none after the block.
        """
        if self._staging is None:
            yield iter([self._host_views(begin, end)])
            return
        with closing(self._staging.reading(self._steps(begin, end, step))) as steps:
            yield steps

    @contextmanager
    def writing(self, begin: int, end: int, step: int = STEP_BYTES) -> Iterator[Iterator[Sequence[memoryview]]]:
        """Yield host views of `[begin, end)` step by step in image order, to be filled within the `with` block.

        CPU tensors: one step over their own memory. CUDA tensors: steps of `step` bytes of uninitialised
        pinned memory. Requesting the next step marks the current one as filled: it is copied to the tensors
        while the next is filled. All copies are complete when no step is left. A step that was not filled
        when the block ends is not copied.
        """
        if self._staging is None:
            yield iter([self._host_views(begin, end)])
            return
        with closing(self._staging.writing(self._steps(begin, end, step))) as steps:
            yield steps

    @contextmanager
    def readable(self, begin: int, end: int) -> Iterator[Sequence[memoryview]]:
        """Yield all of `[begin, end)` like `reading`, in one step, readable only inside the `with` block."""
        with self.reading(begin, end, max(1, end - begin)) as steps:
            yield next(steps)

    @contextmanager
    def writable(self, begin: int, end: int) -> Iterator[Sequence[memoryview]]:
        """Yield all of `[begin, end)` like `writing`, in one step, to be filled inside the `with` block.

        CUDA tensors: copied when the block ends without an exception, unchanged otherwise.
        """
        with self.writing(begin, end, max(1, end - begin)) as steps:
            yield next(steps)
            next(steps, None)

    def digest(self, chunk: int) -> bytes:
        """Return the 16-byte digest of chunk `chunk`, computed on its device: on CUDA on its own stream.

        If the bytes of a chunk are on several devices, they are copied to the first one that is not the CPU,
        so never from a GPU to the host.
        """
        begin, end = self.layout.chunks[chunk]
        if not self._streams:
            return digest_bytes(self._slice(self._views, self._runs.view, begin, end))
        memories = self.tensor_slices(begin, end)
        devices = {memory.device for memory in memories if memory.device.type != "cpu"}
        if not devices:
            return digest_bytes([_view(memory) for memory in memories])
        device = min(devices, key=str)
        with torch.cuda.stream(self._streams[device]):
            return digest_tensors([memory.to(device) for memory in memories])

    def manifest(self, progress: Callable[[int], None] | None = None, threads: int | None = None) -> Manifest:
        """Digest all chunks on `threads` threads.

        Default: torch's number of threads, at most 8, and at least 4 for CUDA tensors. `progress` is called
        on the calling thread after each chunk, with that chunk's size in bytes.
        """
        chunks = self.layout.chunks
        min_threads = MIN_CUDA_DIGEST_THREADS if self._streams else 1
        threads = threads or max(min_threads, min(torch.get_num_threads(), MAX_DIGEST_THREADS))
        digests: list[bytes] = []
        with ThreadPoolExecutor(threads, thread_name_prefix="rfork-digest") as pool:
            for (begin, end), digest in zip(chunks, pool.map(self.digest, range(len(chunks))), strict=True):
                digests.append(digest)
                if progress is not None:
                    progress(end - begin)
        return Manifest(self.layout, tuple(digests))

    def release(self, keep: Collection[int] = ()) -> None:
        """Return the memory to its allocators even if tensors still refer to it; they become empty.

        `keep` are addresses of storages that are left unchanged. Used before another model is built in place
        of this one: from then on, reads and writes of the image raise SourceWeightsChanged. Memory that its
        allocator cannot release this way is freed with its tensors.
        """
        self._released = True
        for storage in self._regions.storages:
            if storage.nbytes() and storage.data_ptr() not in keep:
                # Borrowed memory cannot be resized.
                with suppress(RuntimeError):
                    storage.resize_(0)

    def rebind(self, other: Image) -> None:
        """Use the memory of another image with the same layout. Called after `release`."""
        if other.layout.layout_id != self.layout.layout_id:
            raise ValueError(f"the other image has layout {other.layout.layout_id}, not {self.layout.layout_id}")
        self._regions, self._runs, self._begins = other._regions, other._runs, other._begins
        self._streams, self._staging = other._streams, other._staging
        self._views, self._memories = other._views, other._memories
        self._released = other._released

    def _segments_covering(self, begin: int, end: int) -> tuple[int, int]:
        """Return the runs (first, stop) that contain image range `[begin, end)`."""
        if self._released:
            raise SourceWeightsChanged("image memory was already released")
        size = self.layout.image_bytes
        if not 0 <= begin <= end <= size:
            raise ValueError(f"[{begin}, {end}) is not within the image's {size} bytes")
        if begin == end:
            return 0, 0
        return bisect_right(self._begins, begin) - 1, bisect_left(self._begins, end)

    def _slice(self, cache: list[_Part | None], create: Callable[[int], _Part], begin: int, end: int) -> list[_Part]:
        """Return the parts (one per run) of `[begin, end)`, the first and last cut to it; `cache` caches them."""
        first, stop = self._segments_covering(begin, end)
        found: list[_Part] = []
        for index, part in enumerate(cache[first:stop], first):
            if part is None:
                part = cache[index] = create(index)
            found.append(part)
        if found:
            found[-1] = found[-1][: end - self._begins[stop - 1]]
            found[0] = found[0][begin - self._begins[first] :]
        return found

    def _host_views(self, begin: int, end: int) -> Sequence[memoryview]:
        # Views of the cached views, because the caller may release them.
        return [view[:] for view in self._slice(self._views, self._runs.view, begin, end)]

    def _steps(self, begin: int, end: int, step: int) -> Iterator[list[torch.Tensor]]:
        self._segments_covering(begin, end)  # reject a range outside the image before the first step
        lows = range(begin, max(end, begin + 1), step)  # an empty range is one empty step
        return (self.tensor_slices(low, min(low + step, end)) for low in lows)


def _view(memory: torch.Tensor) -> memoryview:
    return host_view(memory.data_ptr(), memory.numel())


def compute_manifest(image: Image) -> Manifest:
    """Digest a complete image once no kernel writes it; logs the duration."""
    began = time.monotonic()
    for device in image.devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    manifest = image.manifest()
    log.info(
        "weights digested",
        gigabytes=round(image.layout.image_bytes / 1e9, 3),
        seconds=round(time.monotonic() - began, 3),
        weights_id=manifest.weights_id,
    )
    return manifest
