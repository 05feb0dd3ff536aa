"""Transfers from real sources in this process: they end with the right bytes or a clear error."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rfork.errors import DeadlineExceeded, NoSource, PlannerRejected, PlannerUnreachable, RforkError
from rfork.image.chunks import MIB, ChunkState
from rfork.planner_client.lease import derive_key
from rfork.schema import ChunkAssignment, Plan, SourceFault
from rfork.source.seed import Seed
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import (
    ALL,
    CHUNKS,
    IMAGE_BYTES,
    Fleet,
    Script,
    Target,
    content_hash,
    image,
    lease,
    live_transfer_threads,
    plan,
    raise_plan_error,
    route,
    settings,
    verified_by_source,
)


def test_one_source_serves_all_chunks(fleet: Fleet) -> None:
    """Every byte is the source's, every chunk is read once, and the serving side receives the manifest."""
    source_image = image(1)
    seed = fleet.source("a", source_image)
    target = Target(fleet, Script([lambda: plan(route(seed, ALL))]))
    stats = target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert (IMAGE_BYTES, 0, 0) == (stats.bytes_read, stats.bytes_repeated, stats.replans)
    assert [seed.manifest] == target.serving_state.manifests
    assert [("a", "node", "memory", CHUNKS, IMAGE_BYTES)] == [
        (share.source_id, share.host, share.transport, share.verified_chunks, share.verified_bytes)
        for share in stats.sources
    ]


def test_three_sources_serve_concurrently(fleet: Fleet) -> None:
    """Each source serves the share that was planned for it."""
    source_image = image(1)
    manifest = source_image.manifest()
    a, b, c = (fleet.source(name, source_image, manifest=manifest) for name in "abc")
    target = Target(fleet, Script([lambda: plan(route(a, (0, 1)), route(b, (1, 3)), route(c, (3, 6)))]))
    target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert {"a": 1, "b": 2, "c": 3} == verified_by_source(target)


def test_an_empty_image_needs_no_plan(fleet: Fleet) -> None:
    """There is nothing to read, so no plan is requested."""
    script = Script([])
    Target(fleet, script, target_image=image(chunks=0)).run()
    assert [] == script.faults_by_request


def test_a_source_that_dies_is_replaced(fleet: Fleet) -> None:
    """Verified chunks are kept, no more than the window is read again, and the dead source is reported."""
    source_image = image(1)
    manifest = source_image.manifest()
    a = fleet.source("a", source_image, FaultInjection(dies_after_bytes=3 * MIB), manifest=manifest)
    b = fleet.source("b", source_image, manifest=manifest)
    script = Script([lambda: plan(route(a, ALL)), lambda: plan(route(b, ALL))])
    target = Target(fleet, script)
    stats = target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert {"a": 3, "b": 3} == verified_by_source(target)
    assert [("a", "source", "SourceUnavailable")] == script.faults
    assert (1, ["SourceUnavailable"]) == (stats.replans, target.reasons)
    assert stats.bytes_repeated <= 2 * MIB


def test_a_corrupt_chunk_is_discarded(fleet: Fleet) -> None:
    """Wrong bytes are never marked as verified, their source is blamed, and another one serves the chunk."""
    source_image = image(1)
    manifest = source_image.manifest()
    a = fleet.source("a", source_image, FaultInjection(corrupt_chunks={3}), manifest=manifest)
    b = fleet.source("b", source_image, manifest=manifest)
    script = Script([lambda: plan(route(a, ALL)), lambda: plan(route(b, ALL))])
    target = Target(fleet, script)
    stats = target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert [("a", "source", "SourceCorrupt")] == script.faults
    assert "chunk 3 does not match its digest" in str(target.transfer.reasons[0])
    assert (CHUNKS, MIB) == (sum(verified_by_source(target).values()), min(stats.bytes_repeated, MIB))


def test_without_verification_a_corrupt_chunk_is_accepted(fleet: Fleet) -> None:
    """Verification is turned off for measurements only."""
    source_image = image(1)
    seed = fleet.source("a", source_image, FaultInjection(corrupt_chunks={3}))
    target = Target(fleet, Script([lambda: plan(route(seed, ALL))]), settings(verify_chunks=False))
    target.run()
    assert content_hash(source_image) != content_hash(target.image)


