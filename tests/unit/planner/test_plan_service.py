"""The service's decisions about plans, leases, faults and quarantine."""

from __future__ import annotations

import pytest

from rfork.errors import PlannerRejected
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.lease import decode_key, verify
from rfork.schema import ForkProgress, ForkResult, Placement, Plan
from tests.unit.planner.builders import (
    LAYOUT,
    OTHER_LAYOUT,
    WEIGHTS,
    FakeTime,
    fault,
    fork_request,
    report,
    seed_report,
)

FORKED = ForkResult(outcome="forked", seconds=1, bytes_read=12 << 20, sources={"s": 12 << 20})


def sources(plan: Plan) -> list[str]:
    """Return the sources of a plan."""
    return [route.source_id for route in plan.routes]


def half(count: int = 6) -> ForkProgress:
    """Return progress of `count` chunks."""
    return ForkProgress(verified=((0, count),), bytes_read=count << 20, bytes_per_s=1.0)


def test_three_targets_form_a_chain_from_a_seed_with_one_slot(planner: PlannerClient) -> None:
    """A request also registers the target, so the next one finds it."""
    planner.report(seed_report("s"))
    assert [["s"], ["a"], ["b"]] == [sources(planner.request_plan(fork_request(name))) for name in "abc"]


def test_a_route_has_everything_needed_to_read(planner: PlannerClient, time: FakeTime) -> None:
    """It has address, generation, chunks, transports, and a lease that the source accepts."""
    key = planner.report(seed_report("s", generation=3)).lease_keys[0]
    plan = planner.request_plan(fork_request("a"))
    route = plan.routes[0]
    claims = verify(route.lease.token, decode_key(key), source_id="s", now=time.now)
    assert "s:1" == route.address
    assert 3 == route.generation
    assert ((0, 12),) == route.chunks
    assert ("http",) == route.transports
    assert "fork-a" == claims.fork_id
    assert "s" == claims.source_id
    assert LAYOUT == claims.layout_id
    assert WEIGHTS == claims.weights_id
    assert 3 == claims.generation
    assert time.now + 30 == claims.expires_at


def test_an_instance_of_another_layout_is_returned_for_comparison(planner: PlannerClient) -> None:
    """A plan without routes names it, with a lease for its manifest and no chunks."""
    planner.report(seed_report("s").model_copy(update={"layout_id": "e" * 32}))
    other = planner.request_plan(fork_request("a")).mismatched_source
    assert other is not None
    assert "s" == other.source_id
    assert () == other.chunks


def test_finishing_releases_the_slot(planner: PlannerClient) -> None:
    """The seed's only slot is free again; the second finish changes nothing."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a", max_readers=0))
    refused = planner.request_plan(fork_request("b"))
    planner.finish("fork-a", FORKED)
    planner.finish("fork-a", FORKED.model_copy(update={"outcome": "failed"}))
    assert "s at capacity (1 of 1 readers)" in refused.reason
    assert refused.retry_after_s is not None
    assert ["s"] == sources(planner.request_plan(fork_request("b")))
    assert "finished" == planner.fork("fork-a").state


def test_a_fork_without_progress_is_abandoned_and_may_replan(planner: PlannerClient, time: FakeTime) -> None:
    """After the lease TTL its slot is free; its next progress gets `unknown-fork`."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    for _ in range(2):
        time.now += 15
        planner.report(seed_report("s"))
        planner.report(report("a"))
    abandoned = planner.fork("fork-a")
    assert "failed" == abandoned.state
    assert abandoned.finish is not None
    assert ("no progress for 30 s",) == abandoned.finish.reasons
    with pytest.raises(PlannerRejected) as refused:
        planner.progress("fork-a", half())
    assert 404 == refused.value.status
    assert "unknown-fork" == refused.value.problem
    assert ["s"] == sources(planner.request_plan(fork_request("a", (0, 6))))
    assert "running" == planner.fork("fork-a").state


