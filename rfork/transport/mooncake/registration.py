"""An image's memory, registered with an engine: few areas, and errors that say what to do. Both sides."""

from __future__ import annotations

from collections.abc import Sequence

from rfork.errors import GpuDirectUnavailable, TransportUnavailable
from rfork.image.memory import Image
from rfork.image.registration import Region, regions_to_register, uses_expandable_segments
from rfork.transport.mooncake.engine import MooncakeEngine

MAX_DESCRIPTOR_BYTES = 1 << 20
"""The engine's handshake message with all areas may be so long (bytes); past it, every read fails."""
AREA_BYTES, KEY_BYTES = 104, 26
"""What one area takes in that message, and each network card's two keys for it."""


def max_regions(devices: int) -> int:
    """How many areas an engine on so many network cards can tell its peers of; over TCP there are none."""
    return MAX_DESCRIPTOR_BYTES // (AREA_BYTES + KEY_BYTES * devices)


def regions_within_limit(image: Image, devices: int) -> list[Region]:
    """The areas that hold the image. Raises TransportUnavailable where there are too many."""
    found, max_count = regions_to_register(image), max_regions(devices)
    if len(found) > max_count:
        raise TransportUnavailable(
            f"the image lies in {len(found)} memory areas, transfer_engine takes at most {max_count}",
            hint="use RFORK_TRANSPORTS=http, or load the model into fewer, larger allocations",
        )
    return found


def register(engine: MooncakeEngine, image: Image, found: Sequence[Region]) -> None:
    """Register the areas that hold `image`. Raises TransportUnavailable, of CUDA memory GpuDirectUnavailable."""
    try:
        engine.register(found)
    except TransportUnavailable as error:
        if all(device.type != "cuda" for device in image.devices):
            raise
        hint = "see rfork doctor (GPUDirect, memlock)"
        if uses_expandable_segments(image):
            # Mooncake before its pull request 3538 exports the first piece of such a range alone.
            hint = (
                "torch's memory is in expandable segments: use a newer Mooncake, nvidia-peermem, or "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        raise GpuDirectUnavailable(str(error), hint=hint) from error
