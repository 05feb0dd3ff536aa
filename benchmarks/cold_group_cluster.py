"""Hosts of `benchmarks.cold_group`: those of `benchmarks.fanout`, and one more with a real S3 server.

The server runs in its own network namespace with a shaped link like the others. rfork's own writers store the
weights from the same host, so no link carries that traffic.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.cold_group_cases import STORE, StoredForm
from benchmarks.fanout_cluster import FanoutCluster, FanoutError, tail
from benchmarks.seaweed import SeaweedServer

BUCKET: Final = "models"
URIS: Final[Mapping[StoredForm, str]] = {
    "snapshot": f"s3://{BUCKET}/model/snapshot/",
    "checkpoint": f"s3://{BUCKET}/model/checkpoint/",
}
VOLUME_MB: Final = 256
WRITE_S: Final = 120.0


class ColdGroupCluster(FanoutCluster):
    """Fan-out cluster with an S3 server that stores the weights; `sha256` is the hash of their image."""

    def __init__(self, nodes: Sequence[str], *, size: int, rate: float) -> None:
        super().__init__((STORE, *nodes), size=size, rate=rate, delay_s=0.0)
        self.sha256 = ""

    def before_nodes(self, folder: Path) -> Mapping[str, str]:
        """Start the server and store the weights; see `FanoutCluster.before_nodes`."""
        server = self.open.enter_context(
            SeaweedServer(
                folder,
                buckets=(BUCKET,),
                address=self.lab.address(STORE),
                command_prefix=("ip", "netns", "exec", self.lab.namespace(STORE)),
                volumes=16,
                volume_mb=VOLUME_MB,
            )
        )
        log = folder / "written.json"
        with log.open("w") as output:
            written = self.lab.start(
                STORE,
                [sys.executable, "-m", "benchmarks.cold_group_writer", str(self.size), *URIS.values()],
                {**os.environ, **server.environment()},
                output,
            )
            if written.wait(WRITE_S):
                raise FanoutError(f"the weights were not written: {tail(log)}")
        self.sha256 = json.loads(log.read_text())["sha256"]
        return server.environment()