def test_progress_renews_leases_and_updates_the_relays_chunks(planner: PlannerClient, time: FakeTime) -> None:
    """Readers of the relay and the lists see its progress."""
    key = planner.report(seed_report("s")).lease_keys[0]
    planner.request_plan(fork_request("a"))
    time.now += 4
    lease = planner.progress("fork-a", half()).leases["s"]
    assert time.now + 30 == verify(lease.token, decode_key(key), source_id="s", now=time.now).expires_at
    assert ((0, 6),) == planner.instance("a").report.verified


def test_leases_of_changed_weights_are_not_renewed(planner: PlannerClient) -> None:
    """A reader of the old generation gets no renewal."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    planner.report(seed_report("s", generation=1))
    assert {} == planner.progress("fork-a", half()).leases


def test_silent_instances_are_forgotten(planner: PlannerClient, time: FakeTime) -> None:
    """After `instance_ttl_s` the seed is missing from the lists and from plans."""
    planner.report(seed_report("s"))
    time.now += 20
    assert [] == planner.instances()
    assert "no instance has version v1 of model m" == planner.request_plan(fork_request("a")).reason


def test_a_drained_instance_stays_drained_whatever_it_reports(planner: PlannerClient) -> None:
    """Its heartbeats do not undo the drain; removing does."""
    planner.report(seed_report("s"))
    drained = planner.drain("s", force=True).report.state
    planner.report(seed_report("s"))
    refused = planner.request_plan(fork_request("a")).reason
    planner.remove("s")
    planner.remove("s")
    planner.report(seed_report("s"))
    assert "draining" == drained
    assert "s draining" in refused
    assert ["s"] == sources(planner.request_plan(fork_request("a")))


FAILED = ForkResult(outcome="failed", seconds=1, bytes_read=0)
FAULTS = [
    ("SourceCorrupt", "source", "SourceCorrupt", []),
    ("SourceTimeout", "source", "SourceTimeout", []),
    ("SourceUnavailable", "source", None, []),
    ("SourceBusy", "source", None, []),
    ("SourceWeightsChanged", "source", None, []),
    ("PlannerUnreachable", "network", None, []),
    ("NotSameHost", "network", None, []),
    ("StorageError", "storage", None, []),
    ("LayoutMismatch", "target", None, []),
    ("LeaseRejected", "target", None, ["s"]),
    ("UserError", "user", None, ["s"]),
]


@pytest.mark.parametrize(("error", "fault_type", "quarantine", "again"), FAULTS)
def test_only_faults_of_a_source_count_against_it(
    planner: PlannerClient, error: str, fault_type: str, quarantine: str | None, again: list[str]
) -> None:
    """Only a source's own faults count against it; network faults and refusals exclude it for this fork only."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    plan = planner.request_plan(fork_request("a", faults=(fault("s", error, fault_type),)))
    assert quarantine == planner.instance("s").accused
    assert again == sources(plan)


