"""Seeds whose weights go away and come back, and transports that say what they were asked."""

from __future__ import annotations

import time

import torch

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.peer.memory import MemoryPeers
from rfork.seed.holding import seal
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.transport.base import Transport
from rfork.transport.memory import MemoryNetwork, MemoryTransport

KEY = derive_key(b"s" * 32, "seed-1")
SIZE = 3 * MIB


def image_with(value: int) -> Image:
    """An image of its own memory, all of one byte."""
    return image_of({"a": torch.full((SIZE,), value, dtype=torch.uint8)})


LAYOUT_ID = image_with(0).layout.layout_id


def made(*transports: Transport, of: Image | None = None) -> Seed:
    image = of or image_with(1)
    seed = Seed(
        image,
        Identity("model", instance_id="seed-1"),
        Settings(host="node", drain_s=0),
        list(transports) or [MemoryTransport(MemoryNetwork())],
        manifest=seal(image),
        serve_peer=MemoryPeers().service,
    )
    seed.learn_keys([KEY])
    return seed


def token(generation: int = 0, fork_id: str = "fork-1") -> str:
    claims = LeaseClaims(fork_id, "seed-1", LAYOUT_ID, None, generation, time.time() + 60)
    return sign(claims, decode_key(KEY))


Told = tuple[str, int, tuple[tuple[int, int], ...], str | None, tuple[str, ...]]


def told(seed: Seed) -> Told:
    """What the planner hears."""
    report = seed.report()
    return report.state, report.generation, report.verified, report.weights_id, report.transports


def serving(generation: int, image: Image) -> Told:
    return "serving", generation, ((0, 3),), seal(image).weights_id, ("memory",)


def suspended(generation: int, state: str = "loading") -> Told:
    return state, generation, (), None, ()


def open_channel(seed: Seed, generation: int, *transports: str) -> str:
    asked = list(transports) or ["memory"]
    fork_id = seed.check(token(generation))
    return seed.open_channel(fork_id, LAYOUT_ID, asked, "127.0.0.1")[1].transport
