"""Images of boxes of checkpoint tensors, for targets with other layouts. Runs on the source.

A target names the boxes that it needs. They are gathered from the instance's own tensors into host memory, and served
by a seed of their own. Their layout depends on the boxes only, so any instance that has them can serve the same image.

The own tensors are not referenced but found in the seed's image, which an engine may release and move.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Final, NamedTuple
from uuid import uuid4

import numpy as np
import torch

from rfork.cuda.device import cuda_driver
from rfork.errors import LayoutMismatch, SourceBusy, SourceCorrupt, SourceWeightsChanged
from rfork.image.capture import image_from_tensors
from rfork.image.layout import Manifest, byte_extent
from rfork.image.memory import Image
from rfork.image.staging import allocate_host
from rfork.logs import logger
from rfork.peer.base import BoxImage
from rfork.placement.box_tensors import allocate_boxes, gather
from rfork.placement.boxes import Box, box_map
from rfork.placement.intersection import Relocation, intersect
from rfork.placement.placement_map import PlacementMap
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.thread_priority import SERVING_THREAD_NICE, lower_thread_priority

log = logger(__name__)

MODEL_SUFFIX: Final = "#boxes"
"""Suffix of the model's name, by which the planner knows the images of its boxes."""
BOX_IDLE_S: Final = 60.0
"""Time without a reader after which an image is closed."""
CHECKS_PER_IDLE_TIME: Final = 4
REGISTRATION_TIMEOUT_S: Final = 10.0
"""Maximum time until the planner has acknowledged a new image."""
STEP_BYTES: Final = 256 << 20
"""Bytes gathered between two checks whether the weights are about to change."""


class BoxKey(NamedTuple):
    """Content of an image of boxes."""

    boxes: frozenset[Box]
    weights_id: str
    """Of the complete image that they are part of."""
    version: str


