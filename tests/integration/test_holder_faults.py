"""Holders whose prediction was wrong, and holders that were killed while the planner still lists them."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from typing import Final

import httpx
import pytest

from tests.conftest import StartRfork
from tests.integration.test_holder import IMAGE_BYTES, HolderFleet
from tests.integration.weights_node import MODEL, REVERSED_SIZES, sha256_of

TTL_S: Final = "8"
"""Long enough for an engine's fork, and short enough to wait for."""
TIMEOUT_S: Final = 60.0
PREFETCHES: Final = re.compile(r'^rfork_planner_prefetches_total\{result="(\w+)"\} (\S+)$', re.MULTILINE)


@pytest.fixture
def faulty_fleet(rfork_process: StartRfork) -> Iterator[HolderFleet]:
    """A fleet with an empty planner, which soon forgets what is silent."""
    with contextlib.ExitStack() as stack:
        yield HolderFleet(rfork_process, stack, RFORK_PLANNER_INSTANCE_TTL_S=TTL_S)


def prefetches(fleet: HolderFleet) -> dict[str, float]:
    """Return the planner's counts of prefetches that are not 0, by result."""
    text = httpx.get(f"{fleet.url}/metrics", trust_env=False, timeout=TIMEOUT_S).text
    return {result: float(count) for result, count in PREFETCHES.findall(text) if float(count)}


def ready_layouts(fleet: HolderFleet) -> set[str]:
    """Return the layouts of the complete images of the host's holders."""
    images = [image for holder in fleet.holders() for image in holder.report.images]
    return {image.layout_id for image in images if image.state == "ready"}


def holder_ids(fleet: HolderFleet) -> set[str]:
    """Return the ids of the host's holders."""
    return {holder.report.holder_id for holder in fleet.holders()}


def sources_of_forks(fleet: HolderFleet) -> list[dict[str, int]]:
    """Return the bytes that each ended fork read, those of holders included, by source."""
    events = [json.loads(line) for line in fleet.planner.stderr.splitlines() if line.startswith("{")]
    return [event["sources"] for event in events if event["event"] == "fork ended"]


def test_a_prefetch_in_another_layout(faulty_fleet: HolderFleet) -> None:
    """The engine reads its own layout from the seed; the prefetch counts once, as `wrong_layout`, and stays in memory
    that is free.
    """
    fleet = faulty_fleet
    fleet.seed_of(1)
    holder = fleet.hold()
    fleet.announce("v1")
    predicted = fleet.wait_for_images("v1")["v1"]

    seed = fleet.node(RFORK_VERSION="v1", RFORK_NODE_NAME="far")
    engine = fleet.engine()
    for node in (seed, engine):
        node.request("reverse")
    seed_id = seed.request("seed", 1)["id"]
    assert {predicted.layout_id} == ready_layouts(fleet)

    engine.request("fork")
    report = engine.request("report")
    assert "forked" == report["outcome"]
    assert sha256_of(1, REVERSED_SIZES) == report["sha256"]
    assert [seed_id] == report["sources"]
    fleet.wait_until(lambda: prefetches(fleet) == {"wrong_layout": 1})

    fleet.wait_until(lambda: len(ready_layouts(fleet)) == 2)
    assert predicted.layout_id in ready_layouts(fleet)
    holder.signal(signal.SIGTERM)
    assert 0 == holder.wait()
    assert {"wrong_layout": 1} == prefetches(fleet)


def test_a_prefetch_of_another_version(faulty_fleet: HolderFleet) -> None:
    """The engine reads its own version from the seed; the prefetch is kept while it is announced, and counts as
    `unused` once the engine's image replaces it.
    """
    fleet = faulty_fleet
    fleet.seed_of(1)
    seed = fleet.node(RFORK_VERSION="v2", RFORK_NODE_NAME="far")
    seed_id = seed.request("seed", 2)["id"]
    fleet.hold("--memory", f"{IMAGE_BYTES + 1000}B")
    fleet.announce("v1")
    fleet.wait_for_images("v1")

    _, report = fleet.fork("v2")
    assert "forked" == report["outcome"]
    assert sha256_of(2) == report["sha256"]
    assert [seed_id] == report["sources"]
    fleet.wait_until(lambda: [each.version for each in fleet.holders()[0].report.refused] == ["v2"])
    assert {"v1"} == set(fleet.images())
    assert {} == prefetches(fleet)

    fleet.client.withdraw("up-v1")
    fleet.wait_for_images("v2")
    assert {"unused": 1} == prefetches(fleet)


def test_a_killed_holder_that_is_still_listed(faulty_fleet: HolderFleet) -> None:
    """Forks that start before its record expires read nothing from it; a new holder of the host replaces it."""
    fleet = faulty_fleet
    fleet.seed_of(1)
    killed = fleet.hold("--models", MODEL)
    old_image = fleet.wait_for_images("v1")["v1"]
    (old_holder,) = holder_ids(fleet)
    engines = [fleet.engine(), fleet.engine()]
    for engine in engines:
        engine.request("id")  # its process has started

    killed.signal(signal.SIGKILL)
    killed.wait()
    assert {old_holder} == holder_ids(fleet)
    fleet.hold("--models", MODEL, until=None)
    for engine in engines:
        engine.request("fork")
        report = engine.request("report")
        assert "forked" == report["outcome"]
        assert sha256_of(1) == report["sha256"]
        fleet.wait_until(lambda: holder_ids(fleet) - {old_holder})  # the next one starts with both on record

    fleet.wait_until(lambda: old_holder not in holder_ids(fleet))
    assert 1 == len(holder_ids(fleet))
    image = fleet.wait_for_images("v1")["v1"]
    assert old_image.instance_id != image.instance_id
    assert old_image.instance_id not in [each.report.instance_id for each in fleet.client.instances(model=MODEL)]
    bytes_read = [sources.get(old_image.instance_id, 0) for sources in sources_of_forks(fleet)]
    assert {0} == set(bytes_read)
