"""Holders: registration, expiry, wanted images, and what their images count for."""

from __future__ import annotations

import pytest

from planner.core.problems import ProblemError
from planner.core.records import HolderRecord, StoreChange
from planner.core.state import PlannerState
from planner.plan_service import HOLDER_HEARTBEAT_S, PlanService
from planner.store.memory import MemoryStore
from rfork.schema import (
    ForkResult,
    HeldImage,
    HolderReport,
    ImageSelector,
    InstanceReport,
    Placement,
    Rank,
    ScaleUp,
)
from tests.unit.planner.builders import (
    CHUNKS,
    LAYOUT,
    OTHER_LAYOUT,
    VERSION,
    FakeTime,
    fork_request,
    make_service,
    report,
    seed_report,
)
from tests.unit.planner.records import GROUP, instance

NODE = Placement(host="node")


def holder_report(*images: HeldImage, name: str = "h", **changes: object) -> HolderReport:
    """Return the report of a holder on `node`."""
    values = {"holder_id": name, "placement": NODE, "memory_bytes": 1 << 30, "images": images}
    return HolderReport.model_validate(values | changes)


def held(name: str = "h-1", **changes: object) -> HeldImage:
    """Return an image that a holder has completely."""
    values = {
        "instance_id": name, "model": "m", "version": VERSION, "rank": Rank(), "layout_id": LAYOUT,
        "image_bytes": CHUNKS << 20, "state": "ready",
    }  # fmt: skip
    return HeldImage.model_validate(values | changes)


def image_report(name: str = "h-1", holder: str = "h", **changes: object) -> InstanceReport:
    """Return the report of a holder's complete image."""
    return seed_report(name, **({"holder": holder, "placement": NODE} | changes))


def scaleup(*hosts: str, name: str = "up", **changes: object) -> ScaleUp:
    """Return an announcement of one replica on each host."""
    return ScaleUp.model_validate(
        {"scaleup_id": name, "model": "m", "replicas": max(1, len(hosts)), "hosts": hosts} | changes
    )


async def causes(service: PlanService, of: HolderReport) -> list[str]:
    """Send a holder's heartbeat; return the causes of what it should keep."""
    return [each.cause for each in (await service.report_holder(of)).wanted]


def prefetches(service: PlanService) -> dict[str, float]:
    """Return the counted results of prefetches that are not 0."""
    results = ("used", "unused", "wrong_layout")
    counts = {result: service._metrics._prefetches.labels(result)._value.get() for result in results}
    return {result: count for result, count in counts.items() if count}


@pytest.fixture
def service(time: FakeTime) -> PlanService:
    """A service that plans each arrival immediately."""
    return make_service(time, instance_ttl_s=20)


# -- registration -----------------------------------------------------------------------------------


async def test_a_silent_holder_is_forgotten(service: PlanService, time: FakeTime) -> None:
    """Like an instance, after its TTL."""
    await service.report_holder(holder_report())
    time.now += 19
    await service.sweep()
    assert ["h"] == [each.holder_id for each in service.state.holders.all()]
    time.now += 2
    with pytest.raises(ProblemError, match="unknown holder h"):
        service.holder("h")
    await service.sweep()
    assert [] == service.state.holders.all()
    assert [] == service.state.holders.on_host("node")


async def test_a_restarted_planner_learns_holders_with_one_heartbeat(time: FakeTime) -> None:
    """Its images stay wanted although their instances have not reported yet."""
    restarted = make_service(time)
    await restarted.announce(scaleup("node"))
    assert ["announced"] == await causes(restarted, holder_report(held()))
    assert "h" == restarted.holder("h").holder_id


async def test_a_restarted_planner_ends_no_fetch(time: FakeTime) -> None:
    """Until every engine had time to report, all that the holder has is wanted."""
    restarted = make_service(time, heartbeat_interval_s=5)
    fetching = holder_report(held(state="fetching"))
    assert ["engine"] == await causes(restarted, fetching)
    time.now += 5
    assert [] == await causes(restarted, fetching)


