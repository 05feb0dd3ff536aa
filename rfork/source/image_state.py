"""State of the served image, and progress sent to readers. Runs on the source."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from rfork.image import ranges
from rfork.image.chunk_state import ChunkState
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.peer.base import Progress, StorageActivity
from rfork.source.channels import InflightReads
from rfork.source.served_image import ServedImage, VersionOf

log = logger(__name__)

INFLIGHT_GRACE_S = 0.1
"""Time that a reader gets to receive its current slice before the bytes change."""

NOTIFY_INTERVAL_S = 1.0
"""Readers are notified immediately if storage advanced by this much since the last notification, otherwise
with other changes.
"""


class ImageState:
    """One image with its chunk state, manifest and generation: thread-safe, and notified of each change.

    `manifest` is None until it is known (`set_manifest`); until then chunks are served under the digests of
    the chunk state. Implements the receiver's `ServingState`.
    """

    def __init__(self, image: Image, served: ServedImage) -> None:
        self.image = image
        self._served = served
        self._updates_made = 0
        self._read_at: Callable[[], float] | None = None
        self._relayed = False
        self._notified_at = 0.0
        self._inflight_reads = InflightReads()
        self._updates = threading.Lock()
        self._digesting = threading.Lock()  # acquired while the memory is read without a lease
        self._changing = threading.RLock()  # verified chunks and generation, consistent for those who change them
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def notify_planner(self) -> None:
        """Called after each change that the planner should know immediately."""

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the image; None in a relay that does not know it yet."""
        return self._served.manifest

    @property
    def chunk_state(self) -> ChunkState:
        """Verified chunks of the image."""
        return self._served.chunk_state

    @property
    def generation(self) -> int:
        """Number of the generation: increased whenever the bytes change."""
        return self._served.generation

    @property
    def version(self) -> str | None:
        """Version of the served weights; changes only while nothing is served."""
        return self._served.version

    @version.setter
    def version(self, version: str | None) -> None:
        self._served.version = version

    @property
    def suspended(self) -> bool:
        """True if its memory is released, or about to be."""
        return self._served.suspended

    @property
    def draining(self) -> bool:
        """True if it accepts no new readers."""
        return self._served.draining

    def set_manifest(self, manifest: Manifest) -> None:
        """Set the manifest of a relay's image, which can serve its verified chunks from now on."""
        self._served.set_manifest(manifest)
        self._notify()
        self.notify_planner()

    def invalidate(self, chunks: Sequence[int]) -> None:
        """Mark chunks as wrong: a new generation notifies readers that have read them.

        Like `fence`, it waits for running reads: the chunks may be written afterwards.
        """
        with self._changing:
            self._served.invalidate(chunks)
        self._disconnect_readers()

    def report_storage_activity(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        """Notify readers that this instance, or (`relayed`) its upstream, is reading from storage.

        `read_at` is when storage last delivered bytes, on `time.monotonic()`'s clock; None:
        storage is not read.
        """
        changed = (read_at is None, relayed) != (self._read_at is None, self._relayed)
        self._read_at, self._relayed = read_at, relayed
        at = read_at() if read_at is not None else self._notified_at
        if changed or at - self._notified_at >= NOTIFY_INTERVAL_S:
            self._notified_at = at
            self._notify()

    def serve(self) -> None:
        """Become a seed: the image is complete and the engine is ready; a draining instance keeps draining."""
        self._served.serve()
        self._notify_serving()

    def publish(self, generation: int | None = None, version: VersionOf | None = None) -> None:
        """Digest a complete image whose weights may have changed, then become a seed.

        Has no effect if it is fenced meanwhile, since the bytes may have changed under the digest, or if
        suspended. `generation` is the one in which the image became complete, which rules out fences since
        then. `version` names the weights; None: they are unchanged.
        """
        with self._digesting:
            generation = self.generation if generation is None else generation
            if generation != self.generation:
                log.warning("weights not served yet: they are changing again", generation=self.generation)
                return
            if self.suspended:
                log.warning("weights not served yet: they are suspended", generation=generation)
                return
            manifest = compute_manifest(self.image)
        with self._changing:
            if not self._served.publish(manifest, generation, version):
                log.warning("weights not served yet: they changed while they were digested", generation=self.generation)
                return
            self._notify_serving()

    def _notify_serving(self) -> None:
        self._read_at = None
        self._notify()
        self.notify_planner()

    def fence(self) -> None:
        """Stop serving because the weights are about to change, and disconnect readers of the old ones.

        Returns once no exporter thread reads the image; a reader that does not receive its data is
        disconnected for that. One-sided transports (transfer_engine) read without this process: their
        channels end and their connections are closed, and bytes that still arrive (RDMA) are detected by
        their digest. `publish` serves the weights again; `updating` does both.
        """
        with self._changing:
            self._served.clear()
        self._disconnect_readers()

    @contextlib.contextmanager
    def updating(self, version: str | None = None) -> Iterator[None]:
        """Change the weights in place inside the block: fences before it, and publishes after it.

        `version` names the new weights; by default they get a version that no other weights have. Concurrent
        updates of several threads are serialized; do not nest blocks. If the block raises, the weights are
        undefined: the seed stays fenced until the next update or `publish`.
        """
        with self._updates:
            self.fence()
            self._updates_made += 1
            choose = self.version_after_update(version, self._updates_made)
            yield
            self.publish(version=choose)

    def version_after_update(self, stated: str | None, count: int) -> VersionOf:
        """Return the function that names the weights after update number `count`; `stated` is the caller's
        version.
        """
        return lambda _: stated

    def _disconnect_readers(self) -> None:
        """Notify the readers of the previous generation, close their channels, and wait for their running
        reads.
        """
        self._notify()  # first: a reader whose connection is closed before it is notified would blame the source
        self.notify_planner()
        self._close_channels()
        if aborted := self._inflight_reads.drain(INFLIGHT_GRACE_S):
            log.info("readers disconnected, as the bytes are about to change", readers=aborted)

    def _close_channels(self) -> None:
        """Close all channels because the bytes are about to change: no direct reads are allowed from now on."""

    def progress_since(self, reported: tuple[ranges.Range, ...]) -> Progress:
        """See `rfork.peer.servicer.PeerBackend.progress_since`."""
        storage, rate = self._storage_activity(), self._advised_rate()
        return self._served.progress_since(reported, storage=storage, rate=rate)

    def _advised_rate(self) -> int | None:
        """Return the rate, in bytes per second, that a reader is advised to use."""
        return None

    def _storage_activity(self) -> StorageActivity | None:
        read_at = self._read_at
        if read_at is None:
            return None
        return StorageActivity(max(0.0, time.monotonic() - read_at()), self._relayed)

    def on_change(self, listener: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Call `listener` after each change of chunks, manifest, state or readers, on any thread."""

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
        """Return True if there are listeners for changes: every reader with a channel is one."""
        with self._lock:
            return bool(self._listeners)

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


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