@pytest.mark.parametrize("error", ["SourceCorrupt", "SourceUnavailable"])
def test_one_reader_does_not_quarantine_a_source(planner: PlannerClient, error: str) -> None:
    """A target on another host still gets it."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    planner.request_plan(fork_request("a", faults=(fault("s", error),)))
    planner.finish("fork-a", FAILED)
    assert ["s"] == sources(planner.request_plan(fork_request("b")))


def test_one_caller_cannot_quarantine_all_seeds(planner: PlannerClient) -> None:
    """After eighteen calls under new names from one host, six of six seeds are still assigned to others."""
    seeds = [f"s{number}" for number in range(6)]
    for name in seeds:
        planner.report(seed_report(name))
    for number in range(len(seeds)):
        target = f"t{number}"
        plan = planner.request_plan(fork_request(target, placement=Placement(host="attacker")))
        faults = tuple(fault(source, "SourceCorrupt") for source in sources(plan))
        planner.request_plan(fork_request(target, placement=Placement(host="attacker"), faults=faults))
        planner.finish(f"fork-{target}", FAILED)
    assert [None] * 6 == [planner.instance(name).quarantined for name in seeds]


def test_later_forks_of_the_host_avoid_the_source_too(planner: PlannerClient) -> None:
    """On a single host no other host accuses it, and it must not be read from again."""
    planner.report(seed_report("s"))
    here = Placement(host="the-only-one")
    planner.request_plan(fork_request("a", placement=here))
    planner.request_plan(fork_request("a", placement=here, faults=(fault("s", "SourceCorrupt"),)))
    assert [] == sources(planner.request_plan(fork_request("b", placement=here)))


def test_readers_on_two_hosts_quarantine_a_source(planner: PlannerClient) -> None:
    """A third reader is not assigned to it."""
    planner.report(seed_report("s", max_readers=9))
    for name in "ab":
        planner.request_plan(fork_request(name, max_readers=0))
        planner.request_plan(fork_request(name, faults=(fault("s", "SourceCorrupt"),)))
    assert "SourceCorrupt" == planner.instance("s").quarantined
    assert [] == sources(planner.request_plan(fork_request("c")))


@pytest.mark.parametrize("error", ["SourceTimeout", "SourceUnavailable"])
def test_a_source_that_misses_its_heartbeat_is_quarantined_by_one_reader(
    planner: PlannerClient, time: FakeTime, error: str
) -> None:
    """Its own silence is the second witness."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    time.now += 8
    planner.request_plan(fork_request("a", faults=(fault("s", error),)))
    assert error == planner.instance("s").quarantined


def test_missed_heartbeats_do_not_confirm_wrong_bytes(planner: PlannerClient, time: FakeTime) -> None:
    """The reader's memory may be at fault, and the source only cut off from the planner."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    time.now += 8
    planner.request_plan(fork_request("a", faults=(fault("s", "SourceCorrupt"),)))
    assert None is planner.instance("s").quarantined


def test_a_contradicted_accuser_loses_credibility(planner: PlannerClient) -> None:
    """The source stays assignable, though a second reader accuses it later."""
    planner.report(seed_report("s", max_readers=9))
    for name in "abc":
        planner.request_plan(fork_request(name, max_readers=0))
    planner.progress("fork-b", _verified(1))
    planner.request_plan(fork_request("a", faults=(fault("s", "SourceCorrupt"),)))
    planner.progress("fork-b", _verified(2))
    planner.progress("fork-b", _verified(3))
    planner.request_plan(fork_request("c", faults=(fault("s", "SourceCorrupt"),)))
    assert None is planner.instance("s").quarantined


def test_a_contradiction_ends_a_quarantine(planner: PlannerClient) -> None:
    """The remaining credibility of both accusers is below the quorum."""
    planner.report(seed_report("s", max_readers=9))
    for name in "abc":
        planner.request_plan(fork_request(name, max_readers=0))
    planner.progress("fork-c", _verified(1))
    for name in "ab":
        planner.request_plan(fork_request(name, faults=(fault("s", "SourceCorrupt"),)))
    before = planner.instance("s").quarantined
    planner.progress("fork-c", _verified(2))
    planner.progress("fork-c", _verified(3))
    assert "SourceCorrupt" == before
    assert None is planner.instance("s").quarantined


def _verified(count: int) -> ForkProgress:
    """Return progress of this many chunks from `s`."""
    return ForkProgress(verified=((0, count),), bytes_read=count << 20, bytes_per_s=1, sources={"s": count << 20})


def test_a_fork_avoids_a_faulty_source_for_some_time(planner: PlannerClient, time: FakeTime) -> None:
    """The next request, without faults, does not use it until the quarantine has expired."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    planner.request_plan(fork_request("a", faults=(fault("s", "SourceCorrupt"),)))
    again = planner.request_plan(fork_request("a"))
    for _ in range(5):
        time.now += 12
        planner.report(seed_report("s"))
    assert [] == sources(again)
    assert ["s"] == sources(planner.request_plan(fork_request("a")))


