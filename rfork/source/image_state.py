"""What an instance holds, and what it says of it to whoever wants to read. Runs on the source."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from rfork.errors import LayoutMismatch
from rfork.image import ranges
from rfork.image.chunk_state import ChunkState
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.peer.base import Progress, StorageActivity
from rfork.schema.types import InstanceState
from rfork.source.inflight_reads import InflightReads

log = logger(__name__)

INFLIGHT_GRACE_S = 0.1
"""What a reader gets to take the slice it asked for, once the bytes are about to change."""

VersionOf = Callable[[Manifest], str | None]
"""Names complete weights, given their manifest."""

NOTIFY_INTERVAL_S = 1.0
"""Readers hear at once of storage that advanced by so much since they were told, else with other news."""


class ImageState:
    """One image, its board, its manifest and its generation: thread-safe, and told on each change.

    `manifest` is None until it is known (`set_manifest`); until then chunks are given under the digests that
    the board knows. Implements the puller's `ServingState`.
    """

    def __init__(self, image: Image, chunk_state: ChunkState | None, manifest: Manifest | None) -> None:
        """Without a board every chunk is held."""
        self.image = image
        self.chunk_state = chunk_state if chunk_state is not None else ChunkState.full(image.layout.chunks)
        self.generation = 0
        self.version: str | None = None
        """Of the weights that are served; changed only while nothing is."""
        self._updates_made = 0
        self._manifest = manifest
        self._complete_weights_id = manifest.weights_id if manifest is not None else None
        """Digest of the last complete weights; kept while they change."""
        self._state: InstanceState = "serving" if self.chunk_state.complete and manifest else "loading"
        self._read_at: Callable[[], float] | None = None
        self._relayed = False
        self._notified_at = 0.0
        self._inflight_reads = InflightReads()
        self._updates = threading.Lock()
        self._digesting = threading.Lock()  # held while the memory is read without a lease
        self._suspended = False
        self._changing = threading.RLock()  # what is held and its generation, as those who change them see it
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def notify_planner(self) -> None:
        """Called after each change that the planner should hear of at once."""

    @property
    def manifest(self) -> Manifest | None:
        """What the image holds; None while a relay has not learnt it."""
        return self._manifest

    @property
    def suspended(self) -> bool:
        """Whether its memory is put away, or about to be."""
        return self._suspended

    @property
    def draining(self) -> bool:
        """Whether it takes no new readers."""
        return self._state == "draining"

    def set_manifest(self, manifest: Manifest) -> None:
        """A relay learnt what its image must hold: from now on it can give what it has verified."""
        if manifest.layout.layout_id != self.image.layout.layout_id:
            raise LayoutMismatch("the manifest is of another layout than the image")
        self._manifest = manifest
        self._complete_weights_id = manifest.weights_id
        self._notify()
        self.notify_planner()

    def invalidate(self, chunks: Sequence[int]) -> None:
        """These chunks were not what this image must hold: whoever read them is told by a new generation.

        As `fence`, it waits for the reads under way: the chunks may be written to afterwards.
        """
        with self._changing:
            self.generation += 1
            self.chunk_state.invalidate(chunks)
        self._disconnect_readers()

    def report_storage_activity(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        """Tell the readers that this instance, or (`relayed`) whom it waits for, reads from storage now.

        `last_storage_activity_at` says when that last gave something, on `time.monotonic()`'s clock; None: nobody reads.
        """
        changed = (read_at is None, relayed) != (self._read_at is None, self._relayed)
        self._read_at, self._relayed = read_at, relayed
        at = read_at() if read_at is not None else self._notified_at
        if changed or at - self._notified_at >= NOTIFY_INTERVAL_S:
            self._notified_at = at
            self._notify()

    def serve(self) -> None:
        """The image is whole and the engine is ready: be a seed; one that drains goes on draining."""
        self._set_state("serving")
        self._read_at = None
        self._notify()
        self.notify_planner()

    def publish(self, generation: int | None = None, version: VersionOf | None = None) -> None:
        """The image is whole and may hold other weights than before: digest it, then be a seed.

        Unless it is fenced meanwhile: then the bytes may have changed under the digest; or suspended.
        `generation` is the one in which it became whole: that there was no fence since is then sure.
        `version` names the weights; None: they are those of before.
        """
        with self._digesting:
            generation = self.generation if generation is None else generation
            if generation != self.generation:
                log.warning("not resealed: it was fenced again", generation=self.generation)
                return
            if self._suspended:
                log.warning("not resealed: it is suspended", generation=generation)
                return
            manifest = compute_manifest(self.image)
        with self._changing:
            if self.generation != generation:
                log.warning("not resealed: it was fenced again meanwhile", generation=self.generation)
                return
            if version is not None:
                self.version = version(manifest)
            self.set_manifest(manifest)
            for index, digest in enumerate(manifest.digests):
                self.chunk_state.mark_verified(index, digest)
            self.serve()

    def fence(self) -> None:
        """The weights are about to change: give nothing, and cut whoever reads the old ones.

        Returns once no thread of an exporter reads the image any more; a reader that does not take what it
        asked for is cut for that. One-sided transports (transfer_engine) read without this process: their
        channels end and their connections are cut, and what still comes over (RDMA) is found out by its
        digest. `publish` gives the weights again; `updating` does both.
        """
        with self._changing:
            self._clear()
        self._disconnect_readers()

    def _clear(self) -> None:
        """Hold nothing any more; the caller holds `_changing`."""
        self.generation += 1
        self._manifest = None
        self._set_state("loading")
        self.chunk_state.clear()

    @contextlib.contextmanager
    def updating(self, version: str | None = None) -> Iterator[None]:
        """Change the weights in place inside the block: fences before it, and reseals after it.

        `version` names the new weights; without it they get a version that no other weights have. Updates of
        several threads take turns; within one block, do not begin another. When the block raises, the weights
        may be anything: the seed stays fenced, until the next update or `publish`.
        """
        with self._updates:
            self.fence()
            self._updates_made += 1
            choose = self.version_after_update(version, self._updates_made)
            yield
            self.publish(version=choose)

    def version_after_update(self, stated: str | None, count: int) -> VersionOf:
        """Return what names the weights that update number `count` leaves; `stated`: as its caller did."""
        return lambda _: stated

    def _disconnect_readers(self) -> None:
        """Those of the generation before: tell them, end their channels, and wait for what they take now."""
        self._notify()  # first: a reader whose connection is cut before it has heard blames the source
        self.notify_planner()
        self._close_channels()
        if cut := self._inflight_reads.drain(INFLIGHT_GRACE_S):
            log.info("readers cut, as the bytes are about to change", readers=cut)

    def _close_channels(self) -> None:
        """Called when the bytes are about to change: nobody may read them without asking from now on."""

    def progress_since(self, reported: tuple[ranges.Range, ...]) -> Progress:
        """See `rfork.peer.servicer.PeerBackend.progress_since`."""
        manifest = self._manifest
        if manifest is not None:
            chunks = ranges.subtract(self.chunk_state.verified, reported)
            return Progress(
                chunks,
                self.draining,
                weights_id=manifest.weights_id,
                storage_activity=self._storage_activity(),
                rate=self._advised_rate(),
            )
        provisional_id, digests = self.chunk_state.provisional_state
        chunks = ranges.subtract(ranges.from_indices(digests), reported) if provisional_id is not None else ()
        new_digests = tuple(digests[index] for index in ranges.indices(chunks))
        return Progress(
            chunks,
            self.draining,
            new_digests,
            provisional_id,
            storage_activity=self._storage_activity(),
            rate=self._advised_rate(),
        )

    def _advised_rate(self) -> int | None:
        """What a reader is asked to keep to by itself, in bytes a second."""
        return None

    def _storage_activity(self) -> StorageActivity | None:
        read_at = self._read_at
        if read_at is None:
            return None
        return StorageActivity(max(0.0, time.monotonic() - read_at()), self._relayed)

    def _set_state(self, state: InstanceState) -> None:
        # Whoever drains is about to go, whatever becomes of its weights until then.
        if self._state != "draining" and not (self._suspended and state == "serving"):
            self._state = state

    def on_change(self, listener: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Call `listener` after each change of board, manifest, state or readers, on any thread."""

        @contextlib.contextmanager
        def subscribed() -> Iterator[None]:
            with self._lock:
                self._listeners.append(listener)
            try:
                yield
            finally:
                with self._lock:
                    self._listeners.remove(listener)

        return subscribed()

    def _has_listeners(self) -> bool:
        """Whether anybody listens for changes: each reader that has a channel does."""
        with self._lock:
            return bool(self._listeners)

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


def compute_manifest(image: Image) -> Manifest:
    """Digest an image that is whole, once no kernel writes it any more; logs how long it took."""
    began = time.monotonic()
    for device in image.devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    manifest = image.manifest()
    log.info(
        "digested",
        gigabytes=round(image.layout.image_bytes / 1e9, 3),
        seconds=round(time.monotonic() - began, 3),
        weights_id=manifest.weights_id,
    )
    return manifest
