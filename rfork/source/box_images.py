"""Images of boxes of checkpoint tensors, for targets with other layouts. Runs on the source.

A target names the boxes that it needs. They are served by a seed of their own: boxes that are contiguous in the
instance's own tensors where they are, and others from host memory, into which they are gathered. The layout of their
image depends on the boxes only, so any instance that has them can serve the same image.

They are served while they are gathered and digested: a chunk of boxes once it is complete, and the weights that it
consists of still have the digests of the instance's manifest. Until the last chunk its image is a provisional one.

The own tensors are not referenced but found in the seed's image, which an engine may release and move. Before it does,
or changes the weights, all images of boxes are closed.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from typing import Final, NamedTuple
from uuid import uuid4

import numpy as np
import torch

from rfork.cuda.device import cuda_driver
from rfork.errors import LayoutMismatch, SourceBusy, SourceCorrupt, SourceWeightsChanged
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import ChunkState
from rfork.image.layout import Layout, Manifest, byte_extent, dtype_of
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.image.staging import allocate_host
from rfork.logs import logger
from rfork.peer.base import BOX_IDLE_S, BoxImage
from rfork.placement.box_tensors import allocate_boxes, box_dtype, gather
from rfork.placement.boxes import Box, box_map
from rfork.placement.intersection import Relocation, intersect
from rfork.placement.placement_map import PlacementMap
from rfork.placement.strided import contiguous_strides
from rfork.settings import InstanceSettings
from rfork.source.gather_order import gather_steps
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.thread_priority import SERVING_THREAD_NICE, lower_thread_priority

log = logger(__name__)

MODEL_SUFFIX: Final = "#boxes"
"""Suffix of the model's name, by which the planner knows the images of its boxes."""
CHECKS_PER_IDLE_TIME: Final = 4
REGISTRATION_TIMEOUT_S: Final = 10.0
"""Maximum time until the planner has acknowledged a new image."""


class BoxKey(NamedTuple):
    """Content of an image of boxes."""

    boxes: frozenset[Box]
    weights_id: str
    """Of the complete image that they are part of."""
    version: str


@dataclass(slots=True, eq=False)
class ServedBoxes:
    """One image of boxes, which may still be gathered."""

    used_at: float
    """When it was last requested or read."""
    copied_bytes: int = 0
    """Bytes of the boxes that are gathered into host memory; 0 until that is known."""
    opened: Future[Seed] = field(default_factory=Future)
    """Its seed, once it serves."""
    gathered: Future[None] = field(default_factory=Future)
    """Has a result once all boxes are there, and an exception if its seed was closed before."""