async def test_a_removed_holder_is_forgotten(service: PlanService) -> None:
    """Removing it again is not an error."""
    await service.report_holder(holder_report())
    await service.remove_holder("h")
    await service.remove_holder("h")
    assert [] == service.state.holders.all()


async def test_holders_report_more_often_than_instances(service: PlanService) -> None:
    """An announcement reaches them within this time."""
    assert HOLDER_HEARTBEAT_S == (await service.report_holder(holder_report())).heartbeat_s


async def test_heartbeats_without_changes_are_rarely_stored(time: FakeTime) -> None:
    """Idle times alone do not count; the TTL does."""
    store = CountingStore(time)
    service = make_service(time, store, heartbeat_interval_s=5, instance_ttl_s=20)
    for second in range(10):
        await service.report_holder(holder_report(held(idle_s=second)))
        time.now += 1
    assert 3 == store.holder_changes
    await service.report_holder(holder_report(held(idle_s=0, used=True)))
    assert 4 == store.holder_changes


class CountingStore(MemoryStore):
    """Counts the stored reports of holders."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time.clock, max_finished_forks=10)
        self.holder_changes = 0

    async def commit(self, change: StoreChange) -> None:
        """Count and apply a change."""
        self.holder_changes += len(change.holders)
        await super().commit(change)


def test_a_holder_that_moves_is_found_on_its_new_host() -> None:
    """A record replaces the earlier one."""
    state = PlannerState(max_finished_forks=1)
    for host in ("a", "b"):
        moved = holder_report(placement=Placement(host=host))
        state.apply(StoreChange(holders=(HolderRecord(moved, seen_at=0.0, ttl_s=10.0),)))
    assert [] == state.holders.on_host("a")
    assert ["h"] == [each.holder_id for each in state.holders.on_host("b")]


# -- wanted images ----------------------------------------------------------------------------------


async def test_an_announcement_for_the_host_is_wanted(service: PlanService) -> None:
    """Other holders are not concerned."""
    await service.report(seed_report("s"))
    await service.announce(scaleup("node", "elsewhere"))
    assert ["announced"] == await causes(service, holder_report())
    assert [] == await causes(service, holder_report(name="other", placement=Placement(host="third")))


async def test_a_repeated_announcement_with_other_hosts_replaces_them(service: PlanService) -> None:
    """The first host is released."""
    await service.report(seed_report("s"))
    await service.announce(scaleup("node"))
    await service.announce(scaleup("elsewhere"))
    assert [] == await causes(service, holder_report())
    assert ["announced"] == await causes(service, holder_report(name="o", placement=Placement(host="elsewhere")))


@pytest.mark.parametrize("end", ["withdrawn", "expired", "arrived"])
async def test_an_announcement_that_ended_is_not_wanted(service: PlanService, time: FakeTime, end: str) -> None:
    """The image stays in the holder until it needs the memory."""
    await service.report(seed_report("s"))
    await service.announce(scaleup("node", expires_in_s=5))
    if end == "withdrawn":
        await service.withdraw("up")
    elif end == "arrived":
        await service.announce(scaleup("node", replicas=0))
    else:
        time.now += 6
    assert [] == await causes(service, holder_report())


async def test_the_images_of_engines_on_the_host_are_wanted(service: PlanService) -> None:
    """Not those of engines elsewhere, nor of other holders' images on the host."""
    await service.report(seed_report("s"))
    await service.report(image_report("o-1", "o", version="v0"))
    assert [] == await causes(service, holder_report())
    await service.report(seed_report("e", placement=NODE))
    assert ["engine"] == await causes(service, holder_report())
    await service.remove("e")
    assert [] == await causes(service, holder_report())


async def test_an_engine_that_moves_is_found_on_its_new_host(service: PlanService) -> None:
    """The index by host follows its reports."""
    await service.report(seed_report("e"))
    await service.report(seed_report("e", placement=NODE))
    assert ["engine"] == await causes(service, holder_report())


async def test_both_versions_of_a_rollout_are_wanted(service: PlanService, time: FakeTime) -> None:
    """The engine that came last is the more urgent one."""
    await service.report(seed_report("e1", placement=NODE))
    time.now += 1
    await service.report(seed_report("e2", placement=NODE, version="v2"))
    wanted = (await service.report_holder(holder_report())).wanted
    assert ["v2", VERSION] == [each.version for each in wanted]


