"""The transfer machine: plans, sources, blame, reads, the deadline and changed weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rfork import weights_version
from rfork.errors import (
    DeadlineExceeded,
    NoSource,
    NotSameHost,
    PlannerUnreachable,
    RforkError,
    SourceBusy,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
    TargetError,
    TransportUnavailable,
)
from rfork.image.chunks import MIB
from rfork.image.layout import Manifest
from rfork.receiver.events import (
    Action,
    AdoptVersion,
    ChunkDigested,
    ChunksOffered,
    CloseSource,
    DigestKeptChunk,
    Event,
    ExcludeStorage,
    FenceImage,
    Finish,
    InvalidateChunks,
    KeptChunkDigested,
    LeasesRenewed,
    ManifestReceived,
    MarkVerified,
    MeasureOwnLoad,
    OpenPeer,
    OpenStorage,
    PlanFailed,
    ReadChunk,
    RenewLease,
    ReplanSuggested,
    ReportStorageActivity,
    RequestPlan,
    SetManifest,
    SourceActivity,
    SourceConnected,
    SourceFailed,
    Tick,
    TransportRefused,
)
from rfork.receiver.machine import (
    FIRST_RETRY_S,
    MAX_FAILURES,
    MIN_REPLAN_INTERVAL_S,
    MOVE_AFTER_S,
    PARTIAL_PLAN_RETRY_S,
    POLL_INTERVAL_S,
    find_stall,
)
from rfork.schema import ChunkAssignment, Route
from rfork.transport.base import CONNECT_TIMEOUT_S
from tests.unit.receiver.fleet import CHUNKS, image, settings
from tests.unit.receiver.machines import (
    ALL,
    FILES,
    MANIFEST,
    RIGHT,
    WRONG,
    MachineHarness,
    chunks_read,
    chunks_verified,
    lease,
    manifest_of,
    name_of,
    of_type,
    peer,
)

UNAVAILABLE = SourceUnavailable("closed")
CHANGED = SourceWeightsChanged("changed")
NOT_SAME_HOST = NotSameHost("two hosts")
QUICK = settings(source_idle_timeout_s=1.0, storage_idle_timeout_s=3.0)


def active(at: float, *, progress_at: float | None = None) -> SourceActivity:
    """Return the activity of a peer that was last active at this time."""
    return SourceActivity(message_at=at, progress_at=at if progress_at is None else progress_at)


def faults(harness: MachineHarness) -> list[tuple[str, str, str]]:
    """Return the faults that were reported to the planner: source, fault and error."""
    return [
        (fault.instance_id, fault.fault, fault.error)
        for request in harness.all_of(RequestPlan)
        for fault in request.faults
    ]


def following(*source_ids: str) -> MachineHarness:
    """Return a machine that follows a plan in which the sources share the chunks; none is connected yet."""
    harness = MachineHarness()
    share = CHUNKS // len(source_ids)
    harness.plan(*(peer(name, (at * share, (at + 1) * share)) for at, name in enumerate(source_ids)))
    return harness


# -- plans ----------------------------------------------------------------------------------------------


def test_the_first_action_requests_a_plan() -> None:
    """There are no faults and no assignments to report yet."""
    assert [RequestPlan((), ())] == MachineHarness().actions


def test_a_plan_opens_its_sources() -> None:
    """Each gets a connection of its own."""
    harness = MachineHarness()
    routes = peer("a", (0, 2)), peer("b", (2, 4))
    actions = harness.plan(*routes, storage=[FILES])
    assert [OpenPeer(0, routes[0]), OpenPeer(1, routes[1])] == of_type(actions, OpenPeer)
    assert [OpenStorage(2, FILES)] == of_type(actions, OpenStorage)


def test_a_source_that_is_planned_again_stays_open() -> None:
    """Only its lease is replaced."""
    harness = following("a")
    actions = harness.plan(peer("a", ALL, token="newer"))
    assert [RenewLease(0, lease("newer"))] == actions


def test_a_source_without_planned_chunks_is_closed() -> None:
    """It is not blamed."""
    harness = following("a", "b")
    actions = harness.plan(peer("a", ALL))
    assert [CloseSource(1)] == of_type(actions, CloseSource)
    assert [] == harness.reasons


def test_a_source_is_closed_only_after_its_last_read() -> None:
    """A read in flight is finished even if the next plan moves its chunk."""
    harness = following("a")
    harness.offer("a", (0, 1))
    assert [] == of_type(harness.plan(peer("b", ALL)), CloseSource)
    assert [CloseSource(0)] == of_type(harness.read("a", 0), CloseSource)


def test_at_most_one_plan_is_requested_at_a_time() -> None:
    """The response to the last request comes first."""
    harness = MachineHarness()
    harness.wait(3.0)
    harness.handle(ReplanSuggested("a better source"))
    assert 1 == len(harness.all_of(RequestPlan))


def test_a_suggested_plan_is_requested_with_the_current_assignments() -> None:
    """The planner then changes as little as possible."""
    harness = following("a", "b")
    harness.wait(MIN_REPLAN_INTERVAL_S)
    actions = harness.handle(ReplanSuggested("a better source"))
    a, b = (ChunkAssignment(source_id=name, chunks=(part,)) for name, part in (("a", (0, 3)), ("b", (3, 6))))
    assert [RequestPlan((), (a, b))] == actions


@pytest.mark.parametrize(("retry_after_s", "delay_s"), [(None, PARTIAL_PLAN_RETRY_S), (0.3, 0.3), (0.0, 0.05)])
def test_chunks_without_a_source_are_requested_again(retry_after_s: float | None, delay_s: float) -> None:
    """The planner determines the delay; it cannot make the target flood it."""
    harness = MachineHarness()
    harness.plan(peer("a", (0, 2)), retry_after_s=retry_after_s)
    assert [] == of_type(harness.wait(delay_s - 0.01), RequestPlan)
    assert 1 == len(of_type(harness.wait(0.02), RequestPlan))


def test_an_empty_plan_does_not_end_a_transfer_with_a_source() -> None:
    """The source continues, and the next plan is not urgent."""
    harness = following("a", "b")
    harness.fail("b", UNAVAILABLE)
    harness.plan()
    assert [] == of_type(harness.wait(PARTIAL_PLAN_RETRY_S - 0.01), RequestPlan)
    assert 1 == len(of_type(harness.wait(0.02), RequestPlan))


def test_an_unreachable_planner_ends_a_transfer_that_has_no_plan_yet() -> None:
    """A retry here would repeat those of the planner's client."""
    harness = MachineHarness()
    harness.handle(PlanFailed(PlannerUnreachable("no response")))
    assert "PlannerUnreachable: no response" == harness.result


