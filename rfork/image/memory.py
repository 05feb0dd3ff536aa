"""The image in memory: maps image bytes to addresses, to read, fill and digest them.

An `Image` copies nothing and owns only references: its bytes are the tensors' own. Readers on the source use
`segments` (one-sided transports) or `reading` (transports that send from the host). The target fills the
image through `segments` or `writing` and checks it with `digest`. `readable` and `writable` do the same in a
single step.

Its storages are in column lists, as there may be a million of them; tensors over them are created on demand.
"""

from __future__ import annotations

import hashlib
import re
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch

from rfork.cuda.device import TorchDevices, cuda_driver, current_work, device_of
from rfork.errors import SourceWeightsChanged, TargetError
from rfork.image import ranges
from rfork.image.digest import LEAF_BYTES, digest_bytes, digest_plan, digest_views, gpu_kernel
from rfork.image.host_memory import host_view
from rfork.image.layout import Layout, Manifest
from rfork.image.leaf_plan import Column, LeafPlan, leaf_plan
from rfork.image.staging import CPU, STEP_BYTES, CudaCopier, DeviceCopier, PinnedStaging
from rfork.logs import logger

MAX_DIGEST_THREADS = 8
"""With more threads, memory bandwidth limits a manifest, not hashing."""
MIN_CUDA_DIGEST_THREADS = 4
"""Minimum number of digest threads on a GPU: while one waits for its chunk, others submit theirs."""
log = logger(__name__)
_Part = TypeVar("_Part", memoryview, torch.Tensor)
MAPS = Path("/proc/self/maps")
MAPS_BUFFER_BYTES = 1 << 20
_READ_ONLY_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .-", re.MULTILINE)


