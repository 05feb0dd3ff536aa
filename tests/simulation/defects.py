"""Defects that the project once had, or could have: the simulation must find each of them.

Each defect replaces one method of production code while the block runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import planner.core.faults
from planner.core.records import StoreChange
from planner.plan_service import PlanService
from planner.policy import group_plan
from planner.policy.plan_state import PlanState
from rfork.errors import NoSource, SourceCorrupt
from rfork.image import ranges
from rfork.receiver import box_assignment
from rfork.receiver.box_assignment import AssignedPart, BoxAssignment
from rfork.receiver.chunk_scheduler import ChunkScheduler
from rfork.receiver.machine import TransferMachine
from rfork.receiver.source_query import QUERY_RETRY_S, SourceQuery
from rfork.receiver.verifier import ChunkVerifier
from rfork.schema import Plan
from rfork.source import gather_order
from rfork.source.served_image import Leases, ServedImage
from tests.simulation.box_target import BoxFork, LayoutTarget
from tests.simulation.instance import Instance

Defect = Callable[[], AbstractContextManager[Any]]


def patched(owner: type, name: str, replacement: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, replacement)


def wrong_bytes_accepted() -> AbstractContextManager[Any]:
    """A chunk is marked verified without comparing its digest."""
    return patched(ChunkVerifier, "check", lambda verifier, connection, chunk, digest: digest)


def corrupt_source_kept() -> AbstractContextManager[Any]:
    """A source that sent wrong bytes is neither closed nor reported: the fork reads from it for ever."""
    original = TransferMachine._fail

    def fail(machine: TransferMachine, source: Any, error: Any, now: float) -> None:
        if error.kind != "SourceCorrupt":
            original(machine, source, error, now)

    return patched(TransferMachine, "_fail", fail)


def wrong_blame() -> AbstractContextManager[Any]:
    """One reader's accusation quarantines a source for all readers."""
    return mock.patch.object(planner.core.faults, "QUORUM", 1.0)


def double_read_of_storage() -> AbstractContextManager[Any]:
    """The planner does not know that a finished target is complete until its next report."""

    async def finish(service: PlanService, fork_id: str, result: Any, claimant: Any) -> None:
        fork = service.state.fork(fork_id)
        if fork is not None:
            await service.store.commit(StoreChange(forks=(service._end_fork(fork, result),)))

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patched(PlanService, "finish", finish),
            patched(Instance, "when_acked", lambda instance, call: call()),
        ):
            yield

    return both()


def every_target_elected() -> AbstractContextManager[Any]:
    """Targets that wait together each read their own files, instead of one for all."""
    original = group_plan.plan

    def plan(group: Any, demands: Iterable[Any], now: float) -> Any:
        return {name: each for demand in demands for name, each in original(group, [demand], now).items()}

    return mock.patch.object(group_plan, "plan", plan)


def hang_after_planner_restart() -> AbstractContextManager[Any]:
    """The target ignores that a restarted planner does not know its fork, and its leases lapse."""
    original = TransferMachine._receive_plan

    def receive_plan(machine: TransferMachine, plan: Plan | None, refusal: Any, now: float) -> None:
        if plan is None and machine._plans:
            return  # the request counts as running for ever
        original(machine, plan, refusal, now)

    return patched(TransferMachine, "_receive_plan", receive_plan)


def mixed_generations() -> AbstractContextManager[Any]:
    """A fence does not begin a new generation, so readers continue with bytes of the next weights."""

    def clear(image: ServedImage) -> None:
        image._set_state("loading")

    return patched(ServedImage, "clear", clear)


def lease_of_old_generation_accepted() -> AbstractContextManager[Any]:
    """The generation in a lease is not compared."""
    original = Leases.check

    def check(leases: Leases, token: str, generation: int, weights_id: str | None, unix_s: float) -> Any:
        claims = leases._known.get(token) or leases._verify(token, unix_s)
        return original(leases, token, claims.generation, claims.weights_id, unix_s)

    return patched(Leases, "check", check)