def test_an_unreachable_planner_is_retried_by_a_transfer_that_had_a_plan() -> None:
    """It gives up after `no_source_timeout_s`."""
    harness = MachineHarness(settings(no_source_timeout_s=2 * FIRST_RETRY_S))
    harness.plan(peer("a", ALL))
    harness.fail("a", UNAVAILABLE)
    for _ in range(2):
        harness.handle(PlanFailed(PlannerUnreachable("no response")))
        assert not harness.machine.finished
        harness.wait(FIRST_RETRY_S)
    harness.wait(0.01)
    harness.handle(PlanFailed(PlannerUnreachable("no response")))
    assert "PlannerUnreachable: no response" == harness.result


# -- pauses ---------------------------------------------------------------------------------------------


def paused(harness: MachineHarness) -> list[Action]:
    """Pass a plan that pauses the transfer."""
    return harness.plan(is_paused=True, retry_after_s=1.0)


def test_a_pause_closes_the_sources() -> None:
    """Their reader slots are free, and none of them is blamed."""
    harness = following("a", "b")
    assert [CloseSource(0), CloseSource(1)] == of_type(paused(harness), CloseSource)
    assert [] == harness.reasons


def test_a_pause_lets_reads_in_flight_end() -> None:
    """Then the source is closed, and nothing more is read from it."""
    harness = following("a")
    harness.offer("a", ALL)
    assert [] == of_type(paused(harness), CloseSource)
    in_flight = chunks_read(harness.actions)
    actions = harness.read("a", *in_flight)
    assert in_flight == chunks_verified(harness.actions)
    assert [CloseSource(0)] == of_type(actions, CloseSource)
    assert [] == chunks_read(actions)


def test_a_paused_transfer_requests_a_plan_again() -> None:
    """After the time that the planner states."""
    harness = following("a")
    paused(harness)
    assert [] == of_type(harness.wait(0.99), RequestPlan)
    assert 1 == len(of_type(harness.wait(0.02), RequestPlan))


def test_a_paused_transfer_does_not_run_out_of_sources() -> None:
    """It waits until its deadline."""
    harness = MachineHarness(settings(no_source_timeout_s=1.0), deadline_s=20.0)
    while harness.now < 115.0:
        paused(harness)
        harness.wait(1.01)
    assert not harness.machine.finished
    harness.wait(10.0)
    assert str(harness.result).startswith("DeadlineExceeded")


def test_a_paused_transfer_outlasts_a_planner_that_restarts() -> None:
    """Although it had no source yet."""
    harness = MachineHarness()
    paused(harness)
    harness.wait(1.01)
    harness.handle(PlanFailed(PlannerUnreachable("no response")))
    assert harness.result is None


def test_a_paused_transfer_does_not_compare_its_own_storage() -> None:
    """Its sources are not slow."""
    harness = MachineHarness(own_storage="local")
    harness.plan(peer("a", ALL))
    paused(harness)
    assert [] == of_type(harness.wait(0.99), MeasureOwnLoad)


def test_a_transfer_continues_after_a_pause() -> None:
    """It keeps the verified chunks."""
    harness = following("a")
    harness.offer("a", (0, 1))
    harness.read("a", 0)
    paused(harness)
    harness.wait(1.01)
    harness.plan(peer("a", (1, CHUNKS)))
    harness.offer("a", ALL)
    harness.read("a", *range(1, CHUNKS))
    assert "complete" == harness.result
    assert 0 == harness.machine.stats.bytes_repeated


def test_renewed_leases_are_presented_to_open_sources() -> None:
    """Those of other sources are ignored."""
    harness = following("a", "b")
    harness.fail("b", UNAVAILABLE)
    actions = harness.handle(LeasesRenewed({"a": lease("newer"), "b": lease("newer"), "c": lease("newer")}))
    assert [RenewLease(0, lease("newer"))] == actions


# -- reads ----------------------------------------------------------------------------------------------


