"""A seed with three chunks, and lease tokens for it."""

from __future__ import annotations

import time

import torch

from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB, ChunkState
from rfork.image.memory import Image, compute_manifest
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.testing.peers import InMemoryPeers
from rfork.testing.transport import InMemoryNetwork, InMemoryTransport

KEY = derive_key(b"s" * 32, "seed-1")
IMAGE = image_from_tensors({"a": torch.arange(3 * MIB, dtype=torch.uint8)})
LAYOUT_ID = IMAGE.layout.layout_id


def build_seed(
    chunk_state: ChunkState | None = None,
    *,
    network: InMemoryNetwork | None = None,
    seed_image: Image = IMAGE,
    peers: InMemoryPeers | None = None,
) -> Seed:
    seed = Seed(
        seed_image,
        InstanceIdentity("model", instance_id="seed-1"),
        InstanceSettings(node_name="node", drain_timeout_s=0),
        Connections([InMemoryTransport(network or InMemoryNetwork())], serve_peer=(peers or InMemoryPeers()).service),
        chunk_state=chunk_state,
        manifest=compute_manifest(seed_image) if chunk_state is None else None,
    )
    seed.set_lease_keys([KEY])
    return seed


def token(fork_id: str = "fork-1", generation: int = 0) -> str:
    claims = LeaseClaims(fork_id, "seed-1", LAYOUT_ID, None, generation, time.time() + 60)
    return sign(claims, decode_key(KEY))
