"""Images of boxes that a simulated instance gathers for targets with other layouts.

It replaces `rfork.source.box_images`: the order of the gather and the served image are production's.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

from rfork.errors import LayoutMismatch, RforkError, SourceBusy, SourceCorrupt, SourceWeightsChanged
from rfork.image.layout import Manifest
from rfork.peer.base import BoxImage
from rfork.placement.boxes import Box
from rfork.placement.intersection import intersect
from rfork.source import gather_order
from rfork.source.box_images import MODEL_SUFFIX, REGISTRATION_TIMEOUT_S
from rfork.source.served_image import InstanceIdentity
from tests.simulation.instance import MODEL, Instance
from tests.simulation.sharded_model import CELL_BYTES, CellCopy, ImageShape, box_shape, cell_copies, chunks_of

if TYPE_CHECKING:
    from tests.simulation.layouts import LayoutsWorld

POLL_S = 0.05
MAX_QUEUE_S = 0.2
"""Maximum time that a request waits for others after its lease was checked."""
CLOSE_GRACE_S = 0.5
"""Time for readers to learn that an image is no longer served, before its process refuses connections."""
VERIFY_S = 0.001
BoxKey = tuple[frozenset[Box], str, str]


@lru_cache(4096)
def covers(source: ImageShape, boxes: ImageShape) -> bool:
    """Return whether a source has all cells of boxes."""
    return not intersect([source.placement_map], boxes.placement_map).uncovered


@lru_cache(4096)
def _copies(source: ImageShape, boxes: ImageShape) -> list[CellCopy]:
    return cell_copies(source, boxes)


class BoxImages:
    """Images of boxes of one instance's weights."""

    def __init__(self, world: LayoutsWorld, instance: Instance, shape: ImageShape) -> None:
        self.shape = shape
        self._world = world
        self._instance = instance
        self._images: dict[BoxKey, Instance] = {}
        self._corrupt_generation: int | None = None

    async def open(self, boxes: tuple[Box, ...]) -> BoxImage:
        """See `rfork.source.box_images.BoxImages.open`."""
        world, served = self._world, self._instance.served
        await world.sleep(world.random.random() * MAX_QUEUE_S)
        if served.draining:
            raise SourceBusy("the source is draining")
        try:
            generation, manifest = served.snapshot()
        except SourceWeightsChanged as error:
            raise SourceBusy(str(error)) from None
        assert served.version is not None
        key = frozenset(boxes), manifest.weights_id, served.version
        image = self._images.get(key)
        if image is None:
            if self._corrupt_generation == generation:
                raise SourceCorrupt(f"{self._instance.name}: the weights were changed without notice")
            shape = box_shape(boxes, world.layers)
            if not covers(self.shape, shape):
                raise LayoutMismatch("this instance does not have some of the boxes")
            image = self._images[key] = self._serve(shape, served.version)
            world.start(self._gather_all(key, image, shape, generation, manifest))
        version, until = served.version, world.now + REGISTRATION_TIMEOUT_S
        while not image.served.leases.has_keys:
            if image.is_closed or world.now >= until:
                raise SourceBusy("the planner has not acknowledged the image of the boxes yet")
            await world.sleep(POLL_S)
        layout = image.served.layout
        return BoxImage(image.served.identity.model, version, layout.layout_id, layout.image_bytes)

    def _serve(self, shape: ImageShape, version: str) -> Instance:
        """Return an image without chunks yet."""
        name = self._world.new_id(f"{self._instance.name}-boxes-")
        identity = InstanceIdentity(f"{MODEL}{MODEL_SUFFIX}", instance_id=name, version=version, replica=name)
        image = Instance(
            self._world,
            name,
            version=version,
            files=None,
            max_readers=self._world.max_readers,
            layout=shape.layout,
            identity=identity,
            process=self._instance.process,
            is_producer=True,
        )
        text = f"{version}\n{shape.layout.layout_id}"
        image.served.chunk_state.set_provisional_id(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        self._world.add_image(image, shape)
        return image

    async def _gather_all(
        self, key: BoxKey, image: Instance, shape: ImageShape, generation: int, manifest: Manifest
    ) -> None:
        try:
            await self._gather(image, shape, generation, manifest)
        except RforkError as error:
            if isinstance(error, SourceCorrupt):
                self._corrupt_generation = generation
            del self._images[key]
            await self._world.close_image(image)

    async def _gather(self, image: Instance, shape: ImageShape, generation: int, manifest: Manifest) -> None:
        world, own, served = self._world, self._instance, image.served
        copies = _copies(self.shape, shape)
        read = [_span(copy.read.tolist()) for copy in copies]
        written = [_span(copy.written.tolist()) for copy in copies]
        cells = shape.cells(image.memory)
        for step in gather_order.gather_steps(read, written, manifest.layout.chunks, shape.layout.chunks):
            await world.sleep(world.gather_chunk_s)
            await world.resumed(own)
            self._check(generation)
            own_cells = self.shape.cells(own.memory)
            for index in step.copies:
                cells[copies[index].written] = own_cells[copies[index].read]
            image.memory[:] = chunks_of(cells)
            await world.sleep(VERIFY_S)
            await world.resumed(own)
            for chunk in step.verified:
                if own.memory[chunk] != manifest.digests[chunk]:
                    self._check(generation)
                    raise SourceCorrupt(f"{own.name}: chunk {chunk} does not have the digest of the manifest")
            for chunk in step.served:
                served.chunk_state.mark_verified(chunk, image.memory[chunk])
        self._check(generation)
        digests = served.chunk_state.digests
        served.set_manifest(Manifest(shape.layout, tuple(digests[chunk] for chunk in range(len(digests)))))
        served.serve()
        image.notify_readers()
        image.send_report()

    def _check(self, generation: int) -> None:
        if self._instance.served.generation != generation:
            raise SourceWeightsChanged("the weights changed during the gather")


def _span(cells: list[int]) -> tuple[int, int]:
    return min(cells) * CELL_BYTES, (max(cells) + 1) * CELL_BYTES