def test_a_busy_source_is_tried_again_in_the_next_plan(planner: PlannerClient) -> None:
    """Being full is temporary."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    planner.request_plan(fork_request("a", faults=(fault("s", "SourceBusy"),)))
    assert ["s"] == sources(planner.request_plan(fork_request("a")))


def test_a_source_whose_weights_changed_may_be_read_in_its_new_generation(planner: PlannerClient) -> None:
    """The fault applies to the old generation only."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    planner.report(seed_report("s", generation=1))
    assert ["s"] == sources(planner.request_plan(fork_request("a", faults=(fault("s", "SourceWeightsChanged"),))))


def test_a_target_cannot_quarantine_a_source_it_was_not_assigned(planner: PlannerClient) -> None:
    """An accusation without a plan excludes the source for the accuser only."""
    planner.report(seed_report("s"))
    plan = planner.request_plan(fork_request("a", faults=(fault("s", "SourceCorrupt"),)))
    assert [] == sources(plan)
    assert planner.instance("s").quarantined is None


def test_a_stalled_relay_is_avoided_but_not_quarantined(planner: PlannerClient) -> None:
    """It may only be waiting for its own source."""
    planner.report(seed_report("s", max_readers=2))
    planner.request_plan(fork_request("a"))
    planner.request_plan(fork_request("b"))
    plan = planner.request_plan(fork_request("b", faults=(fault("a", "SourceTimeout"),)))
    assert ["s"] == sources(plan)
    assert planner.instance("a").quarantined is None


def test_a_missing_relays_slot_goes_to_its_child(planner: PlannerClient) -> None:
    """The seed has one slot: the child gets it immediately, before the relay's lease expires."""
    planner.report(seed_report("s"))
    for name in "abc":
        planner.request_plan(fork_request(name))
    plan = planner.request_plan(fork_request("b", (0, 4), faults=(fault("a", "SourceUnavailable"),)))
    assert [("s", ((4, 12),))] == [(route.source_id, route.chunks) for route in plan.routes]
    assert ["b"] == [share.source_id for share in planner.fork("fork-c").plan]


def test_a_restarted_planner_counts_unknown_readers(planner: PlannerClient) -> None:
    """The seed's report names its reader: its slot is occupied, and the reader keeps it."""
    planner.report(seed_report("s", readers=("fork-old",)))
    full = planner.request_plan(fork_request("a"))
    kept = planner.request_plan(fork_request("old", (0, 3)))
    assert [] == sources(full)
    assert ["s"] == sources(kept)


def test_a_new_fork_of_an_instance_ends_its_old_one(planner: PlannerClient) -> None:
    """An instance that starts over has one slot, not two."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    plan = planner.request_plan(fork_request("a").model_copy(update={"fork_id": "second"}))
    assert ["s"] == sources(plan)
    assert "failed" == planner.fork("fork-a").state


def test_removing_an_instance_ends_its_fork(planner: PlannerClient) -> None:
    """Its lease is released, and the list shows the reason."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    planner.progress("fork-a", half())
    planner.remove("a")
    finish = planner.fork("fork-a").finish
    assert finish is not None
    assert "interrupted" == finish.outcome
    assert 6 << 20 == finish.bytes_read
    assert ("the instance was removed",) == finish.reasons


def test_finishing_an_unknown_fork_is_not_an_error(planner: PlannerClient) -> None:
    """Nothing is listed for it."""
    planner.finish("never", FORKED)
    assert [] == planner.forks()


def test_an_instance_may_change_its_model(planner: PlannerClient) -> None:
    """Each report is complete: the old model has lost its seed."""
    planner.report(seed_report("s"))
    planner.report(seed_report("s", model="other"))
    assert "no instance has version v1 of model m" == planner.request_plan(fork_request("a")).reason
    assert ["s"] == sources(planner.request_plan(fork_request("b", model="other")))


