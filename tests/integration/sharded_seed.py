"""Process with a seed of one rank of `benchmarks.reshard.sharded_model`, which serves boxes to other layouts.

``python -m tests.integration.sharded_seed RANK SIZE VERSION [--corrupt | --without-map]`` prints ``ready`` and serves
until it is killed. With --corrupt, one byte of its weights differs from the checkpoint, unnoticed, once it is ready.
With --without-map, it serves its own layout only.
"""

from __future__ import annotations

import sys
import threading

import torch

from benchmarks.reshard.sharded_model import Shape, ShardedEngine, random_weights
from rfork import settings as options
from rfork.image.capture import capture
from rfork.image.memory import compute_manifest
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.source.box_images import BoxImages
from rfork.source.seed import Connections, InstanceIdentity, Seed

MODEL = "sharded"
SHAPE = Shape(layers=2, hidden=256, intermediate=1024, key_value=64, vocabulary=1024)
MEMORY_BYTES = 1 << 30


def main(index: int, size: int, version: str, *, corrupt: bool, has_map: bool) -> None:
    """Serve one rank."""
    engine, settings = ShardedEngine(SHAPE, index, size), options.load(InstanceSettings)
    module = engine.load_from(lambda _: random_weights(SHAPE))
    image = capture(module)
    identity = InstanceIdentity.of(MODEL, Rank(tp=index, tp_size=size), None, version=version)
    seed = Seed(image, identity, settings, Connections.of(settings), manifest=compute_manifest(image))
    with seed:
        placement_map = engine.record(engine.checkpoint_tensors())
        tensors, _ = engine.live_tensors(module, placement_map)
        if has_map:
            seed.boxes = BoxImages(seed, placement_map, tensors, settings, memory_bytes=MEMORY_BYTES)
        if not seed.wait_registered(30.0):
            raise SystemExit("the planner does not respond")
        if corrupt:
            next(iter(tensors.values())).view(torch.uint8).view(-1)[0] ^= 1
        print("ready", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        corrupt="--corrupt" in sys.argv,
        has_map="--without-map" not in sys.argv,
    )
