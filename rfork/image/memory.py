"""The image in memory: which bytes of the image lie at which address, to read, to fill and to digest.

An `EngineImage` copies nothing and owns nothing but references: its bytes are the tensors' own. Readers on
the source take them by `segments` (one-sided transports) or `reading` (transports that send from the
host); the target fills them by `segments` or `writing` and checks them by `digest`. `readable` and
`writable` are those two in a single step.
"""

from __future__ import annotations

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
from rfork.image.pinned_staging import STEP_BYTES, CudaCopier, DeviceCopier, PinnedStaging
from rfork.image.storages import StorageTable

MAX_DIGEST_THREADS = 8
"""Past this many cores the memory bus is the limit of a manifest, not the hash."""
CHUNKS_IN_FLIGHT = 4
"""On a GPU, that many threads at least: while one waits for its chunk, others have given it theirs."""


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

    CUDA: bytes are copied and digested on streams of the image's own, which do not wait for kernels under
    way. The constructor waits for them once; whoever changes weights in place later synchronises first.
    A method that copies or digests returns once that is done, so what comes next may use any stream.

    `copies`: None for those of the devices that the bytes lie on.
    """

    def __init__(self, layout: Layout, regions: Sequence[torch.Tensor], copies: DeviceCopier | None = None) -> None:
        self.layout = layout
        # Keeps the storages, and so the addresses, alive.
        self._regions = regions if isinstance(regions, StorageTable) else StorageTable.of(regions)
        self._runs = self._regions.coalesced()
        *self._begins, total_bytes = accumulate(self._runs.lengths, initial=0)
        if total_bytes != layout.image_bytes:
            raise ValueError(f"the regions hold {total_bytes} bytes, the layout {layout.image_bytes}")
        self._streams = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in self.devices
            if device.type == "cuda"
        }
        for device in self._streams:
            torch.cuda.synchronize(device)
        if copies is None and self._streams:
            copies = CudaCopier(self._streams)
        self._staging = None if copies is None else PinnedStaging(copies)
        self._released = False
        # Made once, as making one costs more than hashing a small tensor, and when they are wanted, as
        # making all at once costs more than all else here.
        self._views: list[memoryview | None] = [None] * len(self._runs)
        self._memories: list[torch.Tensor | None] = [None] * len(self._runs)

    @property
    def regions(self) -> StorageTable:
        """The image's storages in image order: uint8 tensors, 1-D, over the tensors' own memory."""
        return self._regions

    @property
    def runs(self) -> StorageTable:
        """The image's memory in as few runs as can be seen as one tensor or view each, in image order."""
        return self._runs

    @property
    def device(self) -> torch.device:
        """Where most of the bytes lie; a module may keep others elsewhere."""
        return self._regions.device

    @property
    def devices(self) -> frozenset[torch.device]:
        """Where any of the bytes lie."""
        return self._regions.devices

    def shares_memory_with(self, other: Image) -> bool:
        """Whether the other image is these very bytes: one layout, over the same addresses."""
        image_bytes = self.layout.image_bytes
        return self.layout.layout_id == other.layout.layout_id and (
            self.segments(0, image_bytes) == other.segments(0, image_bytes)
        )

    def segments(self, begin: int, end: int) -> list[Segment]:
        """The memory of image range `[begin, end)` in image order; runs that touch in both are one.

        Costs O(log n + answer). Raises ValueError for a range outside the image.
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
        """The memory of image range `[begin, end)` as uint8 tensors, 1-D, where it lies, in image order."""
        return self._slice(self._memories, self._runs.memory, begin, end)

    @contextmanager
    def reading(self, begin: int, end: int, step: int = STEP_BYTES) -> Iterator[Iterator[Sequence[memoryview]]]:
        """The bytes of `[begin, end)` step by step, each as host views in image order, for the `with` block.

        CPU tensors: one step, their own memory. CUDA tensors: steps of `step` bytes, copied into pinned
        memory; a step's views are valid until the next is asked for, which is copied meanwhile. No byte
        out of the range is read, and none after the block.
        """
        if self._staging is None:
            yield iter([self._host_views(begin, end)])
            return
        with closing(self._staging.reading(self._steps(begin, end, step))) as steps:
            yield steps

    @contextmanager
    def writing(self, begin: int, end: int, step: int = STEP_BYTES) -> Iterator[Iterator[Sequence[memoryview]]]:
        """Host views of `[begin, end)` in image order, step by step, to be filled within the `with` block.

        CPU tensors: one step, their own memory. CUDA tensors: steps of `step` bytes of pinned memory, of
        undefined content. To ask for the next step is to say that this one is filled: it is copied
        into the tensors while the next is filled, and all are there once no step is left. One that was
        not filled when the block ends is not copied.
        """
        if self._staging is None:
            yield iter([self._host_views(begin, end)])
            return
        with closing(self._staging.writing(self._steps(begin, end, step))) as steps:
            yield steps

    @contextmanager
    def readable(self, begin: int, end: int) -> Iterator[Sequence[memoryview]]:
        """All of `[begin, end)` as `reading` gives it in one step, to read inside the `with` block only."""
        with self.reading(begin, end, max(1, end - begin)) as steps:
            yield next(steps)

    @contextmanager
    def writable(self, begin: int, end: int) -> Iterator[Sequence[memoryview]]:
        """All of `[begin, end)` as `writing` gives it in one step, to fill inside the `with` block only.

        CUDA tensors: copied when the block ends without an exception, else they stay as they were.
        """
        with self.writing(begin, end, max(1, end - begin)) as steps:
            yield next(steps)
            next(steps, None)

    def digest(self, chunk: int) -> bytes:
        """The 16-byte digest of chunk `chunk`, computed where its bytes lie: on CUDA on a stream of its own.

        In a chunk whose bytes lie on several devices, all are brought to the device of the first
        that is not the CPU: never from a GPU to the host.
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
        """The digests of all chunks, on `threads` threads.

        Default: as many as torch uses, but at most 8, and at least 4 for CUDA tensors.
        `progress` is called on the calling thread, after each chunk, with that chunk's bytes.
        """
        chunks = self.layout.chunks
        fewest = CHUNKS_IN_FLIGHT if self._streams else 1
        threads = threads or max(fewest, min(torch.get_num_threads(), MAX_DIGEST_THREADS))
        digests: list[bytes] = []
        with ThreadPoolExecutor(threads, thread_name_prefix="rfork-digest") as pool:
            for (begin, end), digest in zip(chunks, pool.map(self.digest, range(len(chunks))), strict=True):
                digests.append(digest)
                if progress is not None:
                    progress(end - begin)
        return Manifest(self.layout, tuple(digests))

    def release(self, keep: Collection[int] = ()) -> None:
        """Give the memory back to its allocators, whoever still holds tensors in it: they are empty then.

        `keep` are the addresses of storages that are left as they are. For who is about to build another
        model in the place of this one: nobody may read or write the image any more, and who tries gets
        SourceWeightsChanged. Memory that its allocator does not take back so is freed with its tensors.
        """
        self._released = True
        for storage in self._regions.storages:
            if storage.nbytes() and storage.data_ptr() not in keep:
                # Not every storage can be resized: memory that somebody else lent cannot.
                with suppress(RuntimeError):
                    storage.resize_(0)

    def rebind(self, other: Image) -> None:
        """After `release`: the memory of another image of this layout is this one's from now on."""
        if other.layout.layout_id != self.layout.layout_id:
            raise ValueError(f"its layout is {other.layout.layout_id}, not {self.layout.layout_id}")
        self._regions, self._runs, self._begins = other._regions, other._runs, other._begins
        self._streams, self._staging = other._streams, other._staging
        self._views, self._memories = other._views, other._memories
        self._released = other._released

    def _segments_covering(self, begin: int, shut_down: int) -> tuple[int, int]:
        """The runs (first, stop) that hold image range `[begin, end)`."""
        if self._released:
            raise SourceWeightsChanged("the memory was given back: there is nothing to read or to write")
        size = self.layout.image_bytes
        if not 0 <= begin <= shut_down <= size:
            raise ValueError(f"[{begin}, {shut_down}) is not within the image's {size} bytes")
        if begin == shut_down:
            return 0, 0
        return bisect_right(self._begins, begin) - 1, bisect_left(self._begins, shut_down)

    def _slice(self, made: list[_Part | None], make: Callable[[int], _Part], begin: int, end: int) -> list[_Part]:
        """Of one part a run, those of `[begin, end)`, the first and last cut to it; `made` keeps them."""
        first, stop = self._segments_covering(begin, end)
        found: list[_Part] = []
        for index, part in enumerate(made[first:stop], first):
            if part is None:
                part = made[index] = make(index)
            found.append(part)
        if found:
            found[-1] = found[-1][: end - self._begins[stop - 1]]
            found[0] = found[0][begin - self._begins[first] :]
        return found

    def _host_views(self, begin: int, end: int) -> Sequence[memoryview]:
        # Views of our own views: the caller may release what it is given.
        return [view[:] for view in self._slice(self._views, self._runs.view, begin, end)]

    def _steps(self, begin: int, end: int, step: int) -> Iterator[list[torch.Tensor]]:
        self._segments_covering(begin, end)  # a range that the image does not have is refused before the first step
        lows = range(begin, max(end, begin + 1), step)  # an empty range is one empty step
        return (self.tensor_slices(low, min(low + step, end)) for low in lows)


def _view(memory: torch.Tensor) -> memoryview:
    return host_view(memory.data_ptr(), memory.numel())
