"""Version resolution for targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.problems import ProblemError
from planner.core.records import InstanceRecord, StoreChange
from planner.core.state import PlannerState
from planner.core.versions import ReplicaConflict, resolve
from rfork.schema import ForkRequest, InstanceReport, Rank, ScaleUp, StorageAssignment, StorageCandidate
from rfork.weights_version import of_update, of_weights, short, unnamed
from tests.unit.planner.builders import CHUNKS, WEIGHTS, FakeTime, fork_request, make_service, report, seed_report
from tests.unit.planner.records import fork

PAIR = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))
SPECULATIVE = Rank(role="speculative")


def seed(name: str, version: str | None, **changes: object) -> InstanceRecord:
    """Return the record of a complete instance of a version."""
    return InstanceRecord(seed_report(name, version=version, **changes), seen_at=0.0, ttl_s=10.0)


def target(version: str | None = None, **changes: object) -> InstanceReport:
    """Return the report of a target; by default without files."""
    return report("t", version=version, any_version=version is None, **changes)


def test_a_target_with_files_gets_their_version() -> None:
    """Served versions do not matter."""
    stated = report("t", version="v2")
    assert "v2" == resolve(stated, [seed("a", "v1")], ()).version


def test_a_target_without_files_adopts_the_only_version() -> None:
    """It is the one that complete instances serve."""
    assert "v1" == resolve(target(), [seed("a", "v1"), seed("b", "v1")], ()).version


def test_a_target_without_files_is_refused_where_two_versions_are_served() -> None:
    """It gets an unnamed version, and the reason lists the served ones."""
    resolution = resolve(target(replica="r"), [seed("a", "v1"), seed("b", "v2")], ())
    assert unnamed("r") == resolution.version
    assert "2 versions of m are served (v1, v2) and this target states none" == resolution.note


def test_a_draining_instance_serves_no_version() -> None:
    """New targets are not assigned to it."""
    records = [seed("a", "v1", state="draining"), seed("b", "v2")]
    assert "v2" == resolve(target(), records, ()).version


def test_the_version_of_engines_is_adopted_before_those_of_holders() -> None:
    """Holders keep an earlier version for a while; they count if no engine serves."""
    earlier, later = seed("h-1", "v1", holder="h"), seed("h-2", "v2", holder="h")
    assert "v2" == resolve(target(), [earlier, later, seed("e", "v2")], ()).version
    assert "v1" == resolve(target(), [earlier], ()).version


def test_a_version_being_loaded_is_adopted_if_none_is_served() -> None:
    """A cold group without files shares one load."""
    loading = InstanceRecord(report("a", version=None), seen_at=0.0, ttl_s=10.0, resolved_version=unnamed("a"))
    assert unnamed("a") == resolve(target(), [loading], ()).version


def test_the_first_target_gets_an_unnamed_version() -> None:
    """It is named after its replica."""
    assert unnamed("r") == resolve(target(replica="r"), [], ()).version


def test_a_target_keeps_its_adopted_version() -> None:
    """This holds even if another one is served by now."""
    begun = report("t", (0, 4), version="v1", any_version=True)
    records = [seed("a", "v1", state="draining"), seed("b", "v2")]
    assert "v1" == resolve(begun, records, ()).version


def test_a_target_whose_version_is_no_longer_served_adopts_the_next() -> None:
    """This requires that no other rank of its replica has begun."""
    begun = report("t", (0, 4), version="v1", any_version=True)
    assert "v2" == resolve(begun, [seed("b", "v2")], ()).version


def test_a_target_that_reads_its_own_storage_keeps_its_version() -> None:
    """Other targets may wait for what it reads."""
    begun = report("t", version=unnamed("t"), any_version=True)
    kept = resolve(begun, [seed("b", "v2")], (), loading={"t"})
    assert unnamed("t") == kept.version


def test_all_ranks_of_a_replica_get_the_version_of_the_first() -> None:
    """This holds even if only another one is served by now."""
    first = InstanceRecord(
        report("t0", version="v1", any_version=True, rank=PAIR[0], replica="r"), seen_at=0.0, ttl_s=10.0
    )
    served = [seed("b", "v2", rank=PAIR[1])]
    assert "v1" == resolve(target(rank=PAIR[1], replica="r"), [first, *served], [first]).version


def test_a_rank_whose_files_are_of_another_version_than_its_replica_is_refused() -> None:
    """One server must not have two versions."""
    first = seed("t0", "v1", rank=PAIR[0], replica="r")
    second = report("t1", version="v2", rank=PAIR[1], replica="r")
    with pytest.raises(ReplicaConflict, match="replica r uses version v1, but the files of rank"):
        resolve(second, [first], [first])


def test_a_restarted_rank_is_not_bound_to_its_former_process() -> None:
    """Its old record exists for some seconds."""
    former = seed("t-before", "v1", replica="r")
    again = report("t", version="v2", replica="r")
    assert "v2" == resolve(again, [former], [former]).version


def test_ranks_without_a_replica_are_refused_where_two_versions_are_served() -> None:
    """It is unknown which of them belong together."""
    records = [seed("a", "v1", rank=PAIR[0]), seed("b", "v2", rank=PAIR[0])]
    assert unnamed("t") == resolve(target(rank=PAIR[0]), records, ()).version


def test_a_speculative_model_follows_its_main_model() -> None:
    """Of several versions, it gets the one whose replicas serve the main model's version."""
    mains = [seed("m1", "v1", replica="one"), seed("m2", "v2", replica="two")]
    speculative = [
        seed("d1", "d-v1", model="draft", rank=SPECULATIVE, replica="one"),
        seed("d2", "d-v2", model="draft", rank=SPECULATIVE, replica="two"),
    ]
    own_main = seed("t-main", "v2", replica="r")
    requested = target(model="draft", rank=SPECULATIVE, replica="r")
    assert "d-v2" == resolve(requested, speculative, [own_main], [*mains, own_main]).version


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2026-11-23", "2026-11-23"),
        ("files:" + "3fa2c1d0" * 4, "files:3fa2c1d0"),
        ("commit:" + "0123456789" * 4, "commit:01234567"),
        (of_weights(WEIGHTS), "weights:11111111"),
        (of_update("replica-0123456789ab", 3), "update:replica-:3"),
        (None, "(none)"),
    ],
)
def test_only_computed_versions_are_shortened(version: str | None, expected: str) -> None:
    """A version stated by a user is shown unchanged."""
    assert expected == short(version)


