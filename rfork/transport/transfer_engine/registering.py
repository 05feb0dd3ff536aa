"""An image's memory, registered with an engine: few areas, and errors that say what to do. Both sides."""

from __future__ import annotations

from collections.abc import Sequence

from rfork.errors import NoGpuDirect, TransportUnusable
from rfork.image.areas import Area, areas, in_expandable_memory
from rfork.image.memory import Image
from rfork.transport.transfer_engine.engine import Engine

LARGEST_DESCRIPTION = 1 << 20
"""The engine's handshake message with all areas may be so long (bytes); past it, every read fails."""
AREA_BYTES, KEY_BYTES = 104, 26
"""What one area takes in that message, and each network card's two keys for it."""


def most_areas(devices: int) -> int:
    """How many areas an engine on so many network cards can tell its peers of; over TCP there are none."""
    return LARGEST_DESCRIPTION // (AREA_BYTES + KEY_BYTES * devices)


def areas_to_register(image: Image, devices: int) -> list[Area]:
    """The areas that hold the image. Raises TransportUnusable where there are too many."""
    found, most = areas(image), most_areas(devices)
    if len(found) > most:
        raise TransportUnusable(
            f"the image lies in {len(found)} memory areas, transfer_engine takes at most {most}",
            hint="use RFORK_TRANSPORTS=http, or load the model into fewer, larger allocations",
        )
    return found


def register(engine: Engine, image: Image, found: Sequence[Area]) -> None:
    """Register the areas that hold `image`. Raises TransportUnusable, of CUDA memory NoGpuDirect."""
    try:
        engine.register(found)
    except TransportUnusable as error:
        if all(device.type != "cuda" for device in image.devices):
            raise
        hint = "see rfork doctor (GPUDirect, memlock)"
        if in_expandable_memory(image):
            # Mooncake before its pull request 3538 exports the first piece of such a range alone.
            hint = (
                "torch's memory is in expandable segments: use a newer Mooncake, nvidia-peermem, or "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        raise NoGpuDirect(str(error), hint=hint) from error