def test_chunks_are_read_as_they_are_offered() -> None:
    """Only the planned ones."""
    harness = following("a", "b")
    assert [] == chunks_read(harness.offer("a", (5, 6)))
    assert [2] == chunks_read(harness.handle(ChunksOffered(0, ((2, 3),))))


def test_reads_in_flight_are_limited() -> None:
    """The limit is `max_inflight_chunks`, for all sources together."""
    harness = following("a", "b")
    assert [0, 1] == chunks_read(harness.offer("a", ALL))
    assert [] == chunks_read(harness.offer("b", ALL))
    assert [3] == chunks_read(harness.read("a", 0))


def test_the_first_read_over_a_network_is_alone() -> None:
    """It shows the rate of the link, which limits the reads in flight from then on."""
    harness = following("a")
    harness.handle(SourceConnected(0, "http"))
    harness.handle(ManifestReceived(0, MANIFEST))
    assert [0] == chunks_read(harness.handle(ChunksOffered(0, (ALL,))))


@pytest.mark.parametrize(("deadline_s", "read_by_s"), [(100.0, 12.0), (5.0, 5.0)])
def test_the_deadline_of_a_read(deadline_s: float, read_by_s: float) -> None:
    """A chunk may take `source_idle_timeout_s` plus its time at the minimum rate, within the fork's deadline."""
    chosen = settings(source_idle_timeout_s=10.0, min_source_bytes_per_s=MIB // 2)
    harness = MachineHarness(chosen, deadline_s=deadline_s)
    harness.plan(peer("a", ALL))
    reads = of_type(harness.offer("a", (0, 1)), ReadChunk)
    assert [harness.now + read_by_s] == [read.read_by for read in reads]


def test_a_valid_chunk_is_served() -> None:
    """Its digest is sent to readers with it."""
    harness = following("a")
    harness.offer("a", (0, 1))
    assert [MarkVerified(0, RIGHT[0])] == harness.read("a", 0)


def test_a_manifest_of_another_layout_fails_its_source() -> None:
    """It is not served, and the next plan names another source."""
    harness = MachineHarness()
    harness.plan(peer("a", ALL))
    other = image(chunks=CHUNKS - 1)
    actions = harness.handle(ManifestReceived(0, Manifest(other.layout, RIGHT[:-1])))
    assert [] == of_type(actions, SetManifest)
    assert ["LayoutMismatch"] == harness.reasons


def test_the_manifest_is_served_before_the_first_chunk() -> None:
    """Readers could not verify the chunk otherwise."""
    harness = following("a")
    harness.offer("a", (0, 1))
    harness.read("a", 0)
    served = [action for action in harness.actions if isinstance(action, SetManifest | MarkVerified)]
    assert [SetManifest(MANIFEST), MarkVerified(0, RIGHT[0])] == served


def test_the_last_verified_chunk_ends_the_transfer() -> None:
    """No further plan is requested."""
    harness = following("a")
    harness.offer("a", ALL)
    actions = harness.read("a", *range(CHUNKS))
    assert [MarkVerified(5, RIGHT[5]), Finish()] == actions[-2:]
    assert 1 == len(harness.all_of(RequestPlan))


def test_a_transfer_reports_what_each_source_served() -> None:
    """In descending order of bytes."""
    harness = MachineHarness()
    harness.plan(peer("a", (0, 1)), peer("b", (1, CHUNKS)))
    harness.offer("a", ALL)
    harness.offer("b", ALL)
    harness.read("a", 0)
    harness.read("b", *range(1, CHUNKS))
    shares = harness.machine.stats.shares
    assert [("b", CHUNKS - 1), ("a", 1)] == [(share.source_id, share.verified_chunks) for share in shares]
    assert ["host-of-b", "host-of-a"] == [share.host for share in shares]
    assert {"shared_memory"} == {share.transport for share in shares}


def test_bytes_that_arrive_count_even_if_they_are_wrong() -> None:
    """A chunk that is read twice counts twice, and as repeated."""
    harness = following("a")
    harness.offer("a", (0, 1))
    harness.read("a", 0, digest=WRONG)
    harness.plan(peer("b", ALL))
    harness.offer("b", (0, 1))
    harness.read("b", 0)
    assert 2 * MIB == harness.machine.bytes_read
    assert MIB == harness.machine.stats.bytes_repeated


def test_the_rate_of_a_peer_excludes_the_time_without_a_chunk_to_read() -> None:
    """The second chunk is offered ten seconds after the first, and each takes a second."""
    harness = following("a")
    for chunk in (0, 1):
        harness.offer("a", (chunk, chunk + 1))
        harness.now += 1.0
        harness.read("a", chunk)
        harness.now += 10.0
    rates = harness.machine.active_rates(harness.now)
    assert pytest.approx(MIB) == rates.total
    assert pytest.approx({"a": MIB}) == rates.by_source


def test_reads_from_two_peers_at_once_have_one_rate_together() -> None:
    """Each serves a chunk in the same second."""
    harness = MachineHarness()
    harness.plan(peer("a", (0, 1)), peer("b", (1, CHUNKS)))
    harness.offer("a", (0, 1))
    harness.offer("b", (1, 2))
    harness.now += 1.0
    harness.read("a", 0)
    harness.read("b", 1)
    rates = harness.machine.active_rates(harness.now)
    assert pytest.approx(2 * MIB) == rates.total
    assert pytest.approx({"a": MIB, "b": MIB}) == rates.by_source


def test_the_rate_of_a_closed_peer_is_not_reported() -> None:
    """It shows nothing about a link in use; the time after its failed read does not count."""
    harness = following("a")
    harness.offer("a", (0, 2))
    harness.now += 1.0
    harness.read("a", 0)
    harness.now += 1.0
    harness.fail_read("a", 1, SourceUnavailable("connection reset"))
    rates = harness.machine.active_rates(harness.now)
    assert {} == rates.by_source
    assert rates == harness.machine.active_rates(harness.now + 10.0)


def test_rates_of_storage_are_not_reported() -> None:
    """They show nothing about a link."""
    harness = MachineHarness()
    harness.plan(storage=[FILES])
    harness.open_storage(manifest=MANIFEST)
    harness.now += 1.0
    harness.read(name_of(FILES), 0)
    rates = harness.machine.active_rates(harness.now)
    assert rates.total is None
    assert {} == rates.by_source


# -- failures and blame ---------------------------------------------------------------------------------


def test_a_failed_source_is_closed_and_reported() -> None:
    """Its chunks need a new plan."""
    harness = following("a")
    harness.wait(1.0)
    actions = harness.fail("a", UNAVAILABLE)
    assert [CloseSource(0, UNAVAILABLE)] == of_type(actions, CloseSource)
    assert [("a", "source", "SourceUnavailable")] == faults(harness)


def test_a_failed_read_fails_its_source() -> None:
    """The chunk is read from the next one."""
    harness = following("a")
    harness.offer("a", (0, 1))
    assert [CloseSource(0, UNAVAILABLE)] == of_type(harness.fail_read("a", 0, UNAVAILABLE), CloseSource)
    harness.wait(1.0)
    harness.plan(peer("b", ALL))
    assert [0] == chunks_read(harness.offer("b", (0, 1)))


def test_a_wrong_chunk_is_not_served() -> None:
    """Its source is blamed."""
    harness = following("a")
    harness.offer("a", (0, 1))
    harness.wait(1.0)
    harness.read("a", 0, digest=WRONG)
    assert [] == harness.all_of(MarkVerified)
    assert "a:1: chunk 0 does not match its digest" == str(harness.machine.reasons[0])
    assert [("a", "source", "SourceCorrupt")] == faults(harness)


def test_a_failed_source_is_reported_once() -> None:
    """Two of its reads fail, and its own thread ends."""
    harness = following("a")
    harness.offer("a", (0, 2))
    harness.fail_read("a", 0, UNAVAILABLE)
    harness.fail_read("a", 1, UNAVAILABLE)
    harness.fail("a", UNAVAILABLE)
    harness.wait(1.0)
    assert [("a", "source", "SourceUnavailable")] == faults(harness)


def test_faults_are_reported_until_a_plan_is_received() -> None:
    """A request that failed may not have reached the planner."""
    harness = following("a", "b")
    harness.wait(1.0)
    harness.fail("a", UNAVAILABLE)
    harness.handle(PlanFailed(PlannerUnreachable("no response")))
    harness.wait(PARTIAL_PLAN_RETRY_S)
    harness.plan(peer("b", ALL))
    harness.wait(1.0)
    harness.handle(ReplanSuggested("a better source"))
    assert [0, 1, 1, 0] == [len(request.faults) for request in harness.all_of(RequestPlan)]


def test_faults_that_occur_during_a_request_are_reported_with_the_next() -> None:
    """The planner did not receive them."""
    harness = following("a", "b")
    harness.wait(1.0)
    harness.fail("a", UNAVAILABLE)
    harness.fail("b", SourceBusy("busy"))
    harness.plan(peer("c", ALL))
    harness.wait(1.0)
    harness.handle(ReplanSuggested("a better source"))
    assert [("a", "source", "SourceUnavailable"), ("b", "source", "SourceBusy")] == faults(harness)


def test_a_source_that_fails_repeatedly_is_not_retried() -> None:
    """The last failure counts as one of the network between the two."""
    harness = MachineHarness()
    for _ in range(MAX_FAILURES):
        harness.plan(peer("a", ALL))
        harness.fail("a", TargetError("out of memory"))
        harness.wait(1.0)
    assert ["target", "target", "network"] == [fault for _, fault, _ in faults(harness)]


def test_an_unusable_transport_is_recorded_once() -> None:
    """The number of affected sources does not matter, and nothing is reported to the planner."""
    harness = following("a", "b")
    for connection, error in (
        (0, NOT_SAME_HOST),
        (1, NotSameHost("two hosts")),
        (0, TransportUnavailable("no device")),
    ):
        harness.handle(TransportRefused(connection, error))
    assert ["two hosts", "no device"] == [str(error) for error in harness.machine.reasons]
    assert [] == faults(harness)


# -- events of closed connections -----------------------------------------------------------------------


def reopened() -> MachineHarness:
    """Return a machine whose source failed while a chunk was read from it, and was opened again."""
    harness = following("a")
    harness.offer("a", (0, 1))
    harness.wait(1.0)
    harness.fail("a", UNAVAILABLE)
    harness.plan(peer("a", ALL))
    assert {"a": 1} == harness.connections
    return harness


@pytest.mark.parametrize(
    "event",
    [
        ChunksOffered(0, (ALL,)),
        ManifestReceived(0, manifest_of(2)),
        SourceFailed(0, SourceBusy("busy")),
        TransportRefused(0, NOT_SAME_HOST),
    ],
)
def test_events_of_a_closed_connection_have_no_effect(
    event: Event,
) -> None:
    """Its source was opened again."""
    harness = reopened()
    assert [] == harness.handle(event)
    assert ["SourceUnavailable"] == harness.reasons


def test_a_chunk_in_flight_is_not_read_concurrently() -> None:
    """A read of a closed connection may still write to the image."""
    harness = reopened()
    assert [1] == chunks_read(harness.offer("a", ALL))


def test_a_valid_chunk_of_a_closed_connection_counts() -> None:
    """Its digest is that of the manifest."""
    harness = reopened()
    assert [MarkVerified(0, RIGHT[0])] == harness.handle(ChunkDigested(0, 0, RIGHT[0]))


def test_a_wrong_chunk_of_a_closed_connection_is_read_again() -> None:
    """No one is blamed a second time."""
    harness = reopened()
    harness.offer("a", (0, 1))
    assert [0] == chunks_read(harness.handle(ChunkDigested(0, 0, WRONG)))
    assert ["SourceUnavailable"] == harness.reasons


# -- the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        Tick(),
        ReplanSuggested("a better source"),
        LeasesRenewed({"a": lease("newer")}),
        PlanFailed(NoSource("none")),
        ManifestReceived(0, manifest_of(2)),
        ChunksOffered(0, (ALL,)),
        ChunkDigested(0, 1, RIGHT[1]),
        SourceFailed(0, UNAVAILABLE),
    ],
)
def test_nothing_happens_after_the_end(
    event: Event,
) -> None:
    """Threads that have yet to end send their events in vain."""
    harness = MachineHarness(deadline_s=10.0)
    harness.plan(peer("a", ALL))
    harness.offer("a", (0, 2))
    harness.wait(10.0)
    assert harness.machine.finished
    assert [] == harness.handle(event)


