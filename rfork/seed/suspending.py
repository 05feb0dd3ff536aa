"""Weights that go away and come back, as engines sleep, offload and reallocate. Runs on the source.

A seed's exporters hold the memory of its image and register it with devices. So whoever releases or moves
it tells the seed before, and shows it the memory anew afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rfork.errors import LayoutMismatch
from rfork.image.board import ChunkBoard
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.seed.exports import Exports, hollow
from rfork.seed.holding import Holding
from rfork.transport.base import Transport

HEAR_S = 0.5
"""What readers get to hear that the weights changed, before the ports that they read from are gone."""


class Suspending(Holding):
    """What an instance holds, and gives through `_exports`, until it is told that the memory goes away."""

    def __init__(
        self,
        image: Image,
        board: ChunkBoard | None,
        manifest: Manifest | None,
        transports: Sequence[Transport],
    ) -> None:
        super().__init__(image, board, manifest)
        self._exports = Exports(transports)

    def _open_exports(self) -> None:
        """Open the exporters of `self.image`. Raises as `Exports.open`."""
        raise NotImplementedError

    def suspend(self) -> None:
        """The engine is about to release or move the weights (sleep mode, offloading): let go of them.

        Fences, ends all readers, gives nothing from then on, and returns once nobody reads the memory, no
        device has it registered and nothing of the seed keeps it alive; reads that do not end soon are cut.
        The planner hears of it.
        `resume` undoes it; a second call does nothing. Not inside a block of `updating`.
        """
        with self._updates:
            self._suspend()

    def _suspend(self) -> None:
        with self._changing:
            if self._suspended:
                return
            self._suspended = True
        watched = self._watched()
        self.fence()
        if watched:
            # Nothing is given any more, and who asks is told why; who finds no port blames the source.
            threading.Event().wait(HEAR_S)
        with self._digesting:
            self._exports.close()
            self.image = hollow(self.image.layout)
        self._part_from_readers()  # who came before the exporters were gone

    def resume(self, image: Image) -> None:
        """The weights are back, whole, maybe at other addresses and other than they were: be a seed of them.

        They are registered while they are digested, and given under another generation than before. Without
        a `suspend` before, it begins with one, unless it is the memory that is given already.
        Raises LayoutMismatch for another layout, and TransportUnusable as `start`: it stays suspended.
        """
        if image.layout.layout_id != self.image.layout.layout_id:
            raise LayoutMismatch(
                f"the seed's layout is {self.image.layout.layout_id}, not {image.layout.layout_id}"
            )
        with self._updates:
            if self._exports.ended or (not self._suspended and image.same_memory(self.image)):
                return
            self._suspend()
            self.image = image
            try:
                self._open_exports()
            except BaseException:
                self.image = hollow(image.layout)
                raise
            with self._changing:
                self._suspended = False
            self.reseal()
