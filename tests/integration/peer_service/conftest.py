"""Fixture: seeds that serve over gRPC."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB, ChunkState
from rfork.image.memory import Image, compute_manifest
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.testing.transport import InMemoryNetwork, InMemoryTransport
from tests.integration.peer_service.seeds import KEY, StartSeed


@pytest.fixture
def start_seed() -> Iterator[StartSeed]:
    """Starts seeds of a 3-chunk image over gRPC, and closes them."""
    started: list[Seed] = []

    def start(
        image: Image | None = None,
        board: ChunkState | None = None,
        *,
        has_manifest: bool = True,
        bind: str = "127.0.0.1",
        port: int = 0,
        readers: int = 1,
    ) -> Seed:
        served_image = image or image_from_tensors({"a": torch.arange(3 * MIB, dtype=torch.uint8)})
        seed = Seed(
            served_image,
            InstanceIdentity("model", instance_id="seed-1"),
            InstanceSettings(bind=bind, peer_port=port, max_readers=readers),
            Connections([InMemoryTransport(InMemoryNetwork())]),
            chunk_state=board,
            manifest=compute_manifest(served_image) if has_manifest else None,
        )
        seed.set_lease_keys([KEY])
        started.append(seed.start())
        return seed

    yield start
    for seed in started:
        seed.close()