def test_the_deadline_ends_a_transfer() -> None:
    """The error states how far it got, and no source is blamed."""
    harness = MachineHarness(deadline_s=10.0)
    harness.plan(peer("a", ALL))
    harness.offer("a", ALL)
    harness.read("a", 0, 1)
    harness.wait(9.9)
    assert not harness.machine.finished
    harness.wait(0.2)
    assert "DeadlineExceeded: the deadline passed with 2 of 6 chunks verified" == harness.result
    assert [] == harness.reasons


def test_the_deadline_is_checked_when_it_passes() -> None:
    """Between two polls."""
    harness = MachineHarness(deadline_s=0.1)
    assert harness.now + 0.1 == harness.machine.wake_at(harness.now)


def test_a_read_that_ends_at_the_deadline_blames_no_source() -> None:
    """Its own deadline is the fork's."""
    harness = MachineHarness(deadline_s=10.0)
    harness.plan(peer("a", ALL))
    harness.offer("a", (0, 1))
    harness.now += 10.0
    harness.fail_read("a", 0, SourceTimeout("no byte"))
    assert [] == harness.reasons
    assert isinstance(harness.all_of(Finish)[0].error, DeadlineExceeded)


def test_an_image_that_is_complete_at_the_deadline_is_used() -> None:
    """All its chunks are verified."""
    harness = MachineHarness(deadline_s=10.0)
    harness.plan(peer("a", ALL))
    harness.offer("a", ALL)
    harness.read("a", *range(CHUNKS - 1))
    harness.now += 10.0
    harness.handle(ChunkDigested(0, CHUNKS - 1, RIGHT[CHUNKS - 1]))
    assert "complete" == harness.result


