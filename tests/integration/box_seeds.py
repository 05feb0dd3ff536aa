"""A seed of one rank of a toy model with a placement map, and the checkpoint that it was loaded from."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image, compute_manifest
from rfork.placement.boxes import Box
from rfork.placement.placement_map import PlacementMap
from rfork.placement.recorder import Recorder
from rfork.settings import InstanceSettings
from rfork.source.box_images import BoxImages
from rfork.source.seed import Connections, InstanceIdentity, Seed
from tests.integration.peer_service.seeds import KEY

MODEL = "toy"
SIZE = 512
"""Rows and columns: a tensor has 1 MiB, as a chunk has."""
NAMES = ("q", "k", "v", "down", "scale")
MEMORY_BYTES = 8 << 20

Tensors = dict[str, torch.Tensor]


def checkpoint(number: int = 1) -> Tensors:
    """Return the tensors of a checkpoint, with different values for each number."""
    generator = torch.Generator().manual_seed(number)
    return {name: torch.rand(SIZE, SIZE, generator=generator) for name in NAMES}


def empty_rank() -> Tensors:
    """Return the own tensors of a rank: fused q, k and v, the first half of down's columns, and computed scales."""
    return {
        "qkv": torch.zeros(3 * SIZE, SIZE),
        "down": torch.zeros(SIZE, SIZE // 2),
        "scale": torch.zeros(SIZE, SIZE),
    }


def load(own: Tensors, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill the own tensors of a rank."""
    for name, tensor in weights:
        if name == "down":
            own["down"].copy_(tensor[:, : SIZE // 2])
        elif name == "scale":
            own["scale"].copy_(tensor * 2)
        else:
            own["qkv"].narrow(0, "qkv".index(name) * SIZE, SIZE).copy_(tensor)


def recorded_map() -> PlacementMap:
    """Return the placement map of a rank."""
    own = empty_rank()
    with Recorder() as recorder:
        load(own, ((name, recorder.tensor(name, torch.float32, (SIZE, SIZE))) for name in NAMES))
    return recorder.placement_map(own)


def box(name: str, rows: tuple[int, int] = (0, SIZE), columns: tuple[int, int] = (0, SIZE)) -> Box:
    """Return a box of a checkpoint tensor."""
    starts, ends = zip(rows, columns, strict=True)
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(name, "float32", 4, (SIZE, SIZE), starts, sizes)


BOXES = (box("q", (0, SIZE), (64, 128)), box("v"), box("down", (10, 20), (0, SIZE // 2)))
"""Boxes that the rank has: of two dimensions, complete, and of rows."""


def elements(tensor: torch.Tensor, part: Box) -> torch.Tensor:
    """Return the elements of a box of a checkpoint tensor."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(part.start, part.sizes, strict=True))]


class BoxSeed:
    """A seed of a rank, in this process."""

    def __init__(
        self, settings: InstanceSettings, *, memory_bytes: int = MEMORY_BYTES, version: str | None = "v1"
    ) -> None:
        """Load and start it."""
        self.own = empty_rank()
        load(self.own, checkpoint().items())
        self.placement_map = recorded_map()
        image = image_from_tensors(self.own)
        identity = InstanceIdentity(MODEL, instance_id="seed-1", version=version)
        self.seed = Seed(image, identity, settings, Connections.of(settings), manifest=compute_manifest(image))
        self.seed.set_lease_keys([KEY])
        self.seed.start()
        self.passed_s = 0.0
        """Added to the clock."""
        self.images = BoxImages(
            self.seed, self.placement_map, self.own, settings, memory_bytes=memory_bytes, clock=self.clock
        )
        self.seed.boxes = self.images

    def clock(self) -> float:
        """Return the time for the idle time of images."""
        return time.monotonic() + self.passed_s


def rank_image(number: int) -> tuple[Tensors, Image]:
    """Return own tensors in new memory, filled from a checkpoint, and their image."""
    own = empty_rank()
    load(own, checkpoint(number).items())
    return own, image_from_tensors(own)