def lost_wake_up() -> AbstractContextManager[Any]:
    """A dropped read does not start the read from its next source."""
    return patched(ChunkScheduler, "dropped", lambda scheduler, read: scheduler._in_flight.pop(read.chunk, None))


def unassigned_chunks_forgotten() -> AbstractContextManager[Any]:
    """The loss of a source does not lead to a plan request."""
    return patched(ChunkScheduler, "unassigned", property(lambda scheduler: not scheduler._attempts))


def stalls_not_noticed() -> AbstractContextManager[Any]:
    """A source that is silent for ever is waited for."""
    return mock.patch("rfork.receiver.machine.find_stall", return_value=None)


def verified_chunks_lost() -> AbstractContextManager[Any]:
    """The chunks of a failed source are read again."""
    original = ChunkScheduler.fail

    def fail(scheduler: ChunkScheduler, source_id: str) -> None:
        original(scheduler, source_id)
        scheduler._verified.clear()

    return patched(ChunkScheduler, "fail", fail)


def slot_leak() -> AbstractContextManager[Any]:
    """A reader that died keeps its slot after its lease has expired."""
    return patched(Leases, "_drop_expired", lambda leases, unix_s: None)


def two_readers_of_one_chunk() -> AbstractContextManager[Any]:
    """A new plan assigns chunks in flight to another source, which reads them too."""
    original = ChunkScheduler.assign

    def assign(scheduler: ChunkScheduler, routes: Mapping[str, Iterable[ranges.Range]]) -> None:
        scheduler._in_flight.clear()
        original(scheduler, routes)

    return patched(ChunkScheduler, "assign", assign)


def old_weights_not_dropped() -> AbstractContextManager[Any]:
    """A fork whose source changed its weights keeps the chunks of the old ones."""

    def set_manifest(verifier: ChunkVerifier, manifest: Any) -> None:
        verifier.manifest = manifest

    return patched(ChunkVerifier, "set_manifest", set_manifest)


def spool_not_verified() -> AbstractContextManager[Any]:
    """Chunks of a previous process are used although their weights are not the ones of the manifest."""
    original = TransferMachine._reserve_spooled

    def reserve(machine: TransferMachine, manifest: Any, now: float) -> None:
        machine._spool.records = dict.fromkeys(machine._spool.records, b"")
        machine._spool.records = {chunk: manifest.digests[chunk] for chunk in machine._spool.records}
        original(machine, manifest, now)

    def chunk_read(machine: TransferMachine, chunk: int, digest: bytes | None, seconds: float) -> None:
        read = machine._spool.reading
        if read is not None:
            machine._spool.reading = None
            machine._verifier.mark_verified(chunk, digest)
            machine._scheduler.verified(read)

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patched(TransferMachine, "_reserve_spooled", reserve),
            patched(TransferMachine, "_spool_chunk_read", chunk_read),
        ):
            yield

    return both()


def own_storage_ignored() -> AbstractContextManager[Any]:
    """A target waits for slow sources although its own storage is faster."""
    return mock.patch("rfork.receiver.own_load.decide", return_value="wait")


def overtaken_sources_kept() -> AbstractContextManager[Any]:
    """The last chunks wait for a stalled source although own storage has nothing else to read."""
    return mock.patch("rfork.receiver.machine.is_overdue", return_value=False)


def prefetches_do_not_yield() -> AbstractContextManager[Any]:
    """A holder's fork keeps its sources while engines need them."""
    return mock.patch("planner.core.plans._must_yield", return_value=False)


def paused_relay_relied_on() -> AbstractContextManager[Any]:
    """An engine is assigned chunks of a relay that is about to pause, which then keeps its source."""
    return patched(PlanState, "_will_receive", lambda state, relay: state.shares(relay.instance_id))


def changed_weights_gathered() -> AbstractContextManager[Any]:
    """A source does not compare the weights that boxes were copied from with its manifest."""
    original = gather_order.gather_steps

    def gather_steps(*arguments: Any) -> list[gather_order.GatherStep]:
        return [step._replace(verified=[]) for step in original(*arguments)]

    return mock.patch.object(gather_order, "gather_steps", gather_steps)


