"""A seed of three chunks, and tokens for it."""

from __future__ import annotations

import time

import torch

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.image.board import ChunkBoard
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.peer.memory import MemoryPeers
from rfork.seed.holding import seal
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.transport.memory import MemoryNetwork, MemoryTransport

KEY = derive_key(b"s" * 32, "seed-1")
IMAGE = image_of({"a": torch.arange(3 * MIB, dtype=torch.uint8)})
LAYOUT_ID = IMAGE.layout.layout_id


def made(
    board: ChunkBoard | None = None,
    *,
    network: MemoryNetwork | None = None,
    of: Image = IMAGE,
    peers: MemoryPeers | None = None,
) -> Seed:
    seed = Seed(
        of,
        Identity("model", instance_id="seed-1"),
        Settings(host="node", drain_s=0),
        [MemoryTransport(network or MemoryNetwork())],
        board=board,
        manifest=seal(of) if board is None else None,
        serve_peer=(peers or MemoryPeers()).service,
    )
    seed.learn_keys([KEY])
    return seed


def token(fork_id: str = "fork-1", generation: int = 0) -> str:
    claims = LeaseClaims(fork_id, "seed-1", LAYOUT_ID, None, generation, time.time() + 60)
    return sign(claims, decode_key(KEY))