def test_a_stalled_source_is_replaced(fleet: Fleet) -> None:
    """It stays connected but sends no more bytes."""
    source_image = image(1)
    manifest = source_image.manifest()
    a = fleet.source("a", source_image, FaultInjection(stalls_after_bytes=2 * MIB), manifest=manifest)
    b = fleet.source("b", source_image, manifest=manifest)
    script = Script([lambda: plan(route(a, ALL)), lambda: plan(route(b, ALL))])
    target = Target(fleet, script, settings(source_idle_timeout_s=1.0))
    target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert [("a", "source", "SourceTimeout")] == script.faults


def test_a_relay_without_new_chunks_is_replaced(fleet: Fleet) -> None:
    """The relay is alive but its own source is not; the limit is three times the idle timeout."""
    source_image = image(1)
    manifest = source_image.manifest()
    relay = fleet.source(
        "a", source_image, chunk_state=ChunkState(source_image.layout.chunks, [0, 1]), manifest=manifest
    )
    seed = fleet.source("b", source_image, manifest=manifest)
    script = Script([lambda: plan(route(relay, ALL)), lambda: plan(route(seed, ALL))])
    target = Target(fleet, script, settings(source_idle_timeout_s=0.5))
    target.run()
    assert {"a": 2, "b": 4} == verified_by_source(target)
    assert [("a", "source", "SourceTimeout")] == script.faults
    assert "offered no new chunk" in str(target.transfer.reasons[0])


def test_a_relay_serves_each_chunk_once_verified(fleet: Fleet) -> None:
    """Its reader has each chunk before the relay receives the next."""
    source_image = image(1)
    relay_chunks = ChunkState(source_image.layout.chunks)
    relay = fleet.source("a", source_image, chunk_state=relay_chunks, manifest=source_image.manifest())
    target = Target(fleet, Script([lambda: plan(route(relay, ALL))]))
    steps: list[int] = []

    def advance() -> None:
        steps.append(len(target.chunk_state))
        if not target.chunk_state.complete:
            relay_chunks.mark_verified(len(target.chunk_state))

    target.chunk_state.subscribe(advance)
    relay_chunks.mark_verified(0)
    target.run()
    assert (content_hash(source_image), list(range(1, CHUNKS + 1))) == (content_hash(target.image), steps)


def test_a_chain_of_three_ends_with_equal_bytes(fleet: Fleet) -> None:
    """The last target reads from a relay that is itself still reading from a seed."""
    source_image = image(1)
    seed = fleet.source("seed", source_image)
    relay_image = image()
    chunk_state = ChunkState(relay_image.layout.chunks)
    relay = fleet.source("relay", relay_image, chunk_state=chunk_state, knows_manifest=False)
    upper = Target(
        fleet,
        Script([lambda: plan(route(seed, ALL))]),
        target_image=relay_image,
        chunk_state=chunk_state,
        serving_state=relay,
    )
    lower = Target(fleet, Script([lambda: plan(route(relay, ALL))]))
    reading = threading.Thread(target=lower.run)
    reading.start()
    upper.run()
    reading.join()
    assert [content_hash(source_image)] * 2 == [content_hash(upper.image), content_hash(lower.image)]
    assert {"relay": CHUNKS} == verified_by_source(lower)


def test_a_fenced_relay_does_not_end_a_downstream_fork(fleet: Fleet) -> None:
    """The reader keeps its chunks and continues with another source."""
    source_image = image(1)
    manifest = source_image.manifest()
    chunk_state = ChunkState(source_image.layout.chunks, [0, 1, 2])
    relay = fleet.source("a", source_image, chunk_state=chunk_state, manifest=manifest)
    seed = fleet.source("b", source_image, manifest=manifest)
    script = Script([lambda: plan(route(relay, ALL)), lambda: plan(route(seed, ALL))])
    target = Target(fleet, script)
    target.chunk_state.subscribe(lambda: relay.fence() if len(target.chunk_state) == 3 else None)
    target.run()
    assert (content_hash(source_image), {"a": 3, "b": 3}) == (
        content_hash(target.image),
        verified_by_source(target),
    )
    assert [("a", "source", "SourceWeightsChanged")] == script.faults