def boxes_of_newer_weights_used() -> AbstractContextManager[Any]:
    """A target does not compare the version of opened boxes with that of its others."""
    return mock.patch.object(box_assignment, "check_opened", return_value=None)


def failed_part_forgotten() -> AbstractContextManager[Any]:
    """The boxes of a failed part are not requested from other layouts."""

    def failed(assignment: BoxAssignment, part: AssignedPart, error: Any) -> list[AssignedPart]:
        assignment.in_flight.remove(part)
        return []

    return patched(BoxAssignment, "failed", failed)


def failed_layout_used_for_ever() -> AbstractContextManager[Any]:
    """A part is requested from the layout that failed, however often."""
    return patched(BoxAssignment, "failed", lambda assignment, part, error: [part])


def fetched_boxes_fetched_again() -> AbstractContextManager[Any]:
    """After a failure all boxes are assigned again, not only those of the failed part."""
    original = BoxAssignment._assign

    def assign(assignment: BoxAssignment, boxes: Any) -> tuple[list[AssignedPart], str]:
        return original(assignment, assignment._wanted)

    return patched(BoxAssignment, "_assign", assign)


def many_small_parts() -> AbstractContextManager[Any]:
    """Layouts with few of the boxes are preferred to one that has all."""
    original = box_assignment.by_coverage
    return mock.patch.object(box_assignment, "by_coverage", lambda *arguments: original(*arguments)[::-1])


def other_layouts_before_own() -> AbstractContextManager[Any]:
    """A target reads from other layouts before it requests a plan for its own."""
    return patched(LayoutTarget, "start", lambda target: target._fall_back(NoSource("none was requested")))


def query_repeated_for_ever() -> AbstractContextManager[Any]:
    """A query does not end although no instance can answer it."""
    return patched(SourceQuery, "pause_s", lambda query, plan, now: QUERY_RETRY_S)


def refusal_not_reported() -> AbstractContextManager[Any]:
    """The planner does not know that an instance refuses a query, and names no other one."""
    original = SourceQuery.failed

    def failed(query: SourceQuery, route: Any, error: Any) -> None:
        original(query, route, error)
        if error.kind == "LayoutMismatch":
            query._faults.pop()

    return patched(SourceQuery, "failed", failed)


def refusal_blamed() -> AbstractContextManager[Any]:
    """An instance that cannot serve other layouts is accused of wrong bytes."""
    original = SourceQuery.failed

    def failed(query: SourceQuery, route: Any, error: Any) -> None:
        original(query, route, SourceCorrupt("refused") if error.kind == "LayoutMismatch" else error)

    return patched(SourceQuery, "failed", failed)


def boxes_kept() -> AbstractContextManager[Any]:
    """A target serves its boxes after its model is loaded, which may change them."""

    async def close(fork: BoxFork) -> None:
        return

    return patched(BoxFork, "close", close)


DEFECTS: list[Defect] = [
    wrong_bytes_accepted,
    corrupt_source_kept,
    wrong_blame,
    double_read_of_storage,
    every_target_elected,
    hang_after_planner_restart,
    mixed_generations,
    lease_of_old_generation_accepted,
    lost_wake_up,
    unassigned_chunks_forgotten,
    stalls_not_noticed,
    verified_chunks_lost,
    slot_leak,
    two_readers_of_one_chunk,
    old_weights_not_dropped,
    spool_not_verified,
    own_storage_ignored,
    overtaken_sources_kept,
    prefetches_do_not_yield,
    paused_relay_relied_on,
    changed_weights_gathered,
    boxes_of_newer_weights_used,
    failed_part_forgotten,
    failed_layout_used_for_ever,
    fetched_boxes_fetched_again,
    many_small_parts,
    other_layouts_before_own,
    query_repeated_for_ever,
    refusal_not_reported,
    refusal_blamed,
    boxes_kept,
]