# -- stalled sources ------------------------------------------------------------------------------------


def stall_of(activity: SourceActivity, *, is_storage: bool = False, starved: bool = True) -> str | None:
    """Return why a source counts as stalled after 100 s, with timeouts of 10 s, and 60 s for storage."""
    chosen = settings(source_idle_timeout_s=10.0, storage_idle_timeout_s=60.0)
    return find_stall(activity, chosen, 100.0, is_storage=is_storage, starved=starved)


@pytest.mark.parametrize(
    ("silent_s", "idle_s", "starved", "expected"),
    [
        (0.0, 0.0, True, None),
        (9.0, 29.0, True, None),
        (11.0, 11.0, False, "silent for 11.0 s"),
        (0.0, 31.0, True, "offered no new chunk for 31.0 s"),
        (0.0, 31.0, False, None),
        (11.0, 5.0, True, None),
    ],
)
def test_a_silent_or_starved_source_is_stalled(
    silent_s: float, idle_s: float, starved: bool, expected: str | None
) -> None:
    """The limit is `source_idle_timeout_s` without a sign of life, or three times that without a readable chunk."""
    activity = SourceActivity(message_at=100.0 - silent_s, progress_at=100.0 - idle_s)
    assert expected == stall_of(activity, starved=starved)


@pytest.mark.parametrize(
    ("connecting_until", "expected"), [(99.5, None), (90.5, None), (89.5, "silent for 10.5 s"), (110.0, None)]
)
def test_silence_counts_only_after_the_connection(connecting_until: float, expected: str | None) -> None:
    """Connecting has a separate deadline; a connect that exceeds it counts as silence eventually."""
    activity = SourceActivity(message_at=50.0, progress_at=50.0, connecting_until=connecting_until)
    assert expected == stall_of(activity)