def test_lists_filter_by_model_and_state(planner: PlannerClient) -> None:
    """Both filters apply to instances and forks."""
    planner.report(seed_report("s"))
    planner.report(seed_report("o", model="other"))
    planner.request_plan(fork_request("a"))
    planner.request_plan(fork_request("lone", model="none"))
    assert ["a", "s"] == [view.report.instance_id for view in planner.instances(model="m")]
    assert ["o", "s"] == [view.report.instance_id for view in planner.instances(state="serving")]
    assert ["fork-a"] == [view.fork_id for view in planner.forks(state="running")]
    assert ["fork-lone"] == [view.fork_id for view in planner.forks(state="planning", model="none")]


def test_models_count_seeds_relays_and_forks(planner: PlannerClient) -> None:
    """A target without known weights counts for those of its plan."""
    planner.report(seed_report("s"))
    planner.report(seed_report("x", layout_id=OTHER_LAYOUT))
    planner.request_plan(fork_request("a"))
    rows = [(row.layout_id, row.weights_id, row.seeds, row.relays, row.forks_running) for row in planner.models()]
    assert [(LAYOUT, WEIGHTS, 1, 1, 1), (OTHER_LAYOUT, WEIGHTS, 1, 0, 0)] == rows


REFUSED = [
    (fork_request("a").model_copy(update={"instance": seed_report("a")}), 422, "invalid-request"),
    (fork_request("a").model_copy(update={"instance": report("a", (4, 13))}), 422, "invalid-request"),
    (fork_request("a").model_copy(update={"instance": report("b")}), 409, "fork-conflict"),
]


@pytest.mark.parametrize(("request_", "status", "problem"), REFUSED)
def test_inconsistent_requests_are_rejected(
    planner: PlannerClient, request_: object, status: int, problem: str
) -> None:
    """This covers a complete target, chunks beyond the image, and another instance's fork."""
    planner.request_plan(fork_request("a"))
    with pytest.raises(PlannerRejected) as refused:
        planner.request_plan(request_)  # type: ignore[arg-type]
    assert status == refused.value.status
    assert problem == refused.value.problem


def test_a_finished_fork_cannot_continue(planner: PlannerClient) -> None:
    """Plans and progress under its id are rejected."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    planner.finish("fork-a", FORKED)
    for call in (lambda: planner.request_plan(fork_request("a")), lambda: planner.progress("fork-a", half())):
        with pytest.raises(PlannerRejected) as refused:
            call()
        assert 409 == refused.value.status
        assert "fork-ended" == refused.value.problem


def test_a_finished_fork_is_a_source_before_its_next_report(planner: PlannerClient) -> None:
    """A target that requests a plan right after it reads from it, and not from storage again."""
    planner.report(seed_report("s", max_readers=1))
    planner.request_plan(fork_request("a"))
    planner.finish("fork-a", FORKED)
    planner.report(seed_report("s", max_readers=0))
    assert ["a"] == sources(planner.request_plan(fork_request("b")))


def test_a_seed_without_lease_keys_gets_no_readers(planner: PlannerClient, time: FakeTime) -> None:
    """It would reject every lease; it has two heartbeats to receive its keys."""
    planner.report(seed_report("s", has_lease_keys=False))
    assert ["s"] == sources(planner.request_plan(fork_request("early")))
    time.now += 10.0
    planner.report(seed_report("s", has_lease_keys=False))
    assert "has no lease keys" in str(planner.instance("s").quarantined)
    assert "s" not in sources(planner.request_plan(fork_request("late")))


def test_a_seed_that_receives_its_lease_keys_gets_readers(planner: PlannerClient, time: FakeTime) -> None:
    """It gets them with its next report, not only after a quarantine."""
    planner.report(seed_report("s", has_lease_keys=False))
    time.now += 10.0
    planner.report(seed_report("s", has_lease_keys=False))
    planner.report(seed_report("s"))
    assert planner.instance("s").quarantined is None
    assert ["s"] == sources(planner.request_plan(fork_request("a")))
