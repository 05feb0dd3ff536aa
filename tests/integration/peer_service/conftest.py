"""Seeds that are reached over gRPC."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rfork.image.board import ChunkBoard
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.seed.holding import seal
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.transport.memory import MemoryNetwork, MemoryTransport
from tests.integration.peer_service.seeds import KEY, StartSeed


@pytest.fixture
def start_seed() -> Iterator[StartSeed]:
    """Starts seeds of a 3-chunk image over gRPC, and closes them."""
    started: list[Seed] = []

    def start(
        image: Image | None = None,
        board: ChunkBoard | None = None,
        *,
        knows: bool = True,
        port: int = 0,
        readers: int = 1,
    ) -> Seed:
        held = image or image_of({"a": torch.arange(3 * MIB, dtype=torch.uint8)})
        seed = Seed(
            held,
            Identity("model", instance_id="seed-1"),
            Settings(peer_port=port, max_readers=readers),
            [MemoryTransport(MemoryNetwork())],
            board=board,
            manifest=seal(held) if knows else None,
        )
        seed.learn_keys([KEY])
        started.append(seed.start())
        return seed

    yield start
    for seed in started:
        seed.close()