async def test_a_fork_reads_only_from_its_own_version(time: FakeTime) -> None:
    """The reason names the version, and the number of instances with others."""
    service = make_service(time)
    await service.report(seed_report("old", version="v1"))
    plan = await service.plan(fork_request("t", version="v2"))
    assert () == plan.routes
    assert "first of version v2 of model m; 1 instance serves v1" == plan.reason


async def test_a_target_without_files_receives_its_version(time: FakeTime) -> None:
    """It is in the plan."""
    service = make_service(time)
    await service.report(seed_report("old", version="v1"))
    plan = await service.plan(fork_request("t", version=None))
    assert "v1" == plan.version
    assert ["old"] == [route.source_id for route in plan.routes]


async def test_a_cold_start_is_within_a_version(time: FakeTime) -> None:
    """Two targets with different files read their own."""
    service = make_service(time)
    storage = (StorageCandidate(kind="loader"),)
    plans = [await service.plan(fork_request(name, version=f"v-{name}", storage=storage)) for name in "ab"]
    assert [1, 1] == [len(plan.storage) for plan in plans]


async def test_a_target_that_adopts_a_version_reads_no_storage(time: FakeTime) -> None:
    """The version of its loader's weights is unknown."""
    service = make_service(time)
    await service.report(seed_report("full", version="v1", max_readers=0))
    plan = await service.plan(fork_request("t", version=None, storage=(StorageCandidate(kind="loader"),)))
    assert "v1" == plan.version
    assert () == plan.storage


async def test_a_target_whose_version_is_no_longer_served_reads_storage_under_another_name(time: FakeTime) -> None:
    """Its loader's weights are not of that version."""
    service = make_service(time)
    loader = (StorageCandidate(kind="loader"),)
    plan = await service.plan(fork_request("t", version="v1", any_version=True, replica="r", storage=loader))
    assert unnamed("r") == plan.version
    assert 1 == len(plan.storage)


async def test_an_in_place_update_moves_a_seed_to_its_new_version(time: FakeTime) -> None:
    """Targets of the old version find no source any more."""
    service = make_service(time)
    await service.report(seed_report("s", version="v1"))
    await service.report(seed_report("s", version="update:r:1", weights_id="2" * 32, generation=1))
    old, new = (
        await service.plan(fork_request("t", version="v1")),
        await service.plan(fork_request("u", version="update:r:1")),
    )
    assert () == old.routes
    assert ["s"] == [route.source_id for route in new.routes]