def test_a_second_source_with_other_weights_is_refused(fleet: Fleet) -> None:
    """All chunks come from holders of the weights that the first source named."""
    source_image = image(1)
    a = fleet.source("a", source_image, FaultInjection(dies_after_bytes=2 * MIB))
    b = fleet.source("b", image(2))
    c = fleet.source("c", source_image)
    script = Script([lambda: plan(route(a, ALL)), lambda: plan(route(b, ALL)), lambda: plan(route(c, ALL))])
    target = Target(fleet, script)
    target.run()
    assert (content_hash(source_image), {"a": 2, "c": 4}) == (
        content_hash(target.image),
        verified_by_source(target),
    )
    assert [("a", "source", "SourceUnavailable"), ("b", "source", "SourceWeightsChanged")] == script.faults


def test_a_source_with_other_weights_than_planned_is_refused(fleet: Fleet) -> None:
    """The plan decides, not the source that responds first."""
    mismatched, matching = fleet.source("odd", image(1)), fleet.source("right", image(2))
    assert matching.manifest is not None
    weights_id = matching.manifest.weights_id

    def weights_plan(seed: Seed) -> Plan:
        return plan(route(seed, ALL)).model_copy(update={"weights_id": weights_id})

    script = Script([lambda: weights_plan(mismatched), lambda: weights_plan(matching)])
    target = Target(fleet, script)
    target.run()
    assert content_hash(matching.image) == content_hash(target.image)
    assert [("odd", "source", "SourceWeightsChanged")] == script.faults