async def test_drafts_of_the_last_replica_are_wanted_with_the_main_model(service: PlanService) -> None:
    """A draft may have another model name; the replica links them."""
    draft = Rank(role="speculative")
    await service.report(seed_report("main", replica="r"))
    await service.report(seed_report("draft", replica="r", model="d", rank=draft, layout_id=OTHER_LAYOUT))
    await service.report(seed_report("unrelated", model="d", version="v9", rank=draft))
    await service.announce(scaleup("node"))
    wanted = (await service.report_holder(holder_report())).wanted
    assert [("m", "main"), ("d", "speculative")] == [(each.model, each.rank.role) for each in wanted]


async def test_a_relay_makes_an_image_available(service: PlanService) -> None:
    """A target without a source does not."""
    await service.report(report("t"))
    await service.announce(scaleup("node"))
    assert [] == await causes(service, holder_report())
    await service.report(seed_report("s", max_readers=4))
    await service.plan(fork_request("t"))
    await service.remove("s")
    assert ["announced"] == await causes(service, holder_report())


async def test_a_selected_version_ignores_holders(service: PlanService) -> None:
    """Two holders that keep the earlier version do not outvote one engine."""
    for name in ("a", "b"):
        await service.report(image_report(f"{name}-1", name, version="v1", placement=Placement(host=name)))
    await service.report(seed_report("e", version="v2"))
    selecting = holder_report(selectors=(ImageSelector(model="m"),))
    assert ["v2"] == [each.version for each in (await service.report_holder(selecting)).wanted]


# -- scale-ups and batches --------------------------------------------------------------------------


async def test_a_holders_fork_is_no_replica_of_a_scale_up(service: PlanService) -> None:
    """Neither counted as arrived nor expected."""
    await service.report(seed_report("s", max_readers=9))
    await service.announce(scaleup("node"))
    await service.plan(fork_request("h-1", holder="h", placement=NODE))
    assert 0 == service.scaleup("up").arrived_count
    assert 1 == service.state.scaleups.expected(GROUP, service.now())
    await service.plan(fork_request("e", placement=NODE))
    assert 1 == service.scaleup("up").arrived_count


async def test_a_holders_fork_waits_for_no_batch(time: FakeTime) -> None:
    """Neither for a scale-up nor for other arrivals."""
    service = make_service(time, scaleup_wait_s=8, batch_window_s=30)
    await service.report(seed_report("s", max_readers=9))
    await service.announce(scaleup("node", "elsewhere"))
    plan = await service.plan(fork_request("h-1", holder="h", placement=NODE))
    assert ["s"] == [route.source_id for route in plan.routes]


# -- versions, seeds --------------------------------------------------------------------------------


async def test_a_target_without_files_adopts_the_version_of_engines(service: PlanService) -> None:
    """A holder that keeps the earlier version does not make the choice ambiguous."""
    await service.report(image_report(version="v1"))
    await service.report(image_report("h-2", version="v2"))
    await service.report(seed_report("e", version="v2"))
    assert "v2" == (await service.plan(fork_request("t", version=None))).version


async def test_a_target_without_files_adopts_the_version_of_a_holder(service: PlanService) -> None:
    """If no engine serves any."""
    await service.report(image_report(version="v1"))
    assert "v1" == (await service.plan(fork_request("t", version=None))).version


async def test_a_holders_earlier_version_is_no_second_version_of_the_model(service: PlanService) -> None:
    """It would fire an alert in each rollout."""
    await service.report(image_report(version="v1"))
    await service.report(seed_report("e", version="v2"))
    assert set() == service.state.models_with_several_versions()


