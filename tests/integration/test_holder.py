"""`rfork hold`: images of weights without an engine, in real processes."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast
from uuid import uuid4

import pytest

from rfork.schema import HeldImage, HolderInfo, ScaleUp
from tests.conftest import StartRfork
from tests.integration.shared_memory.pairs import mapped_chunk_bytes
from tests.integration.test_in_place_updates import SLOW, WeightsFleet
from tests.integration.weights_node import MODEL, SIZES, Message, WeightsNode, sha256_of
from tests.processes import RforkProcess

READY = r'"event": ?"ready"'
IMAGE_BYTES = sum(SIZES)
LOCAL = {"RFORK_TRANSPORTS": "shared_memory,http"}
WAIT_S = 60.0


class HolderFleet(WeightsFleet):
    """A fleet with seeds on one host, and a holder and engines on another one."""

    def __init__(self, start: StartRfork, stack: contextlib.ExitStack, **options: str) -> None:
        """`options`: environment of the planner."""
        super().__init__(start, stack, **options)
        self.host = f"near-{uuid4().hex[:8]}"
        """Unique: only one holder runs on a host."""
        self._start = start

    def hold(self, *arguments: str, until: str | None = READY, **options: str) -> RforkProcess:
        """Start a holder."""
        environment = {
            **LOCAL,
            "RFORK_PLANNER": self.url,
            "RFORK_NODE_NAME": self.host,
            "RFORK_DRAIN_TIMEOUT_S": "0",
            "RFORK_SOURCE_IDLE_TIMEOUT_S": "5",
            "RFORK_LOG_LEVEL": "debug",
            **options,
        }
        return self._start("hold", "--memory", "100MB", "--json", *arguments, until=until, environment=environment)

    def seed_of(self, number: int, **options: str) -> WeightsNode:
        """Start a seed of version ``v<number>`` on another host."""
        node = self.node(RFORK_VERSION=f"v{number}", RFORK_NODE_NAME="far", **options)
        node.request("seed", number)
        return node

    def engine(self, version: str = "v1") -> WeightsNode:
        """Start an instance on the holder's host."""
        return self.node(RFORK_VERSION=version, RFORK_NODE_NAME=self.host, **LOCAL)

    def fork(self, version: str = "v1") -> tuple[WeightsNode, Message]:
        """Fork on the holder's host, and return the engine and its report."""
        engine = self.engine(version)
        engine.request("fork")
        return engine, engine.request("report")

    def holders(self) -> list[HolderInfo]:
        """Return the holders on the host."""
        return self.client.holders(host=self.host)

    def images(self) -> dict[str, HeldImage]:
        """Return the complete images of the host's holders, by version."""
        images = [image for holder in self.holders() for image in holder.report.images]
        return {cast(str, image.version): image for image in images if image.state == "ready"}

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Poll the planner until the condition holds. Raises TimeoutError."""
        until = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.holders()}")
            time.sleep(0.05)

    def wait_for_images(self, *versions: str) -> dict[str, HeldImage]:
        """Block until the holder has exactly these versions; return the images by version."""
        self.wait_until(lambda: set(versions) == set(self.images()))
        return self.images()

    def announce(self, version: str) -> None:
        """Announce a replica for the host."""
        self.client.announce(
            ScaleUp(scaleup_id=f"up-{version}", model=MODEL, version=version, replicas=1, hosts=(self.host,))
        )


@pytest.fixture
def fleet(rfork_process: StartRfork) -> Iterator[HolderFleet]:
    """A fleet with an empty planner."""
    with contextlib.ExitStack() as stack:
        yield HolderFleet(rfork_process, stack)


def test_an_engine_maps_the_image_of_a_holder(fleet: HolderFleet) -> None:
    """It reads nothing over the network, also after the seed was killed, and after a restart of the engine."""
    seed = fleet.seed_of(1)
    holder = fleet.hold("--models", MODEL)
    image = fleet.wait_for_images("v1")["v1"]

    engine, report = fleet.fork()
    assert sha256_of(1) == report["sha256"]
    assert [image.instance_id] == report["sources"]
    assert fleet.images()["v1"].instance_id == image.instance_id

    seed.signal(signal.SIGKILL)
    engine.signal(signal.SIGKILL)
    engine, report = fleet.fork()
    assert sha256_of(1) == report["sha256"]
    assert [image.instance_id] == report["sources"]

    in_holder, in_engine = mapped_chunk_bytes(holder.pid), mapped_chunk_bytes(engine.pid)
    assert in_holder["Rss"] > 0.9 * IMAGE_BYTES
    assert in_engine["Rss"] > 0.9 * IMAGE_BYTES
    assert in_holder["Anonymous"] == 0
    assert in_holder["Pss"] + in_engine["Pss"] < 1.1 * IMAGE_BYTES
    fleet.wait_until(lambda: fleet.images()["v1"].used)

    # Killed: what the engine has mapped stays.
    holder.signal(signal.SIGKILL)
    holder.wait()
    assert sha256_of(1) == engine.request("sha256")["sha256"]


def test_a_holder_keeps_two_versions(fleet: HolderFleet) -> None:
    """Engines of either one map its image, without any seed."""
    seeds = [fleet.seed_of(number) for number in (1, 2)]
    fleet.hold("--models", f"{MODEL}@v1", "--models", f"{MODEL}@v2")
    images = fleet.wait_for_images("v1", "v2")
    for seed in seeds:
        seed.signal(signal.SIGKILL)
    for number in (1, 2):
        _, report = fleet.fork(f"v{number}")
        assert sha256_of(number) == report["sha256"]
        assert [images[f"v{number}"].instance_id] == report["sources"]


def test_the_least_recently_used_image_is_evicted(fleet: HolderFleet) -> None:
    """Its memory is released before the next image is fetched."""
    seeds = [fleet.seed_of(number) for number in (1, 2, 3)]
    memory = str(2 * IMAGE_BYTES + 1000)
    holder = fleet.hold("--memory", f"{memory}B")
    for version in ("v1", "v2"):
        fleet.announce(version)
    fleet.wait_for_images("v1", "v2")

    fleet.announce("v3")
    fleet.wait_until(lambda: [refused for each in fleet.holders() for refused in each.report.refused])
    assert {"v1", "v2"} == set(fleet.images())

    engine, _ = fleet.fork("v1")
    engine.signal(signal.SIGKILL)
    for version in ("v1", "v2"):
        fleet.client.withdraw(f"up-{version}")
    fleet.wait_for_images("v1", "v3")
    assert mapped_chunk_bytes(holder.pid)["Rss"] <= 2 * IMAGE_BYTES
    assert len(seeds) == 3


def test_an_engine_survives_a_holder_that_is_killed_in_mid_fetch(fleet: HolderFleet) -> None:
    """The engine reads from the holder, which is a relay, and then from the seed."""
    fleet.seed_of(1, **SLOW, RFORK_MAX_READERS="1")
    holder = fleet.hold("--models", MODEL)
    fleet.wait_until(lambda: [image for each in fleet.holders() for image in each.report.images])
    engine = fleet.engine()
    engine.request("fork")
    engine.wait_for_chunks(2)
    holder.signal(signal.SIGKILL)
    report = engine.request("report")
    assert "forked" == report["outcome"]
    assert sha256_of(1) == report["sha256"]


def test_weights_that_change_during_a_fetch_are_fetched_again(fleet: HolderFleet) -> None:
    """The holder ends with the new ones."""
    seed, _ = fleet.seed(RFORK_NODE_NAME="far", **SLOW)
    fleet.hold("--models", MODEL)
    fleet.wait_until(lambda: [image for each in fleet.holders() for image in each.report.images])
    seed.request("update", 2)
    fleet.wait_until(fleet.images)
    _, report = fleet.fork(next(iter(fleet.images())))
    assert sha256_of(2) == report["sha256"]


def test_a_stopped_holder_leaves(fleet: HolderFleet) -> None:
    """Neither the holder nor its images stay with the planner, and a fork in progress is not disturbed."""
    fleet.seed_of(1)
    holder = fleet.hold("--models", MODEL, RFORK_DRAIN_TIMEOUT_S="30")
    image = fleet.wait_for_images("v1")["v1"]
    engine, _ = fleet.fork()
    holder.signal(signal.SIGTERM)
    assert 0 == holder.wait()
    assert "holder ended: stopped" in holder.stderr
    assert [] == fleet.holders()
    assert image.instance_id not in [each.report.instance_id for each in fleet.client.instances(model=MODEL)]
    assert sha256_of(1) == engine.request("sha256")["sha256"]


def test_a_restarted_holder_fetches_its_images_again(fleet: HolderFleet) -> None:
    """The planner does not mistake it for the killed one, whose image may still be on record."""
    fleet.seed_of(1)
    killed = fleet.hold("--models", MODEL)
    before = fleet.wait_for_images("v1")["v1"]
    killed.signal(signal.SIGKILL)
    killed.wait()
    restarted = fleet.hold("--models", MODEL)
    restarted.wait_for("image ready")
    assert "image refused" not in restarted.stderr
    _, report = fleet.fork()
    assert sha256_of(1) == report["sha256"]
    assert [before.instance_id] != report["sources"]
    assert mapped_chunk_bytes(restarted.pid)["Rss"] > 0.9 * IMAGE_BYTES


def test_a_second_holder_on_a_host_is_refused(fleet: HolderFleet) -> None:
    """Its error names the host; a one-shot holder may run on the same host."""
    fleet.hold()
    second = fleet.hold(until="already running")
    assert 2 == second.wait()
    assert f"a holder is already running on {fleet.host}" in second.stderr
    one_shot = fleet.hold("--one-shot", "--models", "unknown/model", until="holder ended")
    assert 0 == one_shot.wait()


def test_a_one_shot_holder_ends_once_the_engine_has_its_weights(fleet: HolderFleet) -> None:
    """The engine maps them, and keeps them."""
    fleet.seed_of(1)
    holder = fleet.hold("--one-shot", "--models", f"{MODEL}@v1")
    image = fleet.wait_for_images("v1")["v1"]
    engine, report = fleet.fork()
    assert [image.instance_id] == report["sources"]
    assert 0 == holder.wait()
    assert "the engine has its weights" in holder.stderr
    assert sha256_of(1) == engine.request("sha256")["sha256"]


def test_an_unreachable_planner_does_not_stop_a_holder(fleet: HolderFleet) -> None:
    """It keeps its images, and can be stopped."""
    fleet.seed_of(1)
    holder = fleet.hold("--models", MODEL)
    fleet.wait_for_images("v1")
    fleet.planner.signal(signal.SIGKILL)
    holder.wait_for("planner unreachable")
    assert mapped_chunk_bytes(holder.pid)["Rss"] > 0.9 * IMAGE_BYTES
    holder.signal(signal.SIGTERM)
    assert 0 == holder.wait()


def test_a_holder_reads_snapshots(fleet: HolderFleet, rfork_process: StartRfork, tmp_path: Path) -> None:
    """No instance has the weights any more; the engine maps them."""
    seed = fleet.seed_of(1)
    environment = {"RFORK_PLANNER": fleet.url}
    written = rfork_process("snapshot", "write", str(tmp_path), "--name", MODEL, environment=environment)
    assert 0 == written.wait()
    seed.close()
    assert [] == fleet.client.instances(model=MODEL)
    fleet.hold("--from", str(tmp_path))
    image = fleet.wait_for_images("v1")["v1"]
    _, report = fleet.fork()
    assert sha256_of(1) == report["sha256"]
    assert [image.instance_id] == report["sources"]


def test_the_holder_is_described_as_json(fleet: HolderFleet) -> None:
    """The ready event has its report."""
    holder = fleet.hold("--models", f"{MODEL}@v7")
    event = json.loads(holder.wait_for(rf"^.*{READY}.*$").group())
    assert 100_000_000 == event["memory_bytes"]
    assert [{"model": MODEL, "version": "v7"}] == event["selectors"]
