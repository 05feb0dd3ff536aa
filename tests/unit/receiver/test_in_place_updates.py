"""In-place updates during a fork: the target ends with the bytes of one version, or with none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from rfork.errors import NoSource
from rfork.image.chunks import MIB, ChunkState
from rfork.image.memory import Image
from rfork.schema import ChunkAssignment, Plan, SourceFault
from rfork.source.seed import Seed
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import (
    CHUNKS,
    NEVER_S,
    Fleet,
    Script,
    Target,
    content_hash,
    image,
    plan,
    route,
    settings,
)

ALL = (0, CHUNKS)
LAST = CHUNKS - 1


def update(seed: Seed, version: int) -> None:
    """Update all weights in place."""
    with seed.updating():
        write_version(seed.image, version)


def write_version(source_image: Image, version: int) -> None:
    """Write the bytes of this version into the image."""
    for region, other in zip(source_image.regions, image(version).regions, strict=True):
        region.copy_(other)


def with_weights_id(plan: Plan, weights_id: str | None) -> Plan:
    """Return the plan with this weights id."""
    return plan.model_copy(update={"weights_id": weights_id})


def can_serve(seed: Seed, target: Target) -> bool:
    """Return whether the seed has weights and the target has no chunks of others."""
    current_manifest = target.serving_state.manifests[-1] if len(target.chunk_state) else None
    return seed.manifest is not None and current_manifest in (None, seed.manifest)


def corrupt_chunk(source_image: Image, chunk: int) -> None:
    """Change one byte of a chunk without announcing it."""
    with source_image.writable(chunk * MIB, chunk * MIB + 1) as (view,):
        view[0] ^= 0xFF


def test_an_unannounced_write_to_a_seed_is_detected(fleet: Fleet) -> None:
    """The changed chunk is read again from another source, and the seed is reported."""
    source_image = image(1)
    wrong = fleet.source("wrong", source_image)
    right = fleet.source("right", image(1))
    script = Script([lambda: plan(route(wrong, ALL)), lambda: plan(route(right, ALL))])
    target = Target(fleet, script)
    target.chunk_state.subscribe(lambda: corrupt_chunk(source_image, LAST) if len(target.chunk_state) == 1 else None)
    target.run()
    assert (content_hash(image(1)), [("wrong", "source", "SourceCorrupt")]) == (
        content_hash(target.image),
        script.faults,
    )


def test_an_unannounced_write_to_a_relay_is_detected(fleet: Fleet) -> None:
    """A verified chunk changes in the relay's memory: its reader blames the relay, not the upstream seed."""
    source_image = image(1)
    manifest = source_image.manifest()
    seed = fleet.source("seed", image(1), manifest=manifest)
    chunk_state = ChunkState(source_image.layout.chunks, range(CHUNKS))
    relay = fleet.source("relay", source_image, chunk_state=chunk_state, manifest=manifest)
    corrupt_chunk(source_image, 2)
    script = Script([lambda: plan(route(relay, ALL)), lambda: plan(route(seed, ALL))])
    target = Target(fleet, script)
    target.run()
    assert (content_hash(image(1)), [("relay", "source", "SourceCorrupt")]) == (
        content_hash(target.image),
        script.faults,
    )


@pytest.mark.parametrize("updates", [(2,), (2, 3)], ids=["once", "twice"])
def test_an_update_of_the_only_seed(fleet: Fleet, updates: Sequence[int]) -> None:
    """After each update the verified chunks are obsolete, and everything is read again from the same seed."""
    seed = fleet.source("seed", image(1))
    left = list(updates)

    def replan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        reported.extend(fault.error for fault in faults)
        return plan(route(seed, ALL)) if can_serve(seed, target) else plan(reason="it serves other weights")

    reported: list[str] = []
    target = Target(fleet, replan, settings(max_inflight_chunks=1))
    target.chunk_state.subscribe(lambda: update(seed, left.pop(0)) if left and len(target.chunk_state) == 2 else None)
    stats = target.run()
    reason = "the weights changed at the source: started over, 2 chunks are compared again"
    assert content_hash(image(updates[-1])) == content_hash(target.image)
    assert [reason] * len(updates) == [str(error) for error in target.transfer.reasons if reason in str(error)]
    assert {"SourceWeightsChanged"} == set(reported) == set(target.reasons)
    assert 2 * len(updates) <= stats.bytes_repeated // MIB <= 3 * len(updates)


@pytest.mark.parametrize("named", [True, False], ids=["named", "by version"])
def test_a_plan_of_another_version_restarts_the_fork(fleet: Fleet, named: bool) -> None:
    """Two chunks of the old version had been read; the source of the new version is not blamed."""
    seed = fleet.source("seed", image(1))
    versions = ["v1", "v2"]

    def replan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        reported.extend(fault.error for fault in faults)
        if seed.manifest is None:
            return plan()
        version, weights_id = versions[seed.generation > 0], seed.manifest.weights_id if named else None
        return plan(route(seed, ALL)).model_copy(update={"version": version, "weights_id": weights_id})

    reported: list[str] = []
    target = Target(fleet, replan, settings(max_inflight_chunks=1))
    target.chunk_state.subscribe(
        lambda: update(seed, 2) if not seed.generation and len(target.chunk_state) == 2 else None
    )
    target.run()
    assert content_hash(image(2)) == content_hash(target.image)
    assert reported == ["SourceWeightsChanged"]
    assert "started over" in str(target.transfer.reasons)