@pytest.mark.parametrize(
    ("other", "follows_host", "is_last"),
    [
        (image_report(), True, False),
        (image_report(), False, True),
        (image_report(), None, True),
        (image_report(state="draining"), True, True),
        (seed_report("e2"), False, False),
    ],
    ids=["holder", "one-shot holder", "unknown holder", "draining holder", "engine"],
)
async def test_the_last_seed_rule_counts_lasting_holders(
    service: PlanService, other: InstanceReport, follows_host: bool | None, is_last: bool
) -> None:
    """The image of a holder for one engine ends soon."""
    if follows_host is not None:
        await service.report_holder(holder_report(follows_host=follows_host))
    await service.report(seed_report("e"))
    await service.report(other)
    refusal: Exception | None = None
    try:
        await service.drain("e")
    except ProblemError as problem:
        refusal = problem
    assert is_last == (getattr(refusal, "slug", "") == "last-seed")


async def test_a_holders_image_may_be_the_last_seed(service: PlanService) -> None:
    """Its drain is refused like that of an engine."""
    await service.report_holder(holder_report(held()))
    await service.report(image_report())
    with pytest.raises(ProblemError, match="last seed"):
        await service.drain("h-1")


def test_a_group_in_which_only_holders_receive_is_not_orphaned() -> None:
    """No engine is left that would need a seed."""
    state = PlannerState(max_finished_forks=1)
    state.apply(StoreChange(instances=(instance("s"), instance("h-1", holder="h", state="loading", verified=()))))
    state.apply(StoreChange(removed=("s",)))
    assert [False] == [group.orphaned for group in state.groups()]


def test_engines_and_their_seeds_are_counted_by_layout() -> None:
    """Holders are not; a draining engine is no seed."""
    state = PlannerState(max_finished_forks=1)
    state.apply(StoreChange(instances=(instance("a"), instance("h-1", holder="h"), instance("b", layout_id="b" * 32))))
    group = state.group(GROUP)
    assert 1 == group.engine_seeds(LAYOUT)
    assert "a" == group.newest_of(LAYOUT)
    state.apply(StoreChange(instances=(instance("a", state="draining"),)))
    assert 0 == group.engine_seeds(LAYOUT)
    state.apply(StoreChange(removed=("a",)))
    assert "h-1" == group.newest_of(LAYOUT)


# -- forks of holders -------------------------------------------------------------------------------


async def test_a_holders_fork_counts_only_its_bytes(service: PlanService) -> None:
    """No engine waits for it: its duration is not that of forks, and its failure is no failed fork."""
    await service.report(seed_report("s", max_readers=9))
    await service.plan(fork_request("h-1", holder="h", placement=NODE))
    sources = {"s": CHUNKS << 20}
    finish = ForkResult(outcome="forked", seconds=90, bytes_read=CHUNKS << 20, sources=sources)
    await service.finish("fork-h-1", finish)
    history = service.state.group(GROUP).history
    assert "h" == service.fork("fork-h-1").view(service.now()).holder
    assert CHUNKS << 20 == history.forked_bytes
    assert history.fork_s is None
    assert 0 == service._metrics._forks.labels("forked")._value.get()
    assert CHUNKS << 20 == service._metrics._bytes.labels("peer")._value.get()


async def test_a_holders_waiting_fork_does_not_delay_the_exit_of_the_last_seed(service: PlanService) -> None:
    """One that reads does, until it is done; an engine's fork does anyway."""
    await service.report(seed_report("s", max_readers=1))
    await service.plan(fork_request("h-1", holder="h", placement=NODE))
    reading = await service.can_exit("s")
    await service.finish("fork-h-1", ForkResult(outcome="failed", seconds=1, bytes_read=0))
    await service.drain("s", force=True)
    await service.plan(fork_request("h-2", holder="h", placement=NODE))
    waiting = await service.can_exit("s")
    await service.plan(fork_request("e"))
    with_engine = await service.can_exit("s")
    assert not reading.can_exit
    assert waiting.can_exit
    assert not with_engine.can_exit


async def test_many_holders_report_less_often(time: FakeTime) -> None:
    """The planner has other work; the interval is at most that of instances."""
    service = make_service(time, heartbeat_interval_s=5)
    for number in range(400):
        ack = await service.report_holder(holder_report(name=f"h{number}"))
    assert 2.0 == ack.heartbeat_s
    for number in range(400, 1200):
        ack = await service.report_holder(holder_report(name=f"h{number}"))
    assert 5.0 == ack.heartbeat_s


# -- results of prefetches --------------------------------------------------------------------------


