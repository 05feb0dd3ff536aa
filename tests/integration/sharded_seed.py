"""Process with a seed of one rank of `benchmarks.reshard.sharded_model`, which serves boxes to other layouts.

``python -m tests.integration.sharded_seed RANK SIZE VERSION [--without-map | --without-copies]`` prints ``ready`` and
serves until it is killed. With --without-map, it serves its own layout only; with --without-copies, only boxes that are
contiguous in its tensors. It runs the command of each signal in `COMMANDS`, and prints the command's name.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping

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
UPDATED_VERSION = "v9"


def weights_of(version: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's tensors of a version, each of which differs from those of other versions."""
    number = int(version.removeprefix("v"))
    for name, tensor in random_weights(SHAPE):
        yield name, (tensor.view(torch.int16) ^ number).view(tensor.dtype)


class SeedProcess:
    """A seed and the commands of its test."""

    def __init__(self, index: int, size: int, version: str, *, has_map: bool, memory_bytes: int) -> None:
        self._engine, settings = ShardedEngine(SHAPE, index, size), options.load(InstanceSettings)
        module = self._engine.load_from(lambda _: weights_of(version))
        image = capture(module)
        identity = InstanceIdentity.of(MODEL, Rank(tp=index, tp_size=size), None, version=version)
        self.seed = Seed(image, identity, settings, Connections.of(settings), manifest=compute_manifest(image))
        placement_map = self._engine.record(self._engine.checkpoint_tensors())
        self._tensors, _ = self._engine.live_tensors(module, placement_map)
        self._boxes = BoxImages(self.seed, placement_map, self._tensors, settings, memory_bytes=memory_bytes)
        if has_map:
            self.seed.boxes = self._boxes

    def update(self) -> None:
        """Change the weights in place to `UPDATED_VERSION`."""
        new = self._engine.load_from(lambda _: weights_of(UPDATED_VERSION))
        with self.seed.updating(UPDATED_VERSION):
            for name, tensor in new.named_parameters():
                self._tensors[name].copy_(tensor)

    def corrupt_weights(self) -> None:
        """Change the first byte of the weights unnoticed."""
        next(iter(self._tensors.values())).view(torch.uint8).view(-1)[0] ^= 1

    def corrupt_copies(self) -> None:
        """Change the first byte of each box unnoticed that was copied from the weights."""
        own = {tensor.untyped_storage().data_ptr() for tensor in self._tensors.values()}
        for served in self._boxes._images.values():
            for region in served.opened.result().image.regions:
                if region.untyped_storage().data_ptr() not in own:
                    region[0] ^= 1


COMMANDS: Mapping[signal.Signals, Callable[[SeedProcess], None]] = {
    signal.SIGUSR1: SeedProcess.update,
    signal.SIGUSR2: SeedProcess.corrupt_weights,
    signal.SIGHUP: SeedProcess.corrupt_copies,
}


def main(index: int, size: int, version: str, *, has_map: bool, memory_bytes: int) -> None:
    """Serve one rank."""
    received, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno())  # whichever thread the kernel chooses for the signal
    for number in COMMANDS:
        signal.signal(number, lambda number, frame: None)
    process = SeedProcess(index, size, version, has_map=has_map, memory_bytes=memory_bytes)
    with process.seed:
        if not process.seed.wait_registered(30.0):
            raise SystemExit("the planner does not respond")
        print("ready", flush=True)
        while True:
            command = COMMANDS[signal.Signals(received.recv(1)[0])]
            command(process)
            print(command.__name__, flush=True)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        has_map="--without-map" not in sys.argv,
        memory_bytes=1 if "--without-copies" in sys.argv else MEMORY_BYTES,
    )