@pytest.mark.parametrize(
    ("still_s", "is_relay", "starved", "expected"),
    [
        (59.0, False, True, None),
        (61.0, False, True, "its storage made no progress for 61.0 s"),
        (61.0, False, False, None),
        (61.0, True, True, None),
        (69.0, True, True, None),
        (71.0, True, True, "its storage made no progress for 71.0 s"),
    ],
)
def test_a_source_stalls_with_its_storage(still_s: float, is_relay: bool, starved: bool, expected: str | None) -> None:
    """A relay has `source_idle_timeout_s` more, to find another source."""
    activity = SourceActivity(message_at=100.0, progress_at=20.0, storage_at=100.0 - still_s, is_relay=is_relay)
    assert expected == stall_of(activity, starved=starved)


@pytest.mark.parametrize(("idle_s", "expected"), [(0.0, None), (60.0, None), (60.1, "no data for 60.1 s")])
def test_local_storage_stalls_if_its_readers_wait(idle_s: float, expected: str | None) -> None:
    """Its other times do not count."""
    activity = SourceActivity(message_at=0.0, progress_at=0.0, storage_at=0.0, idle_s=idle_s)
    assert expected == stall_of(activity, is_storage=True)


def test_a_silent_source_is_replaced() -> None:
    """It has sent nothing for `source_idle_timeout_s`, not even a keep-alive."""
    harness = MachineHarness(QUICK)
    harness.plan(peer("a", ALL))
    opened_at = harness.now
    harness.wait(1.0, {"a": active(opened_at)})
    assert [] == harness.reasons
    harness.wait(POLL_INTERVAL_S, {"a": active(opened_at)})
    assert ["a:1: silent for 1.2 s"] == [str(reason) for reason in harness.machine.reasons]
    assert [("a", "source", "SourceTimeout")] == faults(harness)


def test_a_silent_source_that_has_served_its_chunks_is_not_blamed() -> None:
    """Nothing is expected from it any more."""
    harness = MachineHarness(QUICK)
    harness.plan(peer("a", (0, 1)), peer("b", (1, CHUNKS)))
    harness.offer("a", (0, 1))
    harness.read("a", 0)
    opened_at = harness.now
    for _ in range(8):
        harness.tick(POLL_INTERVAL_S, {"a": active(opened_at), "b": active(harness.now)})
    assert [] == harness.reasons


def test_a_chunk_that_arrives_is_a_sign_of_life() -> None:
    """The progress stream of a source may be slower than its bytes."""
    harness = MachineHarness(QUICK)
    harness.plan(peer("a", ALL))
    opened_at = harness.now
    harness.offer("a", ALL)
    harness.wait(0.75, {"a": active(opened_at)})
    harness.read("a", 0)
    harness.wait(0.75, {"a": active(opened_at)})
    assert [] == harness.reasons


@pytest.mark.parametrize(("responds", "expected"), [(True, []), (False, ["SourceTimeout"])])
def test_a_target_that_was_suspended_blames_no_source(responds: bool, expected: list[str]) -> None:
    """Messages received meanwhile are handled first; a source without any has stalled one poll later."""
    harness = MachineHarness(QUICK)
    harness.plan(peer("a", ALL))
    opened_at = harness.now
    harness.tick(0.2, {"a": active(opened_at)})
    harness.tick(8.8, {"a": active(opened_at)})
    assert [] == harness.reasons
    activity = {"a": active(harness.now if responds else opened_at)}
    harness.tick(0.1, activity)
    assert [] == harness.reasons
    harness.tick(POLL_INTERVAL_S - 0.1, activity)
    assert expected == harness.reasons


def test_a_read_that_times_out_while_the_target_is_suspended_blames_no_source() -> None:
    """The source sent its bytes in time, but this process did not run."""
    harness = MachineHarness(QUICK)
    harness.plan(peer("a", ALL))
    harness.offer("a", (0, 1))
    harness.now += 9.0
    harness.fail_read("a", 0, SourceTimeout("no byte"))
    harness.wait(0.1)
    assert [("a", "target", "TargetError")] == faults(harness)


# -- late sources ---------------------------------------------------------------------------------------


def with_late_source() -> MachineHarness:
    """Return a machine that reads one chunk from `good`, and the rest from `late`, which sends no bytes."""
    harness = MachineHarness()
    harness.plan(peer("good", (0, 1)), peer("late", (1, CHUNKS)))
    harness.offer("good", ALL)
    return harness


def late_activity(harness: MachineHarness) -> dict[str, SourceActivity]:
    at = harness.now
    return {"good": active(at), "late": SourceActivity(message_at=at, progress_at=at, has_no_bytes=True)}


def test_chunks_of_a_late_source_are_read_from_another() -> None:
    """It has served nothing for half a second, and the other has."""
    harness = with_late_source()
    harness.read("good", 0)
    assert [] == chunks_read(harness.wait(MOVE_AFTER_S - 0.01, late_activity(harness)))
    assert [1, 2] == chunks_read(harness.wait(POLL_INTERVAL_S, late_activity(harness)))


