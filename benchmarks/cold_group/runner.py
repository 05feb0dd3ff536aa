"""Hosts of `benchmarks.cold_group`, and its cases on them.

The hosts are those of `benchmarks.fanout`, and one more with a real S3 server in its own network namespace, with
a shaped link like the others. rfork's own writers store the weights from the same host, so no link carries that
traffic.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.cold_group.cases import STORE, ColdGroupCase, ColdGroupOutcome, StoredForm
from benchmarks.fanout.cluster import STEP_S, FanoutCluster, FanoutError, tail
from benchmarks.fanout.messages import FanoutCommand, FanoutResponse
from benchmarks.netlab import Traffic
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
                [sys.executable, "-m", "benchmarks.cold_group.writer", str(self.size), *URIS.values()],
                {**os.environ, **server.environment()},
                output,
            )
            if written.wait(WRITE_S):
                raise FanoutError(f"the weights were not written: {tail(log)}")
        self.sha256 = json.loads(log.read_text())["sha256"]
        return server.environment()


KILLED_AT: Final = 0.35
"""When the member is killed, in S/B: it has read part of its share, and others wait for the rest."""
TIMEOUT_FACTOR: Final = 4.0
"""A case counts as hung after this multiple of the time that the links allow, plus a minute."""


class ColdGroupRunner:
    """Runs cases on a cluster, one at a time."""

    def __init__(self, cluster: ColdGroupCluster) -> None:
        self._cluster = cluster
        self._runs = 0

    def run(self, case: ColdGroupCase) -> ColdGroupOutcome:
        """Run a case once; raises FanoutError if it does not finish, or finishes with the wrong bytes."""
        self._runs += 1
        cluster = self._cluster
        self._cluster.request_all(case.hosts, FanoutCommand("prepare"))
        port = cluster[STORE].request(FanoutCommand("listen")).port if case.is_limit else 0
        watched = (STORE, *case.hosts)
        before = {host: cluster.lab.traffic(host) for host in watched}
        used, started = cluster.processors(), time.monotonic()
        responses = self._bare_transfer(case, port) if case.is_limit else self._fork(case)
        busy, _ = cluster.processors().busy_since(used)
        traffic = {host: _since(cluster.lab.traffic(host), before[host]) for host in watched}
        if not case.is_limit:
            self._check(responses)
        self._cluster.request_all(tuple(responses), FanoutCommand("release"))
        if case.killed_host is not None:
            cluster.restart(case.killed_host)
        return ColdGroupOutcome(started, responses, traffic, busy)

    def _fork(self, case: ColdGroupCase) -> dict[str, FanoutResponse]:
        begun = time.monotonic()
        model = f"run{self._runs}"
        snapshot = URIS["snapshot"] if case.stored_form == "snapshot" else ""
        checkpoint = URIS["checkpoint"] if case.stored_form == "checkpoint" else ""
        command = FanoutCommand("fork", model, snapshot=snapshot, checkpoint=checkpoint, independent=case.independent)
        for host in case.hosts:
            self._cluster[host].send(command)
        if case.killed_host is not None:
            time.sleep(max(0.0, begun + KILLED_AT * self._cluster.min_transfer_s - time.monotonic()))
            self._cluster.kill(case.killed_host)
        left = [host for host in case.hosts if host != case.killed_host]
        return {host: self._cluster[host].receive(self._timeout_s(case)) for host in left}

    def _bare_transfer(self, case: ColdGroupCase, port: int) -> dict[str, FanoutResponse]:
        sender, receiver = self._cluster[STORE], self._cluster[case.hosts[0]]
        sender.send(FanoutCommand("send"))
        address = self._cluster.lab.address(STORE)
        received = receiver.request(FanoutCommand("receive", address=address, port=port), self._timeout_s(case))
        sender.receive()
        return {receiver.name: received}

    def _check(self, responses: dict[str, FanoutResponse]) -> None:
        """Check the bytes with a hash that the transfer does not use."""
        for host, checked in self._cluster.request_all(tuple(responses), FanoutCommand("check")).items():
            if checked.sha256 != self._cluster.sha256:
                raise FanoutError(f"{host} has other bytes than were stored")

    def _timeout_s(self, case: ColdGroupCase) -> float:
        return STEP_S + TIMEOUT_FACTOR * self._cluster.min_transfer_s * case.min_time


def _since(now: Traffic, before: Traffic) -> Traffic:
    return Traffic(now.sent - before.sent, now.received - before.received)