class OwnSlot(NamedTuple):
    """Location of an own tensor in the image of its instance."""

    offset: int
    """Bytes from the image's begin to the first element."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""

    @property
    def end(self) -> int:
        """Image offset after the last element."""
        return self.offset + byte_extent(self.shape, self.stride, self.dtype.itemsize)


class BoxImages:
    """Opens images of boxes of one instance's weights, and closes them once they are idle. Thread-safe."""

    def __init__(
        self,
        seed: Seed,
        placement_map: PlacementMap,
        tensors: Mapping[str, torch.Tensor],
        settings: InstanceSettings,
        *,
        memory_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tensors`: the own tensors of the map whose bytes are those that were loaded; only those that are part of the
        seed's image are served, as only those are verified. `memory_bytes`: maximum size of all copies.
        """
        self._seed = seed
        self._settings = settings
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._slots = _slots_in(seed.image, tensors)
        self._map = placement_map.only(self._slots, "not in the image")
        self._lock = threading.Lock()
        self._map_lock = threading.Lock()
        self._images: dict[BoxKey, ServedBoxes] = {}
        self._corrupt: tuple[int, str] | None = None
        """Generation of weights that were found changed, and the error."""
        self._closing = threading.Event()
        self._idle_check: threading.Thread | None = None

    @property
    def map_bytes(self) -> bytes:
        """Encoded placement map, without tensors that are not served. Encoded once."""
        with self._map_lock:
            return self._map_bytes

    @cached_property
    def _map_bytes(self) -> bytes:
        return self._map.to_bytes()

    def open(self, boxes: tuple[Box, ...]) -> BoxImage:
        """Begin to serve these boxes as an image, and return its identity once the planner knows it.

        Concurrent and later requests for the same boxes share the image. Raises LayoutMismatch with the name of a box
        that this instance does not have; SourceBusy if the weights are not complete, or there is no memory now;
        SourceWeightsChanged; and SourceCorrupt if an earlier gather found that the weights are not those of the
        manifest. If the gather fails later, the image is closed.
        """
        key, generation, manifest = self._key_of(boxes)
        with self._lock:
            served = self._images.get(key)
            is_new = served is None
            if served is None:
                if self._corrupt is not None and self._corrupt[0] == generation:
                    raise SourceCorrupt(self._corrupt[1])
                if self._closing.is_set():
                    raise SourceBusy("the source is draining")
                served = self._images[key] = ServedBoxes(self._clock())
            served.used_at = self._clock()
        if is_new:
            self._open_new(key, served, boxes, generation, manifest)
        box_seed = served.opened.result()
        served.used_at = self._clock()
        if self._settings.planner is not None and not box_seed.wait_registered(REGISTRATION_TIMEOUT_S):
            raise SourceBusy("the planner has not acknowledged the image of the boxes yet")
        layout = box_seed.image.layout
        return BoxImage(box_seed.identity.model, key.version, layout.layout_id, layout.image_bytes)

    def close_idle(self) -> None:
        """Close the images that had no reader for `BOX_IDLE_S` seconds. Called by a thread of this object."""
        now, idle = self._clock(), []
        with self._lock:
            for key, served in list(self._images.items()):
                if not served.gathered.done():
                    continue
                box_seed = served.opened.result()
                if box_seed.has_readers:
                    served.used_at = now
                served.used_at = max(served.used_at, box_seed.opened_at or served.used_at)
                if now - served.used_at >= BOX_IDLE_S:
                    idle.append(self._images.pop(key))
        for served in idle:
            self._close_image(served)

    def fence(self) -> None:
        """Close all images, because the weights are about to change or to be released. Later ones may be opened.

        Returns once no reader and no part of an image uses the weights' memory, but for a gather, which holds
        `Seed.long_read` and ends soon.
        """
        with self._lock:
            images, self._images = list(self._images.values()), {}
        opened = [served for served in images if served.opened.exception() is None]
        if not opened:
            return
        with ThreadPoolExecutor(len(opened), thread_name_prefix="rfork-boxes") as pool:
            list(pool.map(lambda served: served.opened.result().suspend(), opened))
        threading.Thread(target=self._close_gathered, args=(opened, 0.0), name="rfork-boxes", daemon=True).start()

    def close(self, drain_s: float = 0.0) -> None:
        """Close all images, after their readers have finished, or `drain_s` seconds. Further ones are refused."""
        self._closing.set()
        with self._lock:
            images, self._images = list(self._images.values()), {}
            idle_check = self._idle_check
        self._close_gathered([served for served in images if served.opened.exception() is None], drain_s)
        if idle_check is not None:
            idle_check.join()

    def _key_of(self, boxes: tuple[Box, ...]) -> tuple[BoxKey, int, Manifest]:
        """Return the content of an image of boxes, and the generation and manifest of the weights."""
        seed = self._seed
        if not boxes:
            raise LayoutMismatch("the request names no box")
        if seed.draining or self._closing.is_set():
            raise SourceBusy("the source is draining")
        try:
            generation, manifest = seed.manifest_snapshot()
        except SourceWeightsChanged as error:
            raise SourceBusy(str(error)) from None
        version = seed.version
        if version is None:
            raise LayoutMismatch("the weights of this instance have no version")
        return BoxKey(frozenset(boxes), manifest.weights_id, version), generation, manifest

    def _reserve(self, served: ServedBoxes, copied_bytes: int) -> None:
        """Count the memory of copies, or raise SourceBusy if there is none now."""
        with self._lock:
            used = sum(each.copied_bytes for each in self._images.values())
            if used + copied_bytes > self._memory_bytes:
                raise SourceBusy(
                    f"boxes of {copied_bytes} bytes exceed the memory for copies:"
                    f" {used} of {self._memory_bytes} bytes (RFORK_MAX_BOX_BYTES) are used"
                )
            served.copied_bytes = copied_bytes

    def _open_new(
        self, key: BoxKey, served: ServedBoxes, boxes: Sequence[Box], generation: int, manifest: Manifest
    ) -> None:
        """Serve an image without boxes yet, and gather them on a thread."""
        try:
            copies = self._copies_of(boxes)
            in_place = self._in_place(boxes, copies)
            copied = [box for box in boxes if box.name not in in_place]
            self._reserve(served, sum(box.byte_count for box in copied))
            with self._seed.local_read(generation) as image:
                tensors = _views_of(image, in_place)
            box_seed = self._serve(key, image_from_tensors(tensors | _allocated(copied)))
            del tensors, image
        except BaseException as error:
            # The error and its frames refer to each other, and so to the memory of the boxes.
            traceback.clear_frames(error.__traceback__)
            self._forget(key, served)
            served.opened.set_exception(error)
            log.info("boxes not served", model=self._seed.identity.model, reason=str(error))
            raise
        served.opened.set_result(box_seed)
        gather_all = partial(self._gather_all, key, served, copies, frozenset(in_place), generation, manifest)
        threading.Thread(target=gather_all, name="rfork-gather", daemon=True).start()

    def _forget(self, key: BoxKey, served: ServedBoxes) -> None:
        """Do not return an image to later requests."""
        with self._lock:
            if self._images.get(key) is served:
                del self._images[key]

    def _gather_all(
        self,
        key: BoxKey,
        served: ServedBoxes,
        copies: Relocation,
        in_place: frozenset[str],
        generation: int,
        manifest: Manifest,
    ) -> None:
        """Fill an image that is served already; close it if that fails. Runs on a thread of its own."""
        began, model = time.monotonic(), self._seed.identity.model
        lower_thread_priority(SERVING_THREAD_NICE)
        box_seed = served.opened.result()
        try:
            with self._seed.long_read(generation):
                self._gather(box_seed, copies, in_place, generation, manifest)
        except BaseException as error:
            # The weights' memory may be released now: nothing must keep it.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, SourceCorrupt):
                with self._lock:
                    self._corrupt = generation, str(error)
            self._forget(key, served)
            log.info("boxes no longer served", model=model, reason=f"{type(error).__name__}: {error}")
            self._close_image(served)
            served.gathered.set_exception(error)
            return
        served.gathered.set_result(None)
        log.info(
            "boxes gathered",
            model=box_seed.identity.model,
            layout=box_seed.image.layout.layout_id,
            gigabytes=round(box_seed.image.layout.image_bytes / 1e9, 3),
            gigabytes_copied=round(served.copied_bytes / 1e9, 3),
            seconds=round(time.monotonic() - began, 3),
        )

    def _copies_of(self, boxes: Sequence[Box]) -> Relocation:
        """Return the copies that gather boxes. Raises LayoutMismatch with the name of a box that is not here."""
        copies = intersect([self._map], box_map(boxes))
        if copies.uncovered:
            name, reason = copies.uncovered[0]
            raise LayoutMismatch(f"this instance does not have {name}: {reason}")
        return copies

    def _in_place(self, boxes: Sequence[Box], copies: Relocation) -> dict[str, OwnSlot]:
        """Return the locations, in the own image, of the boxes that are contiguous there, by name."""
        box_of = {box.name: box for box in boxes}
        found: dict[str, OwnSlot] = {}
        for copy in copies:
            box, slot = box_of[copy.target_tensor], self._slots[copy.source_tensor]
            if copy.byte_count == box.byte_count and copy.copy_type.is_contiguous:
                offset = slot.offset + copy.source_offset
                found[box.name] = OwnSlot(offset, box_dtype(box), box.sizes, contiguous_strides(box.sizes))
        return found

    def _gather(
        self,
        box_seed: Seed,
        copies: Relocation,
        in_place: frozenset[str],
        generation: int,
        manifest: Manifest,
    ) -> None:
        """Copy, verify and serve all boxes of an image; those `in_place` are not copied. Called within
        `Seed.long_read`.
        """
        image, box_image = self._seed.image, box_seed.image
        tensors = _views_of(box_image, _slots_of(box_image.layout))
        sources = [_views_of(image, {name: self._slots[name] for name in set(copies.source_tensors)})]
        read, written = self._spans_of(copies, box_image)
        steps = gather_steps(read, written, image.layout.chunks, box_image.layout.chunks)
        names = copies.target_tensors
        with _on_copy_streams(image.gpus), image.digest_pool() as pool:
            for step in steps:
                self._acquire(sum(written[index][1] - written[index][0] for index in step.copies), generation)
                gather(copies.part([each for each in step.copies if names[each] not in in_place]), sources, tensors)
                self._verify(image, pool, manifest, step.verified, generation)
                for chunk, digest in zip(step.served, pool.map(box_image.digest, step.served), strict=True):
                    box_seed.chunk_state.mark_verified(chunk, digest)
        self._check(generation)
        digests = box_seed.chunk_state.digests
        box_seed.set_manifest(Manifest(box_image.layout, tuple(digests[chunk] for chunk in range(len(digests)))))
        box_seed.serve()

    def _spans_of(self, copies: Relocation, box_image: Image) -> tuple[list[Range], list[Range]]:
        """Return the byte range of each copy in the own image, and in the image of the boxes."""
        offsets = {spec.name: spec.offset for spec in box_image.layout.tensors}
        read: list[Range] = []
        written: list[Range] = []
        for copy in copies:
            shape, itemsize = copy.copy_type.shape, copy.copy_type.itemsize
            begin = self._slots[copy.source_tensor].offset + copy.source_offset
            read.append((begin, begin + _extent(shape, copy.copy_type.source_strides, itemsize)))
            begin = offsets[copy.target_tensor] + copy.target_offset
            written.append((begin, begin + _extent(shape, copy.copy_type.target_strides, itemsize)))
        return read, written

    def _verify(self, image: Image, pool: Executor, manifest: Manifest, chunks: Sequence[int], generation: int) -> None:
        """Raise SourceCorrupt unless these chunks still have the digests of the manifest."""
        for chunk, digest in zip(chunks, pool.map(image.digest, chunks), strict=True):
            if digest != manifest.digests[chunk]:
                self._check(generation)
                begin, end = image.layout.chunks[chunk]
                name = next(name for name, slot in self._slots.items() if slot.offset < end and slot.end > begin)
                raise SourceCorrupt(
                    f"the weights were changed without notice: chunk {chunk} of the image, with {name},"
                    " does not have the digest of the manifest"
                )

    def _acquire(self, byte_count: int, generation: int) -> None:
        """Wait until bytes may be copied without delaying the engine's steps."""
        self._check(generation)
        while byte_count > 0:
            byte_count -= self._seed.acquire_copy(byte_count)
            self._check(generation)

    def _check(self, generation: int) -> None:
        self._seed.check_generation(generation)
        if self._closing.is_set():
            raise SourceBusy("the source is draining")

    def _serve(self, key: BoxKey, image: Image) -> Seed:
        """Return a seed of an image without chunks yet."""
        layout, chunk_state = image.layout, ChunkState(image.layout.chunks)
        # The same for all sources of these boxes, so that a target may read from several.
        chunk_state.set_provisional_id(_digest_of(key.version, layout.layout_id))
        identity = InstanceIdentity(
            f"{self._seed.identity.model}{MODEL_SUFFIX}", version=key.version, replica=f"boxes-{uuid4().hex[:12]}"
        )
        connections = Connections.of(self._settings)
        box_seed = Seed(
            image,
            identity,
            self._settings,
            connections,
            chunk_state=chunk_state,
            limits_of=self._seed,
            is_producer=True,
        )
        try:
            box_seed.start()
        except BaseException:
            box_seed.image = Image.without_memory(image.layout)  # objects of the seed refer to each other
            raise
        with self._lock:
            if self._idle_check is None and not self._closing.is_set():
                self._idle_check = threading.Thread(target=self._run_idle_check, name="rfork-boxes", daemon=True)
                self._idle_check.start()
        return box_seed

    def _run_idle_check(self) -> None:
        while not self._closing.wait(BOX_IDLE_S / CHECKS_PER_IDLE_TIME):
            try:
                self.close_idle()
            except Exception:  # a bug: images that become idle later must be closed nevertheless
                log.exception("failed to close idle boxes")

    def _close_gathered(self, images: Sequence[ServedBoxes], drain_s: float) -> None:
        """Close opened images, after their readers have finished, or `drain_s` seconds."""
        until = time.monotonic() + drain_s
        for served in images:
            # What is still gathered ends soon, as it checks the generation and `_closing`, and is closed then.
            if served.gathered.exception() is None:
                self._close_image(served, max(0.0, until - time.monotonic()))

    def _close_image(self, served: ServedBoxes, drain_s: float = 0.0) -> None:
        """Close an opened image and free its memory."""
        box_seed = served.opened.result()
        if drain_s > 0:
            box_seed.drain(drain_s)
        box_seed.suspend()  # frees the memory now: it may take long until Python collects the seed
        box_seed.close()
        log.info("boxes closed", model=box_seed.identity.model, layout=box_seed.image.layout.layout_id)


def _slots_in(image: Image, tensors: Mapping[str, torch.Tensor]) -> dict[str, OwnSlot]:
    """Return the locations of tensors in an image, without those that are not part of it or have no elements."""
    addresses, lengths = image.regions.columns
    order = np.argsort(addresses, kind="stable")
    begins: list[int] = addresses[order].tolist()
    ends: list[int] = (addresses + lengths)[order].tolist()
    offsets: list[int] = (np.cumsum(lengths) - lengths)[order].tolist()
    found: dict[str, OwnSlot] = {}
    for name, tensor in tensors.items():
        begin = tensor.data_ptr()
        region = bisect_right(begins, begin) - 1
        length = byte_extent(tensor.shape, tensor.stride(), tensor.itemsize)
        if length and region >= 0 and begin + length <= ends[region]:
            offset = offsets[region] + begin - begins[region]
            found[name] = OwnSlot(offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
    return found


def _slots_of(layout: Layout) -> dict[str, OwnSlot]:
    """Return the locations of an image's tensors."""
    return {spec.name: OwnSlot(spec.offset, dtype_of(spec), spec.shape, spec.stride) for spec in layout.tensors}


def _views_of(image: Image, slots: Mapping[str, OwnSlot]) -> dict[str, torch.Tensor]:
    """Return the tensors at locations in an image."""
    regions = image.regions
    offsets = (np.cumsum(regions.columns[1]) - regions.columns[1]).tolist()
    views: dict[str, torch.Tensor] = {}
    for name, slot in slots.items():
        index = bisect_right(offsets, slot.offset) - 1
        storage = regions.storages[index]
        begin = regions.addresses[index] - storage.data_ptr() + slot.offset - offsets[index]
        tensor = torch.empty(0, dtype=slot.dtype, device=storage.device)
        with torch.no_grad():
            views[name] = tensor.set_(storage, begin // slot.dtype.itemsize, slot.shape, slot.stride)
    return views


def _allocated(boxes: Sequence[Box]) -> dict[str, torch.Tensor]:
    try:
        return allocate_boxes(boxes, allocate_host)
    except ValueError as error:
        raise LayoutMismatch(str(error)) from None
    except (MemoryError, RuntimeError) as error:
        raise SourceBusy(f"no host memory for the boxes: {error}") from None


def _extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from the begin of a region to its end; `strides` in bytes."""
    return sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + itemsize


def _digest_of(*parts: str) -> str:
    """Return 32 hexadecimal digits that identify texts."""
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _on_copy_streams(gpus: Sequence[torch.device]) -> Iterator[None]:
    """Run this thread's torch operations on rfork's own streams, which do not wait for the engine's work."""
    with contextlib.ExitStack() as stack:
        for device in gpus:
            driver = cuda_driver()
            stack.enter_context(driver.on_device(device.index))
            stack.enter_context(driver.streams(device.index).to_host.as_torch_stream())
        yield
