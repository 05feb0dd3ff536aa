"""Weights that go away and come back, as engines sleep, offload and reallocate. Runs on the source.

A seed's exporters hold the memory of its image and register it with devices. So whoever releases or moves
it tells the seed before, and shows it the memory anew afterwards.
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
"""What readers get to hear that the weights changed, before the ports that they read from are gone."""


class SuspendableImage(ImageState):
    """What an instance holds, and gives through `_exports`, until it is told that the memory goes away."""

    def __init__(
        self,
        image: Image,
        chunk_state: ChunkState | None,
        manifest: Manifest | None,
        transports: Sequence[Transport],
    ) -> None:
        super().__init__(image, chunk_state, manifest)
        self._exports = ExporterSet(transports)
        self._settled = threading.Event()  # not set while exporters come and go, and it gives on
        self._settled.set()

    @property
    def _gate(self) -> AccessGate:
        """What its exporters ask."""
        raise NotImplementedError

    def wait_report_acked(self, timeout: float) -> bool:
        """Tell the planner now how it stands, and wait until it has heard; False where it has not by then."""
        raise NotImplementedError

    def _open_exports(self) -> None:
        """Open the exporters of `self.image`. Raises as `ExporterSet.open`."""
        raise NotImplementedError

    def manifest_snapshot(self) -> tuple[int, Manifest]:
        """The generation, and the manifest of what the image holds in it, as they are at one time.

        Raises SourceWeightsChanged where the image is not whole.
        """
        with self._changing:
            if self._manifest is None or not self.chunk_state.complete:
                raise SourceWeightsChanged("there is no whole image: the seed receives it still, or changes it")
            return self.generation, self._manifest

    @contextmanager
    def local_read(self, generation: int) -> Iterator[Image]:
        """The image of this generation, for this process itself to read without a lease inside the block.

        Whoever changes the bytes, or takes the memory away, waits for the block: it has to be short, and
        the image is not to be kept after it. Raises SourceWeightsChanged where the generation is another by now.
        """
        with self._inflight_reads.track(_noop_cancel):
            # Asked only now: a fence that comes later waits for this block.
            if self.generation != generation:
                raise SourceWeightsChanged(
                    "the seed changes its weights, or puts them away: what was read of them is given up"
                )
            yield self.image

    def suspend(self) -> None:
        """The engine is about to release or move the weights (sleep mode, offloading): let go of them.

        Fences, ends all readers, gives nothing from then on, and returns once nobody reads the memory, no
        device has it registered and nothing of the seed keeps it alive; reads that do not end soon are cut.
        The planner hears of it.
        `resume` undoes it; a second call does nothing. Not inside a block of `updating`.
        """
        with self._updates:
            self._suspend()

    def _suspend(self) -> bool:
        """Whether it was not suspended before: then it is fenced, and the generation is another."""
        with self._changing:
            if isinstance(self.image, ReleasedImage):
                return False
            self._suspended = True
        watched = self._has_listeners()
        self.fence()
        if watched:
            # Nothing is given any more, and who asks is told why; who finds no port blames the source.
            threading.Event().wait(NOTIFY_GRACE_S)
        try:
            with self._digesting:
                try:
                    self._exports.close()
                finally:  # whatever an exporter says: the others are gone, and this one is asked no more
                    self.image = ReleasedImage(self.image.layout)
        finally:
            self._disconnect_readers()  # who came before the exporters were gone
        return True

    def release_memory(self) -> None:
        """The memory is about to be given back, and the weights loaded anew elsewhere: let go of it.

        As `suspend`; but whoever comes meanwhile gets a slot, over a transport that needs no memory for
        that, and waits for the weights as it would for those that are read in place. `memory_restored` ends it.
        """
        with self._updates:
            self._settled.clear()
            try:
                if (watched := self._has_listeners()) or self._manifest is not None or self.chunk_state.verified:
                    with self._changing:
                        self._clear()
                    # The planner first: who hears of it asks there at once, and is to be sent here again.
                    self.wait_report_acked(NOTIFY_GRACE_S)
                    self._disconnect_readers()
                if watched:
                    threading.Event().wait(NOTIFY_GRACE_S)
                with self._digesting:
                    self._exports.close(keep=STATELESS_TRANSPORTS)
            finally:
                self._settled.set()

    def memory_restored(self, version: VersionOf | None = None) -> None:
        """The image has other memory, and in it whole weights: digest and give them, over all transports.

        `version` is as for `reseal`.
        """
        with self._updates:
            more = self._exports.reopen_missing(self.image, self._gate)
            self.notify_planner()
            self.publish(version=version)
        if more and self._has_listeners():
            self.invalidate(())  # those that waited come again, over the transport that suits them best

    def resume(self, image: Image, generation: int | None = None, version: VersionOf | None = None) -> None:
        """The weights are back, whole, maybe at other addresses and other than they were: be a seed of them.

        They are registered while they are digested, and given under another generation than before. Without
        a `suspend` before, it begins with one; memory that it has already is only digested, where it is not
        given.
        `generation` is the one in which they came to be whole: who was fenced since, also by a `suspend`, is
        left as it is, as the bytes may change again by now. `version` is as for `reseal`.
        Raises LayoutMismatch for another layout, and TransportUnavailable as `start`: it stays suspended.
        """
        if image.layout.layout_id != self.image.layout.layout_id:
            raise LayoutMismatch(f"the seed's layout is {self.image.layout.layout_id}, not {image.layout.layout_id}")
        with self._updates:
            if self._exports.is_shut_down or generation not in (None, self.generation):
                return
            if not self._suspended and image.shares_memory_with(self.image):
                # What was begun before may have failed, or was fenced: it is whole now.
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
    """How to cut a read that needs no cutting."""