async def test_a_fork_whose_version_changes_releases_its_slot(time: FakeTime) -> None:
    """It is planned only in the group of the new version."""
    service = make_service(time)
    await service.report(seed_report("one", version="v1"))
    await service.plan(fork_request("t", version=None))
    await service.remove("one")
    await service.report(seed_report("two", version="v2"))
    again = await service.plan(fork_request("t", (0, 4), version="v1", any_version=True))
    groups = {group.version: set(group.shares) for group in service.state.groups()}
    assert "v2" == again.version
    assert {"v2": {"t"}} == groups


async def test_a_conflict_within_a_replica_is_a_problem(time: FakeTime) -> None:
    """It names both versions."""
    service = make_service(time)
    await service.plan(fork_request("t0", version="v1", rank=PAIR[0], replica="r"))
    with pytest.raises(ProblemError) as caught:
        await service.plan(fork_request("t1", version="v2", rank=PAIR[1], replica="r"))
    assert "replica-version" == caught.value.slug


async def test_after_a_restart_ranks_without_files_wait_for_heartbeats(time: FakeTime) -> None:
    """Other ranks of their replica may have a version that the planner does not know yet."""
    service = make_service(time, heartbeat_interval_s=5.0)
    await service.report(seed_report("b", version="v2", rank=PAIR[1]))
    early = await service.plan(_rank(1, None))
    await service.report(report("t0", (0, 4), version="v1", any_version=True, rank=PAIR[0], replica="r"))
    time.now += 5.0
    await service.report(seed_report("b", version="v2", rank=PAIR[1]))
    late = await service.plan(_rank(1, None))
    assert early.version is None
    assert early.retry_after_s is not None
    assert "v1" == late.version
    assert () == late.routes


def _rank(tp: int, version: str | None) -> ForkRequest:
    return fork_request(f"t{tp}", version=version, rank=PAIR[tp], replica="r")


async def test_a_seed_without_a_version_is_named_after_its_bytes(time: FakeTime) -> None:
    """Two seeds with different bytes have different versions."""
    service = make_service(time)
    await service.report(seed_report("s", version=None))
    assert of_weights(WEIGHTS) == service.instance("s").version


async def test_replicas_of_another_version_do_not_keep_a_last_seed(time: FakeTime) -> None:
    """Those expected replicas will not read from it."""
    service = make_service(time)
    await service.report(seed_report("old", version="v1"))
    await service.announce(ScaleUp(scaleup_id="up", model="m", version="v2", replicas=2))
    assert (await service.can_exit("old")).can_exit


@st.composite
def members(draw: st.DrawFn, name: str) -> InstanceRecord:
    """An instance in any state that matters to the version of a target."""
    version = draw(st.sampled_from(["v1", "v2", None]))
    is_complete = draw(st.booleans())
    made = report(
        name,
        *(((0, CHUNKS),) if is_complete else ()),
        version=version,
        any_version=version is None,
        rank=draw(st.sampled_from([Rank(), PAIR[0], SPECULATIVE])),
        state=draw(st.sampled_from(["serving", "draining"])) if is_complete else "loading",
    )
    resolved = draw(st.sampled_from(["", "v3"])) if version is None else ""
    begun = draw(st.booleans())
    return InstanceRecord(made, seen_at=0.0, ttl_s=10.0, plan_requested=begun, resolved_version=resolved)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_few_members_of_each_group_decide_as_all(data: st.DataObject) -> None:
    """A target gets the same version as if every member of its model were visited."""
    known = PlannerState(max_finished_forks=10)
    records = [data.draw(members(name)) for name in "abcdefgh"[: data.draw(st.integers(0, 8))]]
    readers = [each for each in records if each.report.state == "loading" and data.draw(st.booleans())]
    forks = tuple(
        replace(fork(each.report.instance_id), instance_id=each.report.instance_id, version=each.version,
                rank=each.report.rank, storage=(StorageAssignment(kind="loader", chunks=((0, 1),)),))
        for each in readers
    )  # fmt: skip
    known.apply(StoreChange(instances=tuple(records), forks=forks))
    own_id, own_version = data.draw(st.sampled_from(["t", "a"])), data.draw(st.sampled_from(["v1", "v2", "v3", None]))
    request = report(own_id, version=own_version, any_version=True)
    loading = {each.report.instance_id for each in readers}
    few = list(known.representatives_of("m", "main", own_id))
    expected = resolve(request, list(known.members_of("m")), (), loading=loading)
    assert expected == resolve(request, few, (), loading=loading)
