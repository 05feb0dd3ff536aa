"""Suspending and resuming weights, for engines that sleep, offload or reallocate. Runs on the source.

A seed's exporters keep references to the image's memory and register it with devices. Before the memory is
released or moved, the seed must be notified; afterwards it gets the new memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rfork.errors import LayoutMismatch, SourceWeightsChanged
from rfork.image.chunk_state import ChunkState
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.source.exporters import STATELESS_TRANSPORTS, ExporterSet, ReleasedImage
from rfork.source.image_state import ImageState, VersionOf
from rfork.transport.base import AccessGate, Transport

NOTIFY_GRACE_S = 0.5
"""Time for readers to learn that the weights changed, before the ports that they use are closed."""


class SuspendableImage(ImageState):
    """An image that is served through `_exports` until its memory is released."""

    def __init__(
        self,
        image: Image,
        chunk_state: ChunkState | None,
        manifest: Manifest | None,
        transports: Sequence[Transport],
    ) -> None:
        super().__init__(image, chunk_state, manifest)
        self._exports = ExporterSet(transports)
        self._settled = threading.Event()  # not set while exporters open and close during serving
        self._settled.set()

    @property
    def _gate(self) -> AccessGate:
        """The gate of its exporters."""
        raise NotImplementedError

    def wait_report_acked(self, timeout: float) -> bool:
        """Report to the planner now and wait for the acknowledgement; return False if it does not arrive in
        time.
        """
        raise NotImplementedError

    def _open_exports(self) -> None:
        """Open the exporters of `self.image`. Raises like `ExporterSet.open`."""
        raise NotImplementedError

    def manifest_snapshot(self) -> tuple[int, Manifest]:
        """Return generation and manifest of the image, consistent with each other.

        Raises SourceWeightsChanged if the image is not complete.
        """
        with self._changing:
            if self._manifest is None or not self.chunk_state.complete:
                raise SourceWeightsChanged("there is no complete image: the seed is still receiving or changing it")
            return self.generation, self._manifest

    @contextmanager
    def local_read(self, generation: int) -> Iterator[Image]:
        """Read the image of this generation in this process, without a lease, inside the block.

        Changing the bytes or releasing the memory waits for the block: it must be short, and must not keep
        the image. Raises SourceWeightsChanged if the generation has changed.
        """
        with self._inflight_reads.track(_noop_cancel):
            # Checked only now: a later fence waits for this block.
            if self.generation != generation:
                raise SourceWeightsChanged("the seed is changing or suspending its weights: what was read is discarded")
            yield self.image

    def suspend(self) -> None:
        """Release the weights because the engine is about to free or move them (sleep mode, offloading).

        Fences, disconnects all readers and stops serving. Returns once no thread reads the memory, no device
        has it registered and no part of the seed keeps it alive; long reads are aborted. The planner is
        notified. `resume` undoes it; a second call has no effect. Not allowed inside `updating`.
        """
        with self._updates:
            self._suspend()

    def _suspend(self) -> bool:
        """Suspend; return True if it was not suspended before, which fences it and changes the generation."""
        with self._changing:
            if isinstance(self.image, ReleasedImage):
                return False
            self._suspended = True
        watched = self._has_listeners()
        self.fence()
        if watched:
            # Nothing is served any more, and requests get the reason; a reader that finds no port would blame
            # the source.
            threading.Event().wait(NOTIFY_GRACE_S)
        try:
            with self._digesting:
                try:
                    self._exports.close()
                finally:  # regardless of an exporter's error: the others are closed, and this one gets no more requests
                    self.image = ReleasedImage(self.image.layout)
        finally:
            self._disconnect_readers()  # readers that arrived before the exporters closed
        return True

    def release_memory(self) -> None:
        """Release the memory because the weights are about to be loaded into other memory.

        Like `suspend`, but readers that arrive meanwhile get a slot, over a transport that needs no memory
        for it, and wait for the weights. `memory_restored` ends it.
        """
        with self._updates:
            self._settled.clear()
            try:
                if (watched := self._has_listeners()) or self._manifest is not None or self.chunk_state.verified:
                    with self._changing:
                        self._clear()
                    # Notify the planner first: readers that learn of it send a request there, and should be
                    # sent here again.
                    self.wait_report_acked(NOTIFY_GRACE_S)
                    self._disconnect_readers()
                if watched:
                    threading.Event().wait(NOTIFY_GRACE_S)
                with self._digesting:
                    self._exports.close(keep=STATELESS_TRANSPORTS)
            finally:
                self._settled.set()

    def memory_restored(self, version: VersionOf | None = None) -> None:
        """Digest and serve complete weights in new memory, over all transports.

        `version` is as for `publish`.
        """
        with self._updates:
            more = self._exports.reopen_missing(self.image, self._gate)
            self.notify_planner()
            self.publish(version=version)
        if more and self._has_listeners():
            self.invalidate(())  # waiting readers connect again, over the best transport

    def resume(self, image: Image, generation: int | None = None, version: VersionOf | None = None) -> None:
        """Become a seed of complete weights, possibly at other addresses and with other values.

        They are registered and digested, and served under a new generation. Without a `suspend` before, it
        starts with one; memory that it already has is only digested, if it is not served.

        `generation` is the one in which they became complete: if it was fenced since, also by a `suspend`,
        nothing changes, because the bytes may be changing again. `version` is as for `publish`. Raises
        LayoutMismatch for another layout, and TransportUnavailable like `start`: it stays suspended.
        """
        if image.layout.layout_id != self.image.layout.layout_id:
            raise LayoutMismatch(f"the seed's layout is {self.image.layout.layout_id}, not {image.layout.layout_id}")
        with self._updates:
            if self._exports.is_shut_down or generation not in (None, self.generation):
                return
            if not self._suspended and image.shares_memory_with(self.image):
                # An earlier attempt may have failed or been fenced: it is complete now.
                if self._manifest is None or not self.chunk_state.complete:
                    self.publish(generation, version)
                return
            if self._suspend() and generation is not None:
                generation += 1
            self.image = image
            try:
                self._open_exports()
            except BaseException:
                self.image = ReleasedImage(image.layout)
                raise
            with self._changing:
                self._suspended = False
            self.publish(generation, version)


def _noop_cancel() -> None:
    """Abort a read that needs no abort."""
