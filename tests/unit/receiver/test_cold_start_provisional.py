"""Chunks of provisional images: which may be combined, and which are refused."""

from __future__ import annotations

import pytest

from rfork.errors import NoSource
from rfork.image.chunks import MIB
from rfork.schema import Plan
from tests.unit.receiver.cold_start_targets import (
    ALL,
    ORIGIN,
    RelayTarget,
    X,
    Y,
    failing_leader,
    planner_script,
    provisional_relay,
    run_concurrently,
    verified_by_source,
    wait_for_chunks,
)
from tests.unit.receiver.fleet import (
    CHUNKS,
    Files,
    Fleet,
    Target,
    content_hash,
    image,
    plan,
    reads,
    route,
    settings,
)


@pytest.mark.parametrize("differs", range(3))
def test_different_files_of_one_origin_are_not_mixed(fleet: Fleet, differs: int) -> None:
    """If the local files differ from any verified chunk, the fork drops all chunks and reads everything."""
    source_image, other = image(1), image(1)
    other.regions[0][differs * MIB + 5] ^= 1
    other.regions[1][MIB + 5] ^= 1
    leader, follower_files = failing_leader(fleet, source_image), Files(other)
    script = planner_script(
        lambda: plan(route(leader.relay, ALL)),
        plan(storage=[reads(follower_files, (3, 6))]),
        plan(storage=[reads(follower_files, ALL)]),
    )
    follower = RelayTarget(fleet, "follower", script, [follower_files])
    run_concurrently(leader, follower)
    assert content_hash(other) == content_hash(follower.image)
    assert {"leader": 3, "checkpoint:file:///files": 6} == verified_by_source(follower.target)
    provisional_id = follower.target.chunk_state.provisional_id or ""
    assert 1 == follower.relay.generation
    assert provisional_id.startswith(f"{ORIGIN}-")


def test_files_of_another_origin_are_not_mixed(fleet: Fleet) -> None:
    """Chunks of one origin are dropped when the planner sends the fork to files of another."""
    source_image, other = image(1), image(2)
    leader, follower_files = failing_leader(fleet, source_image), Files(other, origin="b" * 32)
    script = planner_script(lambda: plan(route(leader.relay, ALL)), plan(storage=[reads(follower_files, ALL)]))
    follower = RelayTarget(fleet, "follower", script, [follower_files])
    run_concurrently(leader, follower)
    assert content_hash(other) == content_hash(follower.image)
    assert "b" * 32 == follower.target.chunk_state.provisional_id


def test_a_different_manifest_drops_only_chunks_that_differ(fleet: Fleet) -> None:
    """Chunks whose digest differs at a complete source are read again; equal ones are kept."""
    source_image, right = image(1), image(1)
    right.regions[0][0] ^= 1
    files = Files(source_image, fails_at=3 * MIB)
    seed = fleet.source("seed", right)
    script = planner_script(plan(storage=[reads(files, ALL)]), plan(route(seed, ALL)))
    target = Target(fleet, script, settings(max_inflight_chunks=1), files=[files])
    target.run()
    assert content_hash(right) == content_hash(target.image)
    assert [(0,)] == target.serving_state.dropped
    assert {"checkpoint:file:///files": 3, "seed": 4} == verified_by_source(target)
    assert [seed.manifest] == target.serving_state.manifests
    assert target.chunk_state.provisional_id is None


def test_a_second_provisional_image_is_refused_while_the_first_is_served(fleet: Fleet) -> None:
    """The first image stays valid as long as a source serves it."""
    source_image, other = image(1), image(2)
    first = provisional_relay(fleet, "first", source_image, X, [0, 1, 2])
    second = provisional_relay(fleet, "second", other, Y, [3, 4, 5])

    def remaining_plan() -> Plan:
        first.set_manifest(source_image.manifest())
        for chunk in range(3, CHUNKS):
            first.chunk_state.mark_verified(chunk, source_image.manifest().digests[chunk])
        return plan(route(first, ALL))

    def mixed_plan() -> Plan:
        wait_for_chunks(target.chunk_state, 3)  # so that this source is the first
        return plan(route(first, (0, 4)), route(second, (4, 6)))

    script = planner_script(plan(route(first, (0, 3)), retry_after_s=0.01), mixed_plan, remaining_plan)
    target = Target(fleet, script)
    target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert [("second", "source", "SourceWeightsChanged")] == script.faults


def test_a_new_provisional_image_replaces_one_without_sources(fleet: Fleet) -> None:
    """When no source of the first image is left, its chunks are dropped and the new image is read completely."""
    source_image, other = image(1), image(2)
    first = provisional_relay(fleet, "first", source_image, X, [0, 1, 2])
    second = provisional_relay(fleet, "second", other, Y, range(CHUNKS))

    def complete_plan() -> Plan:
        second.set_manifest(other.manifest())
        return plan(route(second, ALL))

    def remaining_plan() -> Plan:
        wait_for_chunks(target.chunk_state, 3)  # so that no chunk of the first image is assigned any more
        return plan(route(second, (3, 6)))

    script = planner_script(plan(route(first, (0, 3))), remaining_plan, complete_plan)
    target = Target(fleet, script)
    target.run()
    assert content_hash(other) == content_hash(target.image)
    assert [(0, 1, 2)] == target.serving_state.dropped


def test_chunks_without_digests_are_refused(fleet: Fleet) -> None:
    """A source that offers a provisional image without digests is reported as corrupt."""
    source_image = image(1)
    relay = provisional_relay(fleet, "relay", source_image, X, [0])
    progress_since = relay.progress_since

    def without_digests(known: tuple[tuple[int, int], ...]) -> object:
        progress = progress_since(known)
        return type(progress)(progress.chunks, progress.draining, (), progress.provisional_id)

    relay.progress_since = without_digests  # type: ignore[method-assign, assignment]
    script = planner_script(plan(route(relay, ALL)), plan(reason="no other source"))
    with pytest.raises(NoSource):
        Target(fleet, script).run()
    assert [("relay", "source", "SourceCorrupt")] == script.faults
