"""Images that only the engine's loader can fill."""

from __future__ import annotations

import threading
import time

from rfork.image.chunk_state import ChunkState
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.schema import StorageAssignment
from rfork.source.seed import Seed
from tests.unit.receiver.cold_start_targets import (
    ALL,
    RelayTarget,
    X,
    planner_script,
    provisional_relay,
    verified_by_source,
)
from tests.unit.receiver.fleet import CHUNKS, NEVER_S, Fleet, Target, content_hash, image, plan, route


def reports_relayed_activity(seed: Seed) -> bool:
    activity = seed.progress_since(()).storage_activity
    return activity is not None and activity.relayed


def test_a_relay_forwards_that_its_source_is_loading(fleet: Fleet) -> None:
    """A target two hops downstream of the leader is notified as well."""
    source_image = image(1)
    leader = fleet.source(
        "leader", source_image, chunk_state=ChunkState(source_image.layout.chunks), knows_manifest=False
    )
    leader.report_storage_activity(time.monotonic)
    relay = RelayTarget(fleet, "relay", planner_script(plan(route(leader, ALL))))
    activity_seen = threading.Event()
    with relay.relay.on_change(lambda: activity_seen.set() if reports_relayed_activity(relay.relay) else None):
        running = threading.Thread(target=relay.target.run)
        running.start()
        was_seen = activity_seen.wait(NEVER_S)
        manifest = source_image.manifest()
        leader.set_manifest(manifest)
        for chunk, digest in enumerate(manifest.digests):
            leader.chunk_state.mark_verified(chunk, digest)
        running.join()
    assert was_seen
    assert not reports_relayed_activity(relay.relay)
    assert content_hash(source_image) == content_hash(relay.image)


LOADER = StorageAssignment(kind="loader", uri="", chunks=(ALL,))


def test_the_elected_target_runs_its_loader(fleet: Fleet) -> None:
    """The loader fills the image on the caller's thread, and every byte counts as read from storage."""
    source_image = image(1)
    threads: list[str] = []
    target = Target(fleet, planner_script(plan(storage=[LOADER])), run_loader=lambda read: load(read))

    def load(read: StorageAssignment) -> Manifest:
        threads.append(threading.current_thread().name)
        for target_region, source_region in zip(target.image.regions, source_image.regions, strict=True):
            target_region.copy_(source_region)
        return target.image.manifest()

    stats = target.run()
    assert [threading.current_thread().name] == threads
    assert [True, False] == target.serving_state.storage_activity
    assert [source_image.manifest()] == target.serving_state.manifests
    assert {"loader:": CHUNKS} == verified_by_source(target)
    assert CHUNKS * MIB == stats.bytes_read
    assert 0 == target.transfer.measurable_bytes  # all bytes arrive in one step, so no rate is reported
    assert ALL == target.chunk_state.verified[0]


def test_a_failed_loader_is_reported_and_another_source_requested(fleet: Fleet) -> None:
    """The planner receives a storage fault, and a seed that has appeared meanwhile serves everything."""
    source_image = image(1)
    seed = fleet.source("seed", source_image)
    script = planner_script(plan(storage=[LOADER]), plan(route(seed, ALL)))
    target = Target(fleet, script)
    target.run()
    assert [("target", "storage", "StorageError")] == script.faults
    assert content_hash(source_image) == content_hash(target.image)


def test_verified_chunks_are_dropped_before_a_loader_runs(fleet: Fleet) -> None:
    """Nothing else is read while the loader writes."""
    source_image = image(1)
    first = provisional_relay(fleet, "first", image(2), X, [0, 1])
    script = planner_script(plan(route(first, (0, 2))), plan(storage=[LOADER]))
    verified: list[int] = []
    target = Target(fleet, script, run_loader=lambda read: load(read))

    def load(read: StorageAssignment) -> Manifest:
        verified.append(len(target.chunk_state))
        for target_region, source_region in zip(target.image.regions, source_image.regions, strict=True):
            target_region.copy_(source_region)
        return target.image.manifest()

    target.run()
    assert [0] == verified
    assert [(0, 1)] == target.serving_state.dropped
    assert content_hash(source_image) == content_hash(target.image)
    assert () == first.report().readers
