"""The hosts of `benchmarks.cold_group`: those of `benchmarks.fanout`, and a real S3 server on one more.

The server is put into its own network namespace, behind a shaped link like those of the others, and the
weights are written to it by rfork's own writers, on that same host: nothing of that is on any link.
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
    """A crew with an S3 server that holds the weights; `sha256` is that of their image."""

    def __init__(self, nodes: Sequence[str], *, size: int, rate: float) -> None:
        super().__init__((STORE, *nodes), size=size, rate=rate, delay_s=0.0)
        self.sha256 = ""

    def before_nodes(self, folder: Path) -> Mapping[str, str]:
        """See `Crew.before_nodes`: the server, and the weights in it."""
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
