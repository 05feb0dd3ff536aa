"""An image whose memory may be released and replaced while it is served. Runs on the source.

For engines that sleep, offload or reallocate their weights. The exporters keep references to the image's memory and
register it with devices, so the engine must call `suspend` or `release_memory` before it frees or moves the memory,
and pass the new memory afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rfork.errors import LayoutMismatch, SourceWeightsChanged
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.source.exporters import STATELESS_TRANSPORTS, ExporterSet, ReleasedImage
from rfork.source.image_state import ImageState
from rfork.source.served_image import ServedImage, VersionOf
from rfork.transport.base import AccessGate, Transport

NOTIFY_GRACE_S = 0.5
"""Time for readers to learn that the weights changed, before the ports that they use are closed."""


class SuspendableImage(ImageState):
    """An image that is served through `_exports` until its memory is released."""

    def __init__(
        self,
        image: Image,
        served: ServedImage,
        transports: Sequence[Transport],
    ) -> None:
        super().__init__(image, served)
        self._exports = ExporterSet(transports)
        self._exports_settled = threading.Event()
        """Set unless exporters are being opened or closed while others serve."""
        self._exports_settled.set()

    @property
    def _gate(self) -> AccessGate:
        """Access gate of the exporters."""
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
            return self._served.snapshot()

    @contextmanager
    def local_read(self, generation: int) -> Iterator[Image]:
        """Read the image of this generation in this process, without a lease, inside the block.

        Changing the bytes or releasing the memory waits for the block: it must be short, and must not keep
        the image. Raises SourceWeightsChanged if the generation has changed.
        """
        with self._inflight_reads.track(_ignore_abort):
            # Checked inside the block, for which a later fence waits.
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
            self._served.suspend()
        has_readers = self._has_listeners()
        self.fence()
        if has_readers:
            # Requests now fail with the reason. A reader that finds the port closed would blame the source.
            time.sleep(NOTIFY_GRACE_S)
        try:
            with self._digesting:
                try:
                    self._exports.close()
                finally:  # even if an exporter fails to close: it gets no more requests, and the others are closed
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
            self._exports_settled.clear()
            try:
                has_readers = self._has_listeners()
                if has_readers or self._served.manifest is not None or self.chunk_state.verified:
                    with self._changing:
                        self._served.clear()
                    # The planner first: disconnected readers request a new plan, which should name this source again.
                    self.wait_report_acked(NOTIFY_GRACE_S)
                    self._disconnect_readers()
                if has_readers:
                    time.sleep(NOTIFY_GRACE_S)
                with self._digesting:
                    self._exports.close(keep=STATELESS_TRANSPORTS)
            finally:
                self._exports_settled.set()

    def memory_restored(self, version: VersionOf | None = None) -> None:
        """Digest and serve complete weights in new memory, over all transports.

        `version` is as for `publish`.
        """
        with self._updates:
            reopened = self._exports.reopen_missing(self.image, self._gate)
            self.notify_planner()
            self.publish(version=version)
        if reopened and self._has_listeners():
            self.invalidate(())  # disconnects waiting readers, which then connect over the best transport

    def resume(self, image: Image, generation: int | None = None, version: VersionOf | None = None) -> None:
        """Serve complete weights again, possibly at other addresses and with other values.

        Registers and digests them, and serves them under a new generation. Suspends first if `suspend` was not
        called, except for memory that the seed already has, which it only digests unless it serves it.

        `generation` is the one in which the weights became complete. If it was fenced since then, by `suspend` too,
        nothing happens, because the bytes may be changing again. `version` is as for `publish`. Raises
        LayoutMismatch for another layout, and TransportUnavailable like `start`: the seed stays suspended.
        """
        if image.layout.layout_id != self.image.layout.layout_id:
            raise LayoutMismatch(f"the seed's layout is {self.image.layout.layout_id}, not {image.layout.layout_id}")
        with self._updates:
            if self._exports.is_shut_down or generation not in (None, self.generation):
                return
            if not self.suspended and image.shares_memory_with(self.image):
                # An earlier attempt failed or was fenced.
                if self._served.manifest is None or not self.chunk_state.complete:
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
                self._served.resume()
            self.publish(generation, version)


def _ignore_abort() -> None:
    """Do nothing: a local read is short and ends by itself."""