@dataclass(slots=True, eq=False)
class ServedBoxes:
    """One image of boxes, which may still be gathered."""

    byte_count: int
    used_at: float
    """When it was last requested or read."""
    opened: Future[Seed]


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
        seed's image are served, as only those are verified. `memory_bytes`: maximum size of all images.
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
        """Serve these boxes as an image, and return its identity once the planner knows it.

        Concurrent and later requests for the same boxes share the image. Raises LayoutMismatch with the name of a box
        that this instance does not have; SourceBusy if the weights are not complete, or there is no memory now;
        SourceWeightsChanged; and SourceCorrupt if the weights are not those of the manifest.
        """
        key, generation, manifest = self._key_of(boxes)
        with self._lock:
            served = self._images.get(key)
            is_new = served is None
            if served is None:
                served = self._images[key] = self._reserve(boxes)
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
                if not served.opened.done():
                    continue
                box_seed = served.opened.result()
                if box_seed.has_readers:
                    served.used_at = now
                served.used_at = max(served.used_at, box_seed.opened_at or served.used_at)
                if now - served.used_at >= BOX_IDLE_S:
                    idle.append(self._images.pop(key))
        for served in idle:
            self._close_image(served)

    def close(self, drain_s: float = 0.0) -> None:
        """Close all images, after their readers have finished, or `drain_s` seconds. Further ones are refused."""
        until = time.monotonic() + drain_s
        self._closing.set()
        with self._lock:
            images, self._images = list(self._images.values()), {}
            idle_check = self._idle_check
        for served in images:
            # What is still gathered ends soon, as it checks `_closing`.
            if served.opened.exception() is None:
                self._close_image(served, max(0.0, until - time.monotonic()))
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

    def _reserve(self, boxes: Sequence[Box]) -> ServedBoxes:
        """Return a new image of these boxes, still to be gathered. The lock must be held."""
        if self._closing.is_set():
            raise SourceBusy("the source is draining")
        byte_count = sum(box.byte_count for box in boxes)
        used = sum(served.byte_count for served in self._images.values())
        if used + byte_count > self._memory_bytes:
            raise SourceBusy(
                f"boxes of {byte_count} bytes exceed the memory for copies:"
                f" {used} of {self._memory_bytes} bytes (RFORK_MAX_BOX_BYTES) are used"
            )
        return ServedBoxes(byte_count, self._clock(), Future())

    def _open_new(
        self, key: BoxKey, served: ServedBoxes, boxes: Sequence[Box], generation: int, manifest: Manifest
    ) -> None:
        began = time.monotonic()
        try:
            box_seed = self._opened(key, boxes, generation, manifest)
        except BaseException as error:
            # The error and its frames refer to each other, and so to the memory of the boxes.
            traceback.clear_frames(error.__traceback__)
            with self._lock:
                self._images.pop(key, None)
            served.opened.set_exception(error)
            log.info("boxes not served", model=self._seed.identity.model, reason=str(error))
            raise
        log.info(
            "boxes served",
            model=box_seed.identity.model,
            layout=box_seed.image.layout.layout_id,
            boxes=len(boxes),
            gigabytes=round(served.byte_count / 1e9, 3),
            seconds=round(time.monotonic() - began, 3),
        )
        served.opened.set_result(box_seed)

    def _opened(self, key: BoxKey, boxes: Sequence[Box], generation: int, manifest: Manifest) -> Seed:
        copies = self._copies_of(boxes)
        # A thread of its own, whose priority stays low. Those of the new seed are not started by it.
        with ThreadPoolExecutor(
            1, "rfork-gather", initializer=lower_thread_priority, initargs=(SERVING_THREAD_NICE,)
        ) as thread:
            image, box_manifest = thread.submit(self._gather, boxes, copies, generation, manifest).result()
        return self._serve(key, image, box_manifest)

    def _copies_of(self, boxes: Sequence[Box]) -> Relocation:
        """Return the copies that gather boxes. Raises LayoutMismatch with the name of a box that is not here."""
        copies = intersect([self._map], box_map(boxes))
        if copies.uncovered:
            name, reason = copies.uncovered[0]
            raise LayoutMismatch(f"this instance does not have {name}: {reason}")
        return copies

    def _gather(
        self, boxes: Sequence[Box], copies: Relocation, generation: int, manifest: Manifest
    ) -> tuple[Image, Manifest]:
        """Return an image of boxes in new host memory, all from one generation of the weights, and its manifest."""
        tensors = _allocated(boxes)
        with self._seed.long_read(generation):
            try:
                self._copy_verified(copies, tensors, generation, manifest)
            except BaseException as error:
                # The weights' memory may be released now: nothing must keep it.
                traceback.clear_frames(error.__traceback__)
                raise
        box_image = image_from_tensors(tensors)
        return box_image, box_image.manifest()

    def _copy_verified(
        self, copies: Relocation, tensors: Mapping[str, torch.Tensor], generation: int, manifest: Manifest
    ) -> None:
        """Copy elements of the weights to tensors. Called within `Seed.long_read`."""
        image = self._seed.image
        names = list(dict.fromkeys(copies.source_tensors))
        sources = [_views_of(image, {name: self._slots[name] for name in names})]
        with _on_copy_streams(image.gpus):
            for part in _steps(copies):
                self._check(generation)
                gather(part, sources, tensors)
        # Afterwards: this also finds what was changed without notice during the copies.
        self._verify(image, manifest, names, generation)

    def _verify(self, image: Image, manifest: Manifest, names: Sequence[str], generation: int) -> None:
        """Raise SourceCorrupt unless the chunks of these own tensors still have the digests of the manifest."""
        name_of: dict[int, str] = {}
        for name in names:
            slot = self._slots[name]
            for chunk in image.layout.chunks.covering(slot.offset, slot.end):
                name_of.setdefault(chunk, name)
        chunks = sorted(name_of)
        for chunk, digest in zip(chunks, image.digests(chunks), strict=True):
            self._check(generation)
            if digest != manifest.digests[chunk]:
                raise SourceCorrupt(
                    f"the weights were changed without notice: chunk {chunk} of the image, with {name_of[chunk]},"
                    " does not have the digest of the manifest"
                )

    def _check(self, generation: int) -> None:
        self._seed.check_generation(generation)
        if self._closing.is_set():
            raise SourceBusy("the source is draining")

    def _serve(self, key: BoxKey, image: Image, manifest: Manifest) -> Seed:
        identity = InstanceIdentity(
            f"{self._seed.identity.model}{MODEL_SUFFIX}", version=key.version, replica=f"boxes-{uuid4().hex[:12]}"
        )
        connections = Connections.of(self._settings)
        box_seed = Seed(image, identity, self._settings, connections, manifest=manifest, limits_of=self._seed)
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


def _steps(copies: Relocation) -> Iterator[Relocation]:
    """Divide copies into steps of about `STEP_BYTES` bytes."""
    begin = size = 0
    for index, copy_type in enumerate(copies.copy_types, 1):
        size += copy_type.itemsize * prod(copy_type.shape)
        if size >= STEP_BYTES or index == len(copies):
            part = slice(begin, index)
            yield replace(
                copies,
                sources=copies.sources[part],
                source_tensors=copies.source_tensors[part],
                source_offsets=copies.source_offsets[part],
                target_tensors=copies.target_tensors[part],
                target_offsets=copies.target_offsets[part],
                copy_types=copies.copy_types[part],
            )
            begin, size = index, 0


@contextlib.contextmanager
def _on_copy_streams(gpus: Sequence[torch.device]) -> Iterator[None]:
    """Run this thread's torch operations on rfork's own streams, which do not wait for the engine's work."""
    with contextlib.ExitStack() as stack:
        for device in gpus:
            driver = cuda_driver()
            stack.enter_context(driver.on_device(device.index))
            stack.enter_context(driver.streams(device.index).to_host.as_torch_stream())
        yield
