"""Registers an image's memory with an engine, in few areas and with helpful errors. Runs on both sides."""

from __future__ import annotations

from collections.abc import Sequence

from rfork.errors import GpuDirectUnavailable, TransportUnavailable
from rfork.image.memory import Image
from rfork.image.registration import Region, regions_to_register, uses_expandable_segments
from rfork.transport.mooncake.engine import MooncakeEngine

MAX_DESCRIPTOR_BYTES = 1 << 20
"""Maximum size of the engine's handshake message, which lists all areas; if it is exceeded, every read fails."""
AREA_BYTES, KEY_BYTES = 104, 26
"""Bytes of one area in that message, and of the two keys that each network card has for it."""


def max_regions(devices: int) -> int:
    """Return the maximum number of areas for an engine with this many network cards (0 over TCP)."""
    return MAX_DESCRIPTOR_BYTES // (AREA_BYTES + KEY_BYTES * devices)


def regions_within_limit(image: Image, devices: int) -> list[Region]:
    """Return the areas that contain the image. Raises TransportUnavailable if there are too many."""
    regions, max_count = regions_to_register(image), max_regions(devices)
    if len(regions) > max_count:
        raise TransportUnavailable(
            f"the image is in {len(regions)} memory areas; transfer_engine supports at most {max_count}",
            hint="use RFORK_TRANSPORTS=http, or load the model into fewer, larger allocations",
        )
    return regions


def register(engine: MooncakeEngine, image: Image, regions: Sequence[Region]) -> None:
    """Register the areas of `image`. Raises TransportUnavailable, for CUDA memory GpuDirectUnavailable."""
    try:
        engine.register(regions)
    except TransportUnavailable as error:
        if all(device.type != "cuda" for device in image.devices):
            raise
        hint = "see `rfork doctor` (GPUDirect, memlock)"
        if uses_expandable_segments(image):
            # Before its pull request 3538, Mooncake exports only the first segment of an expandable
            # allocation.
            hint = (
                "torch uses expandable segments: use a newer Mooncake, nvidia-peermem, or "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        raise GpuDirectUnavailable(str(error), hint=hint) from error