def test_unchanged_chunks_are_kept_after_an_update(fleet: Fleet) -> None:
    """Chunks in the image are compared with the new manifest and not read again."""
    seed = fleet.source("seed", image(1))
    updates = [1]

    def replan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        return plan(route(seed, ALL)) if can_serve(seed, target) else plan(reason="it serves other weights")

    target = Target(fleet, replan, settings(max_inflight_chunks=1))
    target.chunk_state.subscribe(
        lambda: update(seed, updates.pop()) if updates and len(target.chunk_state) == 3 else None
    )
    stats = target.run()
    assert (content_hash(image(1)), {"SourceWeightsChanged"}) == (content_hash(target.image), set(target.reasons))
    assert stats.bytes_repeated <= MIB  # the chunk in flight


def test_a_fenced_seed_that_never_returns_ends_the_fork(fleet: Fleet) -> None:
    """The verified chunks are dropped, and the fork waits for another source up to the timeout."""
    seed = fleet.source("seed", image(1))
    script = Script([lambda: plan(route(seed, ALL)), plan])
    target = Target(fleet, script, settings(no_source_timeout_s=0.5))
    target.chunk_state.subscribe(lambda: seed.fence() if len(target.chunk_state) == 2 else None)
    with pytest.raises(NoSource):
        target.run()
    assert ((), True) == (target.chunk_state.verified, len(script.faults_by_request) > 3)


def test_a_seed_that_fails_otherwise_is_not_waited_for(fleet: Fleet) -> None:
    """Without new weights to expect, the fork ends immediately and keeps its verified chunks."""
    seed = fleet.source("seed", image(1), FaultInjection(dies_after_bytes=2 * MIB))
    script = Script([lambda: plan(route(seed, ALL)), plan])
    target = Target(
        fleet, script, settings(max_inflight_chunks=1)
    )  # with a second read in flight, the number of verified chunks would vary
    with pytest.raises(NoSource):
        target.run()
    assert (2, 2) == (len(script.faults_by_request), len(target.chunk_state))


def test_an_update_upstream_of_a_relay_restarts_its_readers(fleet: Fleet) -> None:
    """The relay starts again, its reader follows, and both end with the new bytes."""
    seed = fleet.source("seed", image(1))
    relay_image = image()
    chunk_state = ChunkState(relay_image.layout.chunks)
    relay = fleet.source("relay", relay_image, chunk_state=chunk_state, knows_manifest=False)
    lower_started = threading.Event()

    def seed_plan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        current_manifest = relay.manifest if len(chunk_state) else None
        is_consistent = seed.manifest is not None and current_manifest in (None, seed.manifest)
        return plan(route(seed, ALL)) if is_consistent else plan()

    def relay_plan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        return plan(route(relay, ALL)) if not relay.generation or can_serve(relay, lower) else plan()

    def change() -> None:
        if len(chunk_state) == 3 and not seed.generation:
            lower_started.wait(NEVER_S)
            update(seed, 2)

    upper = Target(
        fleet,
        seed_plan,
        settings(max_inflight_chunks=1),
        target_image=relay_image,
        chunk_state=chunk_state,
        serving_state=relay,
    )
    lower = Target(fleet, relay_plan)
    chunk_state.subscribe(change)
    lower.chunk_state.subscribe(lower_started.set)
    reading = threading.Thread(target=lower.run)
    reading.start()
    upper.run()
    reading.join()
    assert [content_hash(image(2))] * 2 == [content_hash(upper.image), content_hash(lower.image)]
    assert [{"SourceWeightsChanged"}] * 2 == [set(upper.reasons), set(lower.reasons)]
    assert seed.manifest == relay.manifest


def test_a_partial_source_of_the_old_weights_is_not_used(fleet: Fleet) -> None:
    """It has yet to drop its chunks itself, so the fork waits for a complete source of the new weights."""
    seed = fleet.source("seed", image(1))
    old = seed.manifest
    assert old is not None
    partial_chunks = ChunkState(old.layout.chunks, range(4))
    stale_source = fleet.source("leftover", image(1), chunk_state=partial_chunks, manifest=old)

    def updated_plan() -> Plan:
        update(seed, 2)
        return plan(route(seed, ALL))

    partial_plan = with_weights_id(plan(route(stale_source, (0, 4)), retry_after_s=0.01), old.weights_id)
    plan_factories = [lambda: partial_plan, updated_plan]

    def replan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        if seed.manifest is not None:
            return with_weights_id(plan(route(seed, ALL)), seed.manifest.weights_id)
        # The obsolete chunks are dropped once none is in flight.
        return plan_factories.pop(0)() if not len(target.chunk_state) else plan()

    target = Target(fleet, replan)
    target.chunk_state.subscribe(lambda: seed.fence() if not seed.generation and len(target.chunk_state) == 2 else None)
    target.run()
    assert (content_hash(image(2)), {"seed"}, []) == (
        content_hash(target.image),
        {share.source_id for share in target.transfer.stats.shares},
        plan_factories,
    )


def test_weights_that_are_changed_back_are_accepted(fleet: Fleet) -> None:
    """A complete source of the dropped weights is read from."""
    seed = fleet.source("seed", image(1))
    weights_id = image(1).manifest().weights_id

    def updated_plan() -> Plan:
        seed.publish()
        return with_weights_id(plan(route(seed, ALL)), weights_id)

    script = Script([lambda: with_weights_id(plan(route(seed, ALL)), weights_id), plan, updated_plan])
    target = Target(fleet, script)
    target.chunk_state.subscribe(
        lambda: seed.fence() if script.faults_by_request == [()] and len(target.chunk_state) == 2 else None
    )
    target.run()
    assert content_hash(image(1)) == content_hash(target.image)