def test_a_failure_of_the_target_is_not_blamed_on_the_source(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory while a chunk is digested is reported as a fault of the target."""
    seed = fleet.source("a", image(1))
    script = Script([lambda: plan(route(seed, ALL))])
    target = Target(fleet, script)
    digest = target.image.digest
    failures = iter([MemoryError("out of memory")])

    def failing_once(chunk: int) -> bytes:
        for failure in failures:
            raise failure
        return digest(chunk)

    monkeypatch.setattr(target.image, "digest", failing_once)
    target.run()
    assert [("a", "target", "TargetError")] == script.faults


def test_reader_slots_are_released(fleet: Fleet) -> None:
    """A source has no reader left after the transfer."""
    seed = fleet.source("a", image(1))
    Target(fleet, Script([lambda: plan(route(seed, ALL))])).run()
    assert () == seed.report().readers


def test_a_busy_source_is_skipped(fleet: Fleet) -> None:
    """A source without a free reader slot is replaced by another."""
    source_image = image(1)
    a, b = fleet.source("a", source_image, max_readers=1), fleet.source("b", source_image)
    a.open_channel(a.check(lease(a, fork_id="other").token), source_image.layout.layout_id, ["memory"], "127.0.0.1")
    script = Script([lambda: plan(route(a, ALL)), lambda: plan(route(b, ALL))])
    target = Target(fleet, script)
    target.run()
    assert ([("a", "source", "SourceBusy")], {"b": CHUNKS}) == (script.faults, verified_by_source(target))


def unreachable(seed: Seed, fleet: Fleet) -> None:
    fleet.peers.kill(seed.report().address)


def draining(seed: Seed, fleet: Fleet) -> None:
    seed.drain(0.0)


def without_transport(seed: Seed, fleet: Fleet) -> None:
    fleet.network.exports.clear()


@pytest.mark.parametrize(
    ("break_source", "error"),
    [(unreachable, "SourceUnavailable"), (draining, "SourceBusy"), (without_transport, "SourceUnavailable")],
)
def test_a_source_that_cannot_be_opened_is_reported(
    fleet: Fleet, break_source: Callable[[Seed, Fleet], None], error: str
) -> None:
    """Any error that prevents a channel is the source's fault, and another source is requested."""
    source_image = image(1)
    a = fleet.source("a", source_image)
    broken_route = route(a, ALL)
    break_source(a, fleet)
    b = fleet.source("b", source_image)
    script = Script([lambda: plan(broken_route), lambda: plan(route(b, ALL))])
    target = Target(fleet, script)
    target.run()
    assert ([("a", "source", error)], {"b": CHUNKS}) == (script.faults, verified_by_source(target))


def test_a_lease_rejected_three_times_excludes_the_source(fleet: Fleet) -> None:
    """The target blames itself for two rejections.

    After the third it requests another source, without blaming this one.
    """
    source_image = image(1)
    a = fleet.source("a", source_image, FaultInjection(rejects_leases=True))
    b = fleet.source("b", source_image)

    def replan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        reported.extend((fault.instance_id, fault.fault, fault.error) for fault in faults)
        excluded = any(fault == "network" for _, fault, _ in reported)
        return plan(route(b if excluded else a, ALL))

    reported: list[tuple[str, str, str]] = []
    target = Target(fleet, replan)
    target.run()
    assert {"b": CHUNKS} == verified_by_source(target)
    assert [
        ("a", "target", "LeaseRejected"),
        ("a", "target", "LeaseRejected"),
        ("a", "network", "LeaseRejected"),
    ] == reported


@pytest.mark.parametrize("lost", ["expired", "forged", "generation"])
def test_a_bad_lease_is_replaced_by_the_next_plan(fleet: Fleet, lost: str) -> None:
    """A source that rejects the token is tried again with the token of the next plan."""
    source_image = image(1)
    seed = fleet.source("a", source_image)
    good = route(seed, ALL)
    tokens = {
        "expired": lease(seed, ttl_s=-1).token,
        "forged": "forged",
        "generation": lease(seed, generation=3).token,
    }
    bad = good.model_copy(update={"lease": good.lease.model_copy(update={"token": tokens[lost]})})
    script = Script([lambda: plan(bad), lambda: plan(good)])
    target = Target(fleet, script)
    target.run()
    expected = ("source", "SourceWeightsChanged") if lost == "generation" else ("target", "LeaseRejected")
    assert [("a", *expected)] == script.faults
    assert content_hash(source_image) == content_hash(target.image)


def test_renewed_leases_are_used_immediately(fleet: Fleet) -> None:
    """A lease renewed mid-fork outlives the first one."""
    source_image = image(1)
    chunk_state = ChunkState(source_image.layout.chunks, [0])
    relay = fleet.source("a", source_image, chunk_state=chunk_state, manifest=source_image.manifest())
    target = Target(fleet, Script([lambda: plan(route(relay, ALL))]))
    rotated = threading.Event()

    def rotate() -> None:
        if not rotated.is_set():
            rotated.set()
            newest = lease(relay, secret=b"3" * 32)
            relay.set_lease_keys([derive_key(b"3" * 32, "a")])
            target.transfer.update_leases({"a": newest, "unknown": newest})
            for index in range(1, CHUNKS):
                chunk_state.mark_verified(index)

    target.chunk_state.subscribe(rotate)
    target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert [] == target.reasons


def test_reads_continue_while_the_planner_is_unreachable(fleet: Fleet) -> None:
    """The fork continues with its sources and requests a plan for the rest later."""
    source_image = image(1)
    manifest = source_image.manifest()
    a, b = (fleet.source(name, source_image, manifest=manifest) for name in "ab")
    script = Script(
        [
            lambda: plan(route(a, (0, 3))),
            lambda: raise_plan_error(PlannerUnreachable("unreachable")),
            lambda: raise_plan_error(PlannerRejected("confused", status=500, problem="internal")),
            lambda: plan(route(b, (3, 6))),
        ]
    )
    target = Target(fleet, script)
    target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert {"a": 3, "b": 3} == verified_by_source(target)
    assert [] == target.reasons


def test_faults_are_reported_after_a_planner_outage(fleet: Fleet) -> None:
    """A fault that could not be reported is sent with the next request."""
    source_image = image(1)
    a = fleet.source("a", source_image, FaultInjection(dies_after_bytes=MIB))
    b = fleet.source("b", source_image)
    script = Script(
        [
            lambda: plan(route(a, ALL)),
            lambda: raise_plan_error(PlannerUnreachable("unreachable")),
            lambda: plan(route(b, ALL)),
        ]
    )
    Target(fleet, script).run()
    assert [0, 1, 1] == [len(faults) for faults in script.faults_by_request]


def test_request_replan_plans_the_rest_again(fleet: Fleet) -> None:
    """Verified chunks are kept, and the source stays open."""
    source_image = image(1)
    chunk_state = ChunkState(source_image.layout.chunks, [0, 1])
    seed = fleet.source("a", source_image, chunk_state=chunk_state, manifest=source_image.manifest())

    def complete_plan() -> Plan:
        for index in range(CHUNKS):
            chunk_state.mark_verified(index)
        return plan(route(seed, ALL))

    script = Script([lambda: plan(route(seed, ALL)), complete_plan])
    target = Target(fleet, script)
    target.chunk_state.subscribe(
        lambda: target.transfer.request_replan("forgotten") if len(target.chunk_state) == 2 else None
    )
    stats = target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert IMAGE_BYTES == stats.bytes_read
    # The second plan itself may arrive after the last chunk.
    assert 2 == len(script.faults_by_request)


def test_the_old_plan_stays_valid_while_a_restarted_planner_knows_no_source(fleet: Fleet) -> None:
    """The fork continues with its source until the seeds have registered again."""
    source_image = image(1)
    chunk_state = ChunkState(source_image.layout.chunks, [0, 1])
    seed = fleet.source("a", source_image, chunk_state=chunk_state, manifest=source_image.manifest())

    def no_source_plan() -> Plan:
        for index in range(CHUNKS):
            chunk_state.mark_verified(index)
        return plan(reason="no instance has model")

    target = Target(fleet, Script([lambda: plan(route(seed, ALL)), no_source_plan]))
    target.chunk_state.subscribe(
        lambda: target.transfer.request_replan("forgotten") if len(target.chunk_state) == 2 else None
    )
    target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert [] == target.reasons


@pytest.mark.parametrize(
    ("plan_factory", "error", "message"),
    [
        (lambda: plan(reason="no instance serves it"), NoSource, "no instance serves it"),
        (lambda: plan(), NoSource, "knows no source"),
        (lambda: raise_plan_error(NoSource("another layout")), NoSource, "another layout"),
        (lambda: raise_plan_error(PlannerUnreachable("unreachable")), PlannerUnreachable, "unreachable"),
        (lambda: raise_plan_error(PlannerRejected("no", status=401, problem="x")), PlannerRejected, "no"),
    ],
)
def test_no_route_at_the_start_ends_the_transfer_immediately(
    fleet: Fleet, plan_factory: Callable[[], Plan], error: type[RforkError], message: str
) -> None:
    """A retry would not help, so the fallback starts immediately."""
    script = Script([plan_factory])
    with pytest.raises(error, match=message):
        Target(fleet, script).run()
    assert 1 == len(script.faults_by_request)


def test_a_reader_slot_that_becomes_free_is_used(fleet: Fleet) -> None:
    """While all slots are in use, the fork requests a plan again after the delay set by the planner."""
    seed = fleet.source("a", image(1))
    script = Script([lambda: plan(retry_after_s=0.01), lambda: plan(route(seed, ALL))])
    target = Target(fleet, script)
    target.run()
    assert ({"a": CHUNKS}, 2) == (verified_by_source(target), len(script.faults_by_request))


def test_the_no_source_timeout_ends_the_transfer(fleet: Fleet) -> None:
    """A fork without any route waits no longer."""
    script = Script([lambda: plan(reason="all are busy", retry_after_s=0.01)])
    with pytest.raises(NoSource, match="all are busy"):
        Target(fleet, script, settings(no_source_timeout_s=0.05)).run()
    assert len(script.faults_by_request) > 1


def test_the_loss_of_the_last_source_ends_the_transfer(fleet: Fleet) -> None:
    """When the only source dies and no other is known, the error contains the reason."""
    seed = fleet.source("a", image(1), FaultInjection(dies_after_bytes=2 * MIB))
    script = Script([lambda: plan(route(seed, ALL)), lambda: plan(reason="no source left")])
    target = Target(fleet, script)
    with pytest.raises(NoSource, match="no source left"):
        target.run()
    assert (["SourceUnavailable"], 2) == (target.reasons, len(target.chunk_state))


def test_the_deadline_ends_a_fork(fleet: Fleet) -> None:
    """After the deadline no thread can write to the image."""
    seed = fleet.source("a", image(1), FaultInjection(stalls_after_bytes=2 * MIB))
    target = Target(fleet, Script([lambda: plan(route(seed, ALL))]), deadline_s=0.5)
    with pytest.raises(DeadlineExceeded, match="of 6 chunks"):
        target.run()
    assert [] == live_transfer_threads()
    assert () == seed.report().readers


def test_an_interrupt_ends_a_fork(fleet: Fleet) -> None:
    """An interrupt in the caller's thread leaves no thread running and releases the reader slot."""
    seed = fleet.source("a", image(1), FaultInjection(stalls_after_bytes=MIB))
    script = Script([lambda: plan(route(seed, (0, 2))), interrupt])
    target = Target(fleet, script)
    with pytest.raises(KeyboardInterrupt):
        target.run()
    assert ([], ()) == (live_transfer_threads(), seed.report().readers)


def interrupt() -> Plan:
    raise KeyboardInterrupt