def test_no_source_is_late_before_another_has_served_a_chunk() -> None:
    """Both may wait for the same cause."""
    harness = with_late_source()
    assert [] == chunks_read(harness.wait(2 * MOVE_AFTER_S, late_activity(harness)))


def test_a_late_source_is_replaced_after_the_connect_timeout() -> None:
    """A network that drops large packets, for example, accepts connections but delivers no data."""
    harness = MachineHarness()
    harness.plan(peer("good", (0, CHUNKS - 1)), peer("late", (CHUNKS - 1, CHUNKS)))
    harness.offer("late", ALL)
    harness.offer("good", ALL)
    harness.read("good", *range(CHUNKS - 1))
    opened_at = harness.now
    while harness.now < opened_at + CONNECT_TIMEOUT_S - POLL_INTERVAL_S:
        harness.tick(POLL_INTERVAL_S, late_activity(harness))
    assert [] == harness.reasons
    closed = of_type(harness.tick(POLL_INTERVAL_S, late_activity(harness)), CloseSource)
    assert ["SourceUnreachable"] == [source.error.kind for source in closed if source.error is not None]
    harness.fail_read("late", CHUNKS - 1, UNAVAILABLE)
    assert [("late", "network", "SourceUnreachable")] == faults(harness)


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("no instance has the image", ""),
        (f"2 versions of m are served (v1, v2) and {weights_version.UNSTATED}", weights_version.STATE_VERSION_HINT),
    ],
)
def test_the_error_without_a_source_has_the_hint_for_its_reason(reason: str, hint: str) -> None:
    """A target that would get any of several versions must state one; another seed would not help."""
    harness = following("a")
    harness.fail("a", UNAVAILABLE)
    harness.plan(reason=reason)
    (finish,) = harness.all_of(Finish)
    assert finish.error is not None
    assert (f"NoSource: {reason}", hint) == (harness.result, finish.error.hint)


# -- changed weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        ((CHANGED,), False),
        ((CHANGED, UNAVAILABLE), True),
        ((UNAVAILABLE, CHANGED), False),
        ((CHANGED, NOT_SAME_HOST), False),
    ],
)
def test_new_weights_are_expected_only_after_the_last_source_changed_its_weights(
    errors: Sequence[RforkError], ends: bool
) -> None:
    """A transport that cannot be used with a source is not a failure of the source."""
    harness = MachineHarness()
    share = CHUNKS // len(errors)
    routes = [peer(name, (at * share, (at + 1) * share)) for at, name in zip(range(len(errors)), "ab", strict=False)]
    harness.plan(*routes, weights_id=MANIFEST.weights_id)
    for name, error in zip("ab", errors, strict=False):
        harness.handle(TransportRefused(harness.connections[name], TransportUnavailable("no device")))
        harness.fail(name, error)
    harness.wait(1.0)
    harness.plan(reason="no source left")
    assert ("NoSource: no source left" if ends else None) == harness.result


def changed_after(*chunks: int) -> MachineHarness:
    """Return a machine that verified these chunks of version 1 before its only source changed its weights."""
    harness = following("a")
    harness.offer("a", ALL)
    harness.read("a", *chunks)
    harness.fail("a", CHANGED)
    for connection, chunk in [(0, read.chunk) for read in harness.all_of(ReadChunk) if read.chunk not in chunks]:
        harness.handle(ChunkDigested(connection, chunk, WRONG))
    harness.wait(1.0)
    return harness


def test_weights_that_no_source_serves_any_more_are_dropped() -> None:
    """The next request accepts any weights."""
    harness = changed_after(0, 1)
    actions = harness.plan()
    assert 1 == len(of_type(actions, FenceImage))
    assert 1 == len(of_type(actions, RequestPlan))
    assert "2 chunks are compared again" in str(harness.machine.reasons[-1])


def test_unchanged_chunks_are_kept_after_a_restart() -> None:
    """They are digested in place, and not read again."""
    harness = changed_after(0, 1)
    harness.plan()
    harness.plan(peer("a", ALL))
    newer = manifest_of(2, shared=1)
    actions = harness.offer("a", ALL, manifest=newer)
    assert [DigestKeptChunk(0)] == of_type(actions, DigestKeptChunk)
    assert [MarkVerified(0, RIGHT[0])] == of_type(harness.handle(KeptChunkDigested(0, RIGHT[0])), MarkVerified)


@pytest.mark.parametrize("digest", [WRONG, None], ids=["overwritten", "not digested"])
def test_a_kept_chunk_that_is_not_right_is_read(digest: bytes | None) -> None:
    """It may have been overwritten by a read that failed."""
    harness = changed_after(0, 1)
    harness.plan()
    harness.plan(peer("a", ALL))
    harness.offer("a", (0, 1), manifest=manifest_of(2, shared=1))
    assert [0] == chunks_read(harness.handle(KeptChunkDigested(0, digest)))
    assert [0, 1] == chunks_verified(harness.actions)


def test_digests_of_kept_chunks_occupy_the_workers() -> None:
    """A read that waited for them would lose the time that it has."""
    harness = changed_after(0, 1)
    harness.plan()
    harness.plan(peer("a", ALL))
    assert [] == chunks_read(harness.offer("a", ALL, manifest=manifest_of(2, shared=2)))
    assert [2] == chunks_read(harness.handle(KeptChunkDigested(0, RIGHT[0])))


