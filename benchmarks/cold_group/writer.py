"""Writes the weights of `benchmarks.cold_group` to storage, as a snapshot and as a checkpoint.

Started by that benchmark: ``python -m benchmarks.cold_group.writer BYTES SNAPSHOT_URI CHECKPOINT_URI`` prints
the SHA-256 of the image.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing

from safetensors.torch import save

from benchmarks.fanout.node import module_of
from rfork import logs
from rfork.image.capture import capture
from rfork.image.memory import image_sha256
from rfork.storage.location import Location
from rfork.storage.registry import open_store
from rfork.storage.snapshots.writer import write_snapshot


def main() -> None:
    """Generate the weights and write them."""
    size, snapshot, checkpoint = sys.argv[1:]
    logs.configure(json=False, level="error")
    module = module_of(int(size), filled=True)
    image = capture(module)
    write_snapshot(image, image.manifest(), snapshot)
    data = memoryview(bytearray(save(module.state_dict())))
    with (
        closing(open_store(Location.parse(checkpoint).folder)) as store,
        store.write("model.safetensors") as file,
    ):
        file.write([data])
    print(json.dumps({"sha256": image_sha256(image)}))


if __name__ == "__main__":
    main()