class StorageTable(Sequence[torch.Tensor]):
    """Runs of memory in image order, as uint8 tensors, 1-D, created on access.

    Keeps the storages, and so the memory, alive, whatever happens to the original tensors. Creating tens of
    thousands of regions as tensors would take longer than everything else about an image.
    """

    def __init__(
        self, storages: Sequence[torch.UntypedStorage], addresses: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Address and size in bytes of each region, and its storage."""
        self.storages = storages
        self.addresses = addresses
        self.lengths = lengths

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> StorageTable:
        """Return a table of these tensors (uint8, 1-D, contiguous)."""
        kept = list(tensors)
        return cls(
            [tensor.untyped_storage() for tensor in kept],
            [tensor.data_ptr() for tensor in kept],
            [tensor.numel() for tensor in kept],
        )

    @cached_property
    def columns(self) -> tuple[Column, Column]:
        """The addresses and the lengths as arrays."""
        return np.array(self.addresses, dtype=np.int64), np.array(self.lengths, dtype=np.int64)

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """The devices of the storages."""
        return frozenset(map(TorchDevices.device_of, self.storages))

    @cached_property
    def device(self) -> torch.device:
        """The device of most of the bytes; the CPU if there are none."""
        if self.devices <= {CPU}:
            return CPU
        share: Counter[torch.device] = Counter()
        for storage, length in zip(self.storages, self.lengths, strict=True):
            share[device_of(storage)] += length
        return share.most_common(1)[0][0]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        storage, length = self.storages[index], self.lengths[index]
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        with torch.no_grad():
            return memory.set_(storage, self.addresses[index] - storage.data_ptr(), (length,), (1,))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.__getitem__, range(len(self)))

    def coalesced(self) -> StorageTable:
        """Return the same memory without empty regions, with neighbours merged that are also adjacent in memory.

        On the CPU any two neighbours may be merged. On other devices only those of one storage (one
        allocation), because only those fit in one tensor. Keeps alive only the first storage of merged
        regions.
        """
        if self.devices <= {CPU}:
            return self._coalesced_on_host()
        storages: list[torch.UntypedStorage] = []
        addresses: list[int] = []
        lengths: list[int] = []
        reached = -1
        for storage, address, length in zip(self.storages, self.addresses, self.lengths, strict=True):
            if not length:
                continue
            if address == reached and _is_adjacent(storages[-1], storage):
                lengths[-1] += length
            else:
                storages.append(storage)
                addresses.append(address)
                lengths.append(length)
            reached = address + length
        return StorageTable(storages, addresses, lengths)

    def _coalesced_on_host(self) -> StorageTable:
        """Return `coalesced` for host memory, by array operations: there may be tens of thousands of regions."""
        addresses, lengths = self.columns
        kept = lengths.nonzero()[0]
        if not len(kept):
            return StorageTable([], [], [])
        addresses, lengths = addresses[kept], lengths[kept]
        firsts = np.append(0, (addresses[1:] != addresses[:-1] + lengths[:-1]).nonzero()[0] + 1)
        return StorageTable(
            [self.storages[index] for index in kept[firsts].tolist()],
            addresses[firsts].tolist(),
            np.add.reduceat(lengths, firsts).tolist(),
        )

    def memory(self, index: int) -> torch.Tensor:
        """Return a region as one tensor. A region merged from several storages does not keep them alive."""
        storage, end = self.storages[index], self.addresses[index] + self.lengths[index]
        if end <= storage.data_ptr() + storage.nbytes():
            return self[index]
        return torch.frombuffer(host_view(self.addresses[index], self.lengths[index]), dtype=torch.uint8)

    def host_views(self, first: int, stop: int) -> list[memoryview]:
        """Return the bytes of the CPU regions `[first, stop)`, none of them empty."""
        if first == stop:
            return []
        base, span = self._span
        extents = zip(self.addresses[first:stop], self.lengths[first:stop], strict=True)
        return [span[address - base : address - base + length] for address, length in extents]

    @cached_property
    def _span(self) -> tuple[int, memoryview]:
        """The lowest address and a view from there to the end of the last region; only its slices are accessed.

        A slice of it costs a fifth of a view of its own, and is one object for the garbage collector instead of two.
        """
        addresses, lengths = self.columns
        base = int(addresses.min())
        return base, host_view(base, int((addresses + lengths).max()) - base)


def _is_adjacent(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    device = device_of(one)
    return device == device_of(other) and (device == CPU or one.data_ptr() == other.data_ptr())


class Segment(NamedTuple):
    """Contiguous image bytes in contiguous memory: image offset, memory address, length in bytes."""

    begin: int
    address: int
    length: int


class Image:
    """The bytes of one rank's weights as one byte range. Immutable and thread-safe, except for the bytes themselves.

    `regions` are the image's storages in image order: uint8 tensors, 1-D, contiguous, with
    `layout.image_bytes` bytes in total. The image references them, so addresses stay valid while it exists.

    CUDA: bytes are copied and digested on this process's own streams, which do not wait for other work. The
    constructor waits once for the work on the calling thread's current streams; a caller that later changes
    weights in place must wait for that work first. Methods that copy or digest return after completion, so the
    caller may continue on any stream.

    `copier` defaults to a copier for the devices of the bytes.
    """

    def __init__(self, layout: Layout, regions: Sequence[torch.Tensor], copier: DeviceCopier | None = None) -> None:
        self.layout = layout
        # Keeps the storages, and therefore the addresses, alive.
        self.regions = regions if isinstance(regions, StorageTable) else StorageTable.of(regions)
        self.runs = self.regions.coalesced()
        """The image's memory in the fewest runs that each fit in one tensor or view, in image order."""
        *self._begins, total_bytes = accumulate(self.runs.lengths, initial=0)
        if total_bytes != layout.image_bytes:
            raise ValueError(f"the regions have {total_bytes} bytes, the layout {layout.image_bytes}")
        gpus = self.gpus
        if copier is None and gpus:
            copier = CudaCopier(gpus)
            copier.finish_earlier_work()
        self._staging = None if copier is None else PinnedStaging(copier)
        self.is_released = False
        """True if its memory was released: its bytes cannot be accessed."""
        # Created lazily, because creating all of them would dominate the cost of the constructor.
        self._memories: list[torch.Tensor | None] = [None] * len(self.runs)
        self._leaf_plans: dict[int, tuple[torch.device | None, LeafPlan]] = {}  # by chunk

    @classmethod
    def without_memory(cls, layout: Layout) -> Image:
        """Return an image whose memory was released: every access to its bytes raises SourceWeightsChanged."""
        image = cls(layout, [torch.empty(layout.image_bytes, dtype=torch.uint8, device="meta")])
        image.is_released = True
        return image

    @property
    def device(self) -> torch.device:
        """The device of most of the bytes; a module may keep others elsewhere."""
        return self.regions.device

    @property
    def devices(self) -> frozenset[torch.device]:
        """All devices of the bytes."""
        return self.regions.devices

    @property
    def gpus(self) -> list[torch.device]:
        """The CUDA devices of the bytes, in order."""
        return sorted((device for device in self.devices if device.type == "cuda"), key=lambda device: device.index)

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
        columns = self._begins, self.runs.addresses, self.runs.lengths
        found = list(map(Segment, *(column[first:stop] for column in columns)))
        if found:
            address = found[0].address + begin - found[0].begin
            found[0] = Segment(begin, address, found[0].begin + found[0].length - begin)
            found[-1] = found[-1]._replace(length=end - found[-1].begin)
        return found

    def tensor_slices(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return the memory of image range `[begin, end)` as uint8 tensors, 1-D, on their devices, in image order."""
        first, stop = self._segments_covering(begin, end)
        found: list[torch.Tensor] = []
        for index, memory in enumerate(self._memories[first:stop], first):
            if memory is None:
                memory = self._memories[index] = self.runs.memory(index)
            found.append(memory)
        return self._cut(found, first, begin, end)

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

        The host hashes bytes in its own memory, those of a chunk on several devices, and all others while the
        device has no kernel: see `rfork.image.digest`.
        """
        begin, end = self.layout.chunks[chunk]
        if self.devices <= {CPU}:
            return digest_bytes(self._host_views(begin, end))
        gpu, plan = self.leaf_plan(chunk)
        hash_leaves = None if gpu is None else gpu_kernel(gpu).hash_leaves
        if gpu is None or hash_leaves is None:
            with self.reading(begin, end) as steps:
                return digest_views(end - begin, (view for views in steps for view in views))
        driver = cuda_driver()
        with driver.on_device(gpu.index), driver.streams(gpu.index).digest.as_torch_stream():
            return digest_plan(plan, gpu, hash_leaves)

    def leaf_plan(self, chunk: int) -> tuple[torch.device | None, LeafPlan]:
        """Return the GPU that has all bytes of chunk `chunk`, if one has, and how its kernel hashes them. Cached."""
        begin, end = self.layout.chunks[chunk]
        first, stop = self._segments_covering(begin, end)
        found = self._leaf_plans.get(chunk)
        if found is None:
            addresses, lengths = (column[first:stop].copy() for column in self.runs.columns)
            lengths[-1] = end - self._begins[stop - 1]
            cut = begin - self._begins[first]
            addresses[0] += cut
            lengths[0] -= cut
            devices = set(map(device_of, self.runs.storages[first:stop]))
            gpu = devices.pop() if len(devices) == 1 and devices != {CPU} else None
            found = self._leaf_plans[chunk] = gpu, leaf_plan(addresses, lengths, LEAF_BYTES)
        return found

    def manifest(self, progress: Callable[[int], None] | None = None, threads: int | None = None) -> Manifest:
        """Digest all chunks on `threads` threads.

        Default: torch's number of threads, at most 8, and at least 4 for CUDA tensors. `progress` is called
        on the calling thread after each chunk, with that chunk's size in bytes.
        """
        chunks = self.layout.chunks
        digests: list[bytes] = []
        with self.digest_pool(threads) as pool:
            for (begin, end), digest in zip(chunks, pool.map(self.digest, range(len(chunks))), strict=True):
                digests.append(digest)
                if progress is not None:
                    progress(end - begin)
        return Manifest(self.layout, tuple(digests))

    def digest_pool(self, threads: int | None = None) -> Executor:
        """Return threads that digest chunks; `threads` as for `manifest`."""
        min_threads = MIN_CUDA_DIGEST_THREADS if self.gpus else 1
        threads = threads or max(min_threads, min(torch.get_num_threads(), MAX_DIGEST_THREADS))
        return ThreadPoolExecutor(threads, thread_name_prefix="rfork-digest")

    def release(self, keep: Collection[int] = ()) -> None:
        """Return the memory to its allocators even if tensors still refer to it; they become empty.

        `keep` are addresses of storages that are left unchanged. Used before another model is built in place
        of this one: from then on, reads and writes of the image raise SourceWeightsChanged. Memory that its
        allocator cannot release this way is freed with its tensors.
        """
        self.is_released = True
        for storage in self.regions.storages:
            if storage.nbytes() and storage.data_ptr() not in keep:
                # Borrowed memory cannot be resized.
                with suppress(RuntimeError):
                    storage.resize_(0)

    def rebind(self, other: Image) -> None:
        """Use the memory of another image with the same layout. Called after `release`."""
        if other.layout.layout_id != self.layout.layout_id:
            raise ValueError(f"the other image has layout {other.layout.layout_id}, not {self.layout.layout_id}")
        self.regions, self.runs, self._begins = other.regions, other.runs, other._begins
        self._staging = other._staging
        self._memories, self._leaf_plans = other._memories, other._leaf_plans
        self.is_released = other.is_released

    def _segments_covering(self, begin: int, end: int) -> tuple[int, int]:
        """Return the runs (first, stop) that contain image range `[begin, end)`."""
        if self.is_released:
            raise SourceWeightsChanged("image memory was already released")
        size = self.layout.image_bytes
        if not 0 <= begin <= end <= size:
            raise ValueError(f"[{begin}, {end}) is not within the image's {size} bytes")
        if begin == end:
            return 0, 0
        return bisect_right(self._begins, begin) - 1, bisect_left(self._begins, end)

    def _host_views(self, begin: int, end: int) -> list[memoryview]:
        """Return the bytes of `[begin, end)`; the caller may release the views."""
        first, stop = self._segments_covering(begin, end)
        return self._cut(self.runs.host_views(first, stop), first, begin, end)

    def _cut(self, parts: list[_Part], first: int, begin: int, end: int) -> list[_Part]:
        """Cut the first and the last of these parts, one for each run from `first` on, to `[begin, end)`."""
        if parts:
            parts[-1] = parts[-1][: end - self._begins[first + len(parts) - 1]]
            parts[0] = parts[0][begin - self._begins[first] :]
        return parts

    def _steps(self, begin: int, end: int, step: int) -> Iterator[list[torch.Tensor]]:
        self._segments_covering(begin, end)  # reject a range outside the image before the first step
        lows = range(begin, max(end, begin + 1), step)  # an empty range is one empty step
        return (self.tensor_slices(low, min(low + step, end)) for low in lows)


def compute_manifest(image: Image) -> Manifest:
    """Digest a complete image; logs the duration.

    First waits for the work on this thread's current streams, which may still write the weights, and for the
    compilation of hash kernels: a source should not hash a complete image on the host.
    """
    began = time.monotonic()
    current_work(image.gpus)()
    for device in image.gpus:
        gpu_kernel(device).wait_until_ready()
    manifest = image.manifest()
    log.info(
        "weights digested",
        gigabytes=round(image.layout.image_bytes / 1e9, 3),
        seconds=round(time.monotonic() - began, 3),
        weights_id=manifest.weights_id,
    )
    return manifest


def check_writable(image: Image) -> None:
    """Raise TargetError with the tensor's name if host memory of the image is mapped read-only.

    Does nothing on systems without a list of mappings.
    """
    read_only = read_only_mappings()
    if not read_only:
        return
    addresses, lengths = (column.astype(np.uint64) for column in image.runs.columns)
    begins, ends = np.array(read_only, np.uint64).T
    mappings = np.searchsorted(ends, addresses, side="right")  # the first that ends behind each run's begin
    overlaps = np.append(begins, np.iinfo(np.uint64).max)[mappings] < addresses + lengths
    # The driver reserves the addresses of a GPU's memory in mappings without access.
    hit = next((run for run in np.flatnonzero(overlaps).tolist() if device_of(image.runs.storages[run]) == CPU), None)
    if hit is None:
        return
    offset = image._begins[hit] + max(0, int(begins[mappings[hit]]) - int(addresses[hit]))
    specs = image.layout.tensors
    name = specs[bisect_right([spec.offset for spec in specs], offset) - 1].name
    raise_read_only(name)


def raise_read_only(name: str) -> None:
    """Raise the TargetError for a tensor in read-only memory."""
    raise TargetError(
        f"tensor {name!r} is in read-only memory and cannot be filled",
        hint="clone it, map its file copy-on-write (mmap_mode='c', ACCESS_COPY), or add it to exclude=",
    )


def read_only_mappings() -> tuple[ranges.Range, ...]:
    """Return the address ranges that this process may not write; none if the system lists no mappings."""
    try:
        # In few large reads: the kernel walks the mappings again for each.
        with MAPS.open("rb", buffering=MAPS_BUFFER_BYTES) as file:
            text = file.read()
    except OSError:
        return ()
    found = [(int(begin, 16), int(end, 16)) for begin, end in _READ_ONLY_MAPPING.findall(text)]
    return ranges.normalise(found)


def first_overlap(extents: Iterable[ranges.Range], merged: tuple[ranges.Range, ...]) -> int | None:
    """Return the first address of the extents that lies within one of the merged ranges."""
    ends = [end for _, end in merged]
    for begin, end in extents:
        index = bisect_right(ends, begin)
        if index < len(merged) and merged[index][0] < end:
            return max(begin, merged[index][0])
    return None


def overlaps(
    begins: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], merged: tuple[ranges.Range, ...]
) -> npt.NDArray[np.bool_]:
    """Return for each range, as begin and length, whether it overlaps one of the normalised ranges."""
    top = np.iinfo(np.int64).max
    others = np.array([*((begin, min(end, top)) for begin, end in merged if begin < top), (top, top)], dtype=np.int64)
    following = np.searchsorted(others[:, 1], begins, side="right")
    result: npt.NDArray[np.bool_] = (others[following, 0] < begins + lengths) & (lengths > 0)
    return result


def image_sha256(image: Image) -> str:
    """Return SHA-256 over the layout_id and every byte of the image, as 64 hex digits. For people and tests.

    Transfers verify chunks by their digests. This reads all bytes again, on the host, with another hash, so
    that both would have to be wrong together.
    """
    state = hashlib.sha256(image.layout.layout_id.encode())
    for begin, end in image.layout.chunks:
        with image.readable(begin, end) as views:
            for view in views:
                state.update(view)
    return state.hexdigest()