def test_a_plan_of_other_weights_waits_for_the_reads_in_flight() -> None:
    """They must not count for the next weights."""
    harness = following("a")
    harness.offer("a", (0, 1))
    harness.wait(1.0)
    harness.handle(ReplanSuggested("newer weights"))
    newer = manifest_of(2)
    assert [] == harness.plan(peer("b", ALL), weights_id=newer.weights_id)
    harness.read("a", 0)
    harness.wait(MIN_REPLAN_INTERVAL_S)
    actions = harness.plan(peer("b", ALL), weights_id=newer.weights_id)
    assert 1 == len(of_type(actions, FenceImage))
    assert ["b"] == [opened.route.source_id for opened in of_type(actions, OpenPeer)]


def versions_in(actions: Sequence[Action]) -> list[str]:
    return [adopted.version for adopted in of_type(actions, AdoptVersion)]


def test_the_version_of_a_plan_is_adopted_before_anything_is_read() -> None:
    """Once: further plans of this version change nothing."""
    harness = MachineHarness()
    actions = harness.plan(peer("a", ALL), version="v1")
    assert ["v1"] == versions_in(actions)
    assert actions.index(AdoptVersion("v1")) < actions.index(of_type(actions, OpenPeer)[0])
    harness.wait(1.0)
    harness.handle(ReplanSuggested("a relay is slow"))
    assert [] == versions_in(harness.plan(peer("a", ALL), version="v1"))


@pytest.mark.parametrize("routes", [(), (peer("b", ALL),)], ids=["without sources", "with sources"])
def test_reads_in_flight_keep_their_version(routes: Sequence[Route]) -> None:
    """A plan of newer weights is not followed meanwhile, so the weights that are then complete have the older one."""
    harness = MachineHarness()
    harness.plan(peer("a", ALL), version="v1", weights_id=MANIFEST.weights_id)
    harness.offer("a", ALL)
    harness.wait(1.0)
    harness.handle(ReplanSuggested("newer weights"))
    assert [] == versions_in(harness.plan(*routes, version="v2"))


def test_a_fork_without_sources_adopts_the_version_that_it_waits_for() -> None:
    """A fallback then loads that version."""
    assert ["v1"] == versions_in(MachineHarness().plan(version="v1", reason="none has this layout"))


def test_a_source_with_other_weights_than_this_fork_is_refused() -> None:
    """All chunks are of the weights that the first source named."""
    harness = following("a", "b")
    harness.offer("a", (0, 1))
    harness.wait(1.0)
    actions = harness.handle(ManifestReceived(1, manifest_of(2)))
    assert [("b", "source", "SourceWeightsChanged")] == faults(harness)
    assert [1] == [closed.connection for closed in of_type(actions, CloseSource)]
    assert [SetManifest(MANIFEST)] == harness.all_of(SetManifest)


def test_a_source_with_other_weights_than_planned_is_refused() -> None:
    """The plan decides, not the source that responds first."""
    harness = MachineHarness()
    harness.plan(peer("a", ALL), weights_id=manifest_of(2).weights_id)
    harness.handle(ManifestReceived(0, MANIFEST))
    assert ["SourceWeightsChanged"] == harness.reasons
    assert [] == harness.all_of(SetManifest)


def test_weights_may_change_before_any_chunk_was_read() -> None:
    """Readers that wait get a new generation."""
    harness = following("a")
    harness.handle(ManifestReceived(0, MANIFEST))
    newer = manifest_of(2)
    actions = harness.handle(ManifestReceived(0, newer))
    assert [InvalidateChunks(()), SetManifest(newer)] == actions


def test_a_partial_source_of_dropped_weights_is_not_opened() -> None:
    """It has yet to drop its chunks itself."""
    harness = changed_after(0, 1)
    harness.plan()
    stale = harness.plan(peer("b", (0, 4)), weights_id=MANIFEST.weights_id, retry_after_s=0.1)
    assert [] == of_type(stale, OpenPeer)
    harness.wait(0.1)
    complete = harness.plan(peer("c", ALL), weights_id=MANIFEST.weights_id)
    assert ["c"] == [opened.route.source_id for opened in of_type(complete, OpenPeer)]


# -- reports to readers ---------------------------------------------------------------------------------


def test_the_activity_of_storage_is_reported_when_it_changes() -> None:
    """That of a source that waits for storage is relayed."""
    harness = following("a")
    at = harness.now
    relayed = {"a": SourceActivity(message_at=at, progress_at=at, storage_at=at - 1.0)}
    assert [ReportStorageActivity(at - 1.0, relayed=True)] == harness.tick(0.1, relayed)
    assert [] == harness.tick(0.1, relayed)
    assert [ReportStorageActivity(None)] == harness.tick(0.1, {"a": active(at)})


def test_failed_storage_is_not_offered_again() -> None:
    """The fault is this instance's, so another one reads it."""
    harness = MachineHarness()
    harness.plan(storage=[FILES])
    actions = harness.fail(name_of(FILES), UNAVAILABLE)
    assert [ExcludeStorage(name_of(FILES))] == of_type(actions, ExcludeStorage)
    harness.wait(1.0)
    assert [("target", "storage", "SourceUnavailable")] == faults(harness)
