"""The planner's mind: what instances and forks told it, and the plans it made of that.

Called from the event loop's thread only; no call waits for anything, so each is atomic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from planner import policy
from planner.blame import Verdict, judge
from planner.fleet import Assignment, Decision, Demand
from planner.groups import group_of
from planner.leases import Clock, LeaseMint
from planner.metrics import Metrics
from planner.problems import ProblemError, invalid
from planner.store.base import Store
from planner.store.records import ForkRecord, InstanceRecord
from rfork.logs import logger
from rfork.settings import PlannerSettings
from rfork.wire import (
    ChunkRange,
    ForkFinish,
    ForkProgress,
    ForkRequest,
    InstanceAck,
    InstanceReport,
    Lease,
    Outcome,
    Plan,
    ProgressAck,
    Route,
)

SWEEP_S: Final = 1.0
RETRY_S: Final = 0.5
"""When to ask again where every source is full: soon, for a reader's place is free at any moment."""


class Registry:
    """Registers instances, plans forks and follows them to their end."""

    def __init__(self, settings: PlannerSettings, store: Store, clock: Clock, metrics: Metrics) -> None:
        self.store = store
        self.clock = clock
        self._settings = settings
        self._metrics = metrics
        secret = settings.secret.get_secret_value() if settings.secret else None
        self._mint = LeaseMint(secret, ttl_s=settings.lease_ttl_s, clock=clock)
        self._next_sweep = clock.monotonic()
        self._log = logger("planner.registry")

    def report(self, report: InstanceReport) -> InstanceAck:
        """Register an instance or take its heartbeat."""
        self.sweep()
        self._heard(report)
        return InstanceAck(
            heartbeat_s=self._settings.heartbeat_s, lease_key=self._mint.key_of(report.instance_id)
        )

    def drain(self, instance_id: str) -> InstanceRecord:
        """Give the instance no new readers, whatever it reports, until it is removed or forgotten."""
        record = replace(self.instance(instance_id), drained=True)
        self.store.put_instance(record)
        self._log.info("instance drained", instance_id=instance_id)
        return record

    def remove(self, instance_id: str) -> None:
        """Forget the instance and end its fork."""
        self._give_up(self.store.live_fork_of(instance_id), "interrupted", "its instance was removed")
        if self.store.instance(instance_id) is not None:
            self.store.delete_instance(instance_id)
            self._log.info("instance removed", instance_id=instance_id)

    def instance(self, instance_id: str) -> InstanceRecord:
        """The instance's record; ProblemError `unknown-instance` where there is none."""
        self.sweep()
        record = self.store.instance(instance_id)
        if record is None:
            raise ProblemError(404, "unknown-instance", f"no instance {instance_id} is known")
        return record

    def fork(self, fork_id: str) -> ForkRecord:
        """The fork's record; ProblemError `unknown-fork` where there is none."""
        self.sweep()
        record = self.store.fork(fork_id)
        if record is None:
            raise ProblemError(404, "unknown-fork", f"no fork {fork_id} is known")
        return record

    def ask(self, request: ForkRequest) -> Plan:
        """Plan a fork, or plan it again around the sources that failed it."""
        self.sweep()
        report, now = request.instance, self.clock.monotonic()
        if report.state != "loading":
            raise invalid("instance.state", "an instance that asks for a fork is loading")
        old = self.store.fork(request.fork_id)
        if old is not None and old.instance_id != report.instance_id:
            raise ProblemError(409, "fork-conflict", f"fork {request.fork_id} belongs to {old.instance_id}")
        if old is not None and not old.live and not old.lost:
            raise ProblemError(409, "fork-ended", f"fork {request.fork_id} has ended: ask under another id")
        before = self.store.live_fork_of(report.instance_id)
        if before is not None and before.fork_id != request.fork_id:
            self._give_up(before, "interrupted", f"its instance began fork {request.fork_id}")
        target = self._heard(report)
        verdict = self._judge(request, old, now)
        blamed = {
            instance_id: blame.why
            for instance_id, blame in verdict.blames.items()
            if (accused := self.store.instance(instance_id)) and blame.holds(now, accused.report.generation)
        }
        with self._metrics.plan_seconds.time():
            demand = Demand(request.fork_id, target.source, {**blamed, **verdict.once})
            decision = policy.plan(group_of(self.store, target.group), demand, now)
        plan = self._plan(request.fork_id, decision)
        sources = [route.source_id for route in plan.routes]
        self.store.put_fork(
            ForkRecord(
                fork_id=request.fork_id,
                instance_id=report.instance_id,
                model=report.model,
                rank=report.rank,
                chunk_count=report.chunk_count,
                image_bytes=report.image_bytes,
                plan=plan,
                asked_at=old.asked_at if old else now,
                seen_at=now,
                progress=old.progress if old else None,
                blames=verdict.blames,
                read_from=(old.read_from if old else frozenset()).union(sources),
            )
        )
        self._log.info(
            "fork planned", fork_id=plan.fork_id, instance_id=report.instance_id, model=report.model,
            rank=report.rank.key, again=old is not None, sources=sources, reason=plan.reason,
        )  # fmt: skip
        return plan

    def progress(self, fork_id: str, progress: ForkProgress) -> ProgressAck:
        """Take a fork's progress, which is a sign of life of its instance too, and renew its leases."""
        fork = self.fork(fork_id)
        if fork.lost:
            raise ProblemError(404, "unknown-fork", f"fork {fork_id} was given up: ask again")
        if not fork.live:
            raise ProblemError(409, "fork-ended", f"fork {fork_id} has ended")
        _check_ranges("verified", progress.verified, fork.chunk_count)
        now = self.clock.monotonic()
        self.store.put_fork(replace(fork, progress=progress, seen_at=now))
        target = self.store.instance(fork.instance_id)
        if target is not None:
            report = target.report.model_copy(update={"verified": progress.verified})
            self.store.put_instance(replace(target, report=report, seen_at=now, missing=False))
        leases = {
            route.source_id: self._lease(fork_id, source)
            for route in fork.plan.routes
            # Weights that changed are fenced: who reads the old ones gets no more time to do so.
            if (source := self.store.instance(route.source_id))
            and source.report.generation == route.generation
        }
        return ProgressAck(leases=leases)

    def finish(self, fork_id: str, finish: ForkFinish) -> None:
        """End a fork; one that is not known, or has ended, holds no lease to release."""
        fork = self.store.fork(fork_id)
        if fork is None or not (fork.live or fork.lost):
            return
        self._end(replace(fork, lost=False), finish)

    def sweep(self) -> None:
        """Forget silent instances and give up silent forks; looks once a second at most."""
        time = self.clock.monotonic()
        if time < self._next_sweep:
            return
        self._next_sweep = time + SWEEP_S
        for instance in self.store.instances():
            if time >= instance.expires_at:
                instance_id = instance.report.instance_id
                self._give_up(self.store.live_fork_of(instance_id), "failed", "its instance fell silent")
                self.store.delete_instance(instance_id)
                self._log.warning(
                    "instance forgotten", instance_id=instance_id, silent_s=time - instance.seen_at
                )
        for fork in self.store.live_forks():
            if time - fork.seen_at >= self._settings.lease_ttl_s:
                self._give_up(fork, "failed", f"no progress for {self._settings.lease_ttl_s:g} s")

    def _heard(self, report: InstanceReport) -> InstanceRecord:
        """Keep what the instance says of itself, and what was found out about it before."""
        _check_ranges("verified", report.verified, report.chunk_count)
        now, old = self.clock.monotonic(), self.store.instance(report.instance_id)
        if old is None:
            record = InstanceRecord(report, seen_at=now, forget_s=self._settings.forget_s)
        else:
            record = replace(old, report=report, seen_at=now, missing=False)
        self.store.put_instance(record)
        if old is None or old.report.state != report.state:
            self._log.info(
                "instance reported", instance_id=report.instance_id, state=report.state, model=report.model,
                rank=report.rank.key, address=report.address, new=old is None,
            )  # fmt: skip
        return record

    def _judge(self, request: ForkRequest, fork: ForkRecord | None, now: float) -> Verdict:
        """Weigh the faults that the fork reports, and keep sources that did wrong from other forks."""
        for fault in request.faults:
            self._metrics.fault(fault)
        verdict = judge(request.faults, fork, self.store.instance, now, self._settings.quarantine_s)
        for record in verdict.marked:
            self.store.put_instance(record)
            if now < record.quarantined_until:
                self._metrics.quarantined()
                self._log.warning(
                    "source quarantined", instance_id=record.report.instance_id, reason=record.quarantine,
                    fork_id=request.fork_id, quarantine_s=self._settings.quarantine_s,
                )  # fmt: skip
        return verdict

    def _plan(self, fork_id: str, decision: Decision) -> Plan:
        other = decision.other_layout
        return Plan(
            fork_id=fork_id,
            weights_id=decision.weights_id,
            routes=tuple(self._route(fork_id, assignment) for assignment in decision.assignments),
            reason=decision.reason,
            retry_after_s=RETRY_S if decision.full else None,
            other_layout=self._route(fork_id, Assignment(other, (), ())) if other is not None else None,
        )

    def _route(self, fork_id: str, assignment: Assignment) -> Route:
        source = self.store.instance(assignment.source_id)
        if source is None:
            raise LookupError(f"the policy named {assignment.source_id}, which is not in the store")
        return Route(
            source_id=assignment.source_id,
            address=source.report.address,
            placement=source.report.placement,
            transports=assignment.transports,
            generation=source.report.generation,
            chunks=assignment.chunks,
            lease=self._lease(fork_id, source),
        )

    def _lease(self, fork_id: str, source: InstanceRecord) -> Lease:
        report = source.report
        return self._mint.lease(
            fork_id=fork_id, source_id=report.instance_id, layout_id=report.layout_id,
            weights_id=report.weights_id, generation=report.generation,
        )  # fmt: skip

    def _give_up(self, fork: ForkRecord | None, outcome: Outcome, reason: str) -> None:
        """End a fork in its target's stead; the target may still ask again under the same id."""
        if fork is None:
            return
        progress = fork.progress
        finish = ForkFinish(
            outcome=outcome,
            seconds=max(0.0, self.clock.monotonic() - fork.asked_at),
            bytes_read=progress.bytes_read if progress else 0,
            sources=progress.sources if progress else {},
            reasons=(reason,),
        )
        self._end(replace(fork, lost=True), finish)

    def _end(self, fork: ForkRecord, finish: ForkFinish) -> None:
        self.store.put_fork(replace(fork, finish=finish))
        self._metrics.ended(finish)
        self._log.info(
            "fork ended", fork_id=fork.fork_id, instance_id=fork.instance_id, outcome=finish.outcome,
            seconds=finish.seconds, bytes_read=finish.bytes_read, sources=finish.sources,
            reasons=finish.reasons,
        )  # fmt: skip


def _check_ranges(field: str, ranges: tuple[ChunkRange, ...], chunk_count: int) -> None:
    for begin, end in ranges:
        if not 0 <= begin < end <= chunk_count:
            raise invalid(field, f"({begin}, {end}) is no range of chunks in an image of {chunk_count}")
