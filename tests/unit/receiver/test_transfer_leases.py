"""Transfers whose leases are renewed, lost or rejected, or whose planner is unreachable."""

from __future__ import annotations

import threading

import pytest

from rfork.errors import PlannerRejected, PlannerUnreachable
from rfork.image.chunk_state import ChunkState
from rfork.image.chunks import MIB
from rfork.planner_client.lease import derive_key
from rfork.schema import ChunkAssignment, Plan, SourceFault
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import CHUNKS, Fleet, Script, Target, content_hash, image, lease, plan, route
from tests.unit.receiver.transfer_helpers import ALL, IMAGE_BYTES, raise_plan_error, verified_by_source


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