async def prefetch(service: PlanService) -> None:
    """Let a holder on `node` fetch the image that is announced for it."""
    await service.report(seed_report("s", max_readers=9))
    await service.announce(scaleup("node"))
    await service.report_holder(holder_report())
    await service.report(image_report())
    await service.report_holder(holder_report(held()))


async def fork_engine(service: PlanService, *sources: str, layout_id: str = LAYOUT) -> None:
    """Let an engine on `node` finish a fork that read from these sources."""
    await service.plan(fork_request("e", placement=NODE, layout_id=layout_id))
    finish = ForkResult(outcome="forked", seconds=1, bytes_read=1, sources=dict.fromkeys(sources, 1))
    await service.finish("fork-e", finish)


async def test_an_engine_that_reads_from_the_holder_uses_its_prefetch(service: PlanService) -> None:
    """When the holder drops the image later, it is not counted again."""
    await prefetch(service)
    await fork_engine(service, "h-1")
    await service.report_holder(holder_report())
    assert {"used": 1} == prefetches(service)


async def test_an_engine_that_reads_from_another_host_uses_no_prefetch(service: PlanService) -> None:
    """Its layout is right, so the prediction was not wrong either."""
    await prefetch(service)
    await fork_engine(service, "s")
    assert {} == prefetches(service)


async def test_an_engine_with_another_layout_counts_as_a_wrong_prediction(service: PlanService) -> None:
    """Once, although the image is dropped unused, too."""
    await prefetch(service)
    await fork_engine(service, "s", layout_id=OTHER_LAYOUT)
    await service.report_holder(holder_report())
    assert {"wrong_layout": 1} == prefetches(service)


@pytest.mark.parametrize("used", [False, True])
async def test_an_image_that_the_holder_drops_unused_is_counted(service: PlanService, used: bool) -> None:
    """The holder reports whether an engine has read from it."""
    await prefetch(service)
    await service.report_holder(holder_report(held(used=used)))
    await service.report_holder(holder_report())
    assert ({} if used else {"unused": 1}) == prefetches(service)


@pytest.mark.parametrize("end", ["removed", "silent"])
async def test_the_unused_images_of_a_holder_that_ends_are_counted(
    service: PlanService, time: FakeTime, end: str
) -> None:
    """It makes no difference how it ends."""
    await prefetch(service)
    if end == "removed":
        await service.remove_holder("h")
    else:
        time.now += 21
        await service.sweep()
    assert {"unused": 1} == prefetches(service)


async def test_an_image_from_before_the_announcement_is_no_prefetch(service: PlanService) -> None:
    """The holder had it anyway."""
    await service.report(seed_report("s"))
    await service.report_holder(holder_report(held()))
    await service.announce(scaleup("node"))
    await service.report_holder(holder_report(held()))
    await service.report_holder(holder_report())
    assert {} == prefetches(service)


async def test_an_image_of_an_engine_on_the_host_is_no_prefetch(service: PlanService) -> None:
    """The engine came before the holder fetched the image, as after a prediction of another layout."""
    await service.report(seed_report("e", placement=NODE))
    await service.announce(scaleup("node"))
    assert ["announced"] == await causes(service, holder_report())
    await service.report_holder(holder_report(held()))
    await service.report_holder(holder_report())
    assert {} == prefetches(service)


async def test_a_holder_for_one_engine_prefetches(service: PlanService) -> None:
    """Its selector is an announcement."""
    await service.report(seed_report("s"))
    selectors = (ImageSelector(model="m"),)
    await service.report_holder(holder_report(follows_host=False, selectors=selectors))
    await service.report_holder(holder_report(held(), follows_host=False, selectors=selectors))
    await service.remove_holder("h")
    assert {"unused": 1} == prefetches(service)


async def test_the_fork_of_a_holder_is_no_use_of_a_prefetch(service: PlanService) -> None:
    """Only engines count."""
    await prefetch(service)
    await service.plan(fork_request("o-1", placement=NODE, holder="o"))
    await service.finish("fork-o-1", ForkResult(outcome="forked", seconds=1, bytes_read=1, sources={"h-1": 1}))
    assert {} == prefetches(service)
