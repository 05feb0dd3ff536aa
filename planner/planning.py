"""Makes plans of requests: builds what the policy decides over, and keeps what it decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from planner import policy
from planner.blame import Verdict, judge
from planner.fleet import Decision, Demand, Share
from planner.leases import LeaseMint
from planner.metrics import Metrics
from planner.problems import ProblemError, invalid
from planner.store.base import Change, Conflict, Store
from planner.store.records import ForkRecord, GroupKey, InstanceRecord, Read
from rfork.fields import ChunkRange, Outcome
from rfork.image.ranges import normalise
from rfork.logs import logger
from rfork.settings import PlannerSettings
from rfork.wire import ForkFinish, ForkRequest, InstanceReport, Lease, Plan, ProgressAck, Route, StorageRead

RETRY_S: Final = 0.5
"""When to ask again where every source is full: soon, for a reader's place is free at any moment."""
ATTEMPTS: Final = 20
"""How often a batch is planned anew because other replicas were quicker."""


@dataclass(frozen=True)
class Asked:
    """A request that was checked, with what it says of its target and its sources."""

    request: ForkRequest
    target: InstanceRecord
    known: bool
    """Whether the instance was known before it asked."""
    old: ForkRecord | None
    verdict: Verdict
    arrives: bool = False
    """Whether its instance asks for the first time, and not for a fork that somebody else planned."""

    @property
    def fork_id(self) -> str:
        """The fork's id."""
        return self.request.fork_id

    @property
    def group(self) -> GroupKey:
        """What it may share weights with."""
        return self.target.group

    @property
    def urgent(self) -> bool:
        """Whether it lost a source, or has begun: it must not wait for others."""
        return bool(self.request.faults or self.request.current or self.target.report.verified)


class Planning:
    """Turns requests into decisions, records and wire plans."""

    def __init__(self, settings: PlannerSettings, store: Store, mint: LeaseMint, metrics: Metrics) -> None:
        self._settings = settings
        self._store = store
        self._mint = mint
        self._metrics = metrics
        self._log = logger("planner.planning")

    def heard(self, report: InstanceReport) -> InstanceRecord:
        """The instance's record with this report in it, and with what was found out about it before."""
        check_ranges("verified", report.verified, report.chunk_count)
        now, old = self._store.now(), self._store.state.instance(report.instance_id)
        if old is None:
            return InstanceRecord(report, seen_at=now, forget_s=self._settings.forget_s, since=now)
        served = now >= old.quarantined_until
        return replace(
            old,
            report=report,
            seen_at=now,
            missing=False,
            quarantined_until=0.0 if served else old.quarantined_until,
            quarantine="" if served else old.quarantine,
        )

    def log_new(self, report: InstanceReport) -> None:
        """An instance is new, or in another state than it was."""
        self._log.info(
            "instance reported", instance_id=report.instance_id, state=report.state, model=report.model,
            rank=report.rank.key, address=report.address,
        )  # fmt: skip

    async def asked(self, request: ForkRequest) -> Asked:
        """Check a request and weigh the faults it reports. Raises ProblemError."""
        report, state, now = request.instance, self._store.state, self._store.now()
        if report.state != "loading":
            raise invalid("instance.state", "an instance that asks for a fork is loading")
        for share in request.current:
            check_ranges("current", share.chunks, report.chunk_count)
        old = state.fork(request.fork_id)
        if old is not None and old.instance_id != report.instance_id:
            raise ProblemError(409, "fork-conflict", f"fork {request.fork_id} belongs to {old.instance_id}")
        if old is not None and not old.live and not old.lost:
            raise ProblemError(409, "fork-ended", f"fork {request.fork_id} has ended: ask under another id")
        target = self._asking(request)
        for fault in request.faults:
            self._metrics.fault(fault)
        verdict = judge(request.faults, old, state.instance, now, self._settings.quarantine_s)
        known = state.instance(report.instance_id)
        if known is not None and set(known.report.storage) - set(report.storage):
            verdict = verdict.without(report.instance_id)  # what failed is offered no more: the rest is good
        before = state.live_fork_of(report.instance_id)
        ended: tuple[ForkRecord, ...] = ()
        if before is not None and before.fork_id != request.fork_id:
            why = f"its instance began fork {request.fork_id}"
            finish = finish_of(before, "interrupted", why, now)
            self._metrics.ended(finish)
            ended = (replace(before, lost=True, finish=finish),)
        for record in verdict.marked:
            if now < record.quarantined_until:
                self._metrics.quarantined()
                self._log.warning(
                    "source quarantined", instance_id=record.report.instance_id, reason=record.quarantine,
                    fork_id=request.fork_id, quarantine_s=self._settings.quarantine_s,
                )  # fmt: skip
        if verdict.marked or ended:
            # Before the plan is made: the places of a relay that is gone are free for it.
            await self._store.commit(Change(instances=verdict.marked, forks=ended))
        arrives = target.asked and not (known is not None and known.asked)
        return Asked(request, target, known is not None, old, verdict, arrives)

    def _asking(self, request: ForkRequest) -> InstanceRecord:
        """The target's record, which says that it has asked unless others planned for it before a restart."""
        target = self.heard(request.instance)
        begun = bool(request.faults or request.current)
        return target if target.asked or begun else replace(target, asked=True)

    def _still(self, asked: Asked) -> Asked | None:
        """The request on top of what is known of its instance now; None where that was removed meanwhile."""
        report = asked.request.instance
        if asked.known and self._store.state.instance(report.instance_id) is None:
            return None
        target = self._asking(asked.request)
        return replace(asked, target=target if asked.old else replace(target, slow_since=None))

    async def plan(self, batch: Sequence[Asked]) -> dict[str, Plan]:
        """Plan requests of one group together; by fork_id, less those whose instance was removed meanwhile.

        Raises ProblemError where other replicas always win.
        """
        key = batch[0].group
        for _ in range(ATTEMPTS):
            now = self._store.now()
            version = self._store.version(key)
            batch = [still for asked in batch if (still := self._still(asked)) is not None]
            if not batch:
                return {}
            with self._metrics.plan_seconds.time():
                demands = [self._demand(asked, now) for asked in batch]
                group = self._store.state.group(key).view(demands, self._store.state.other_ranks(key))
                decisions = policy.plan(group, demands, now)
            came = {asked.target.report.instance_id: asked.target for asked in batch}
            forks = tuple(self._record(asked, decisions[asked.fork_id], came, now) for asked in batch)
            change = Change(
                instances=tuple(asked.target for asked in batch), forks=forks, group=key, version=version
            )
            try:
                await self._store.commit(change)
            except Conflict:
                self._metrics.store_conflict()
                continue
            self._metrics.planned(len(batch))
            for asked, fork in zip(batch, forks, strict=True):
                if not asked.known:
                    self.log_new(asked.request.instance)
                before = {read.source_id for read in asked.old.reads} if asked.old else set()
                for read in fork.reads:
                    if read.source_id not in before:
                        self._metrics.routed(read.transports)
                # What goes as it should is told at its end.
                unusual = asked.old is not None or not (fork.reads or fork.storage)
                (self._log.info if unusual else self._log.debug)(
                    "fork planned", fork_id=fork.fork_id, instance_id=fork.instance_id, model=fork.model,
                    rank=fork.rank.key, again=asked.old is not None, together=len(batch),
                    sources=[read.source_id for read in fork.reads], reason=fork.reason,
                )  # fmt: skip
            return {
                fork.fork_id: self._wire(fork, decisions[fork.fork_id], forgotten=self._forgotten(asked, now))
                for asked, fork in zip(batch, forks, strict=True)
            }
        raise busy()

    def renewed(self, fork: ForkRecord) -> ProgressAck:
        """New leases for the routes of a fork, and whether a better plan could be had."""
        leases: dict[str, Lease] = {}
        ask_again: str | None = None
        for read in fork.reads:
            source = self._store.state.instance(read.source_id)
            # Weights that changed are fenced: who reads the old ones gets no more time to do so.
            if source is None or source.report.generation != read.generation:
                continue
            leases[read.source_id] = self._lease(fork.fork_id, source)
            if (
                source.slow_since is not None
                and source.slow_since > fork.planned_at
                and not source.source.complete
            ):
                ask_again = f"source {read.source_id} falls behind"
            elif self._lost(source, fork.planned_at):
                ask_again = f"source {read.source_id} has nobody to read from any more"
        return ProgressAck(leases=leases, ask_again=ask_again)

    def _lost(self, source: InstanceRecord, since: float) -> bool:
        """Whether a relay was found to have nobody to read from: who waits for it could read storage."""
        if source.source.complete:
            return False
        fork = self._store.state.live_fork_of(source.report.instance_id)
        return fork is not None and fork.planned_at > since and not (fork.reads or fork.storage)

    def _demand(self, asked: Asked, now: float) -> Demand:
        state, verdict = self._store.state, asked.verdict
        own = asked.target.report.instance_id
        blamed = dict(verdict.once)
        for instance_id, blame in verdict.blames.items():
            accused = state.instance(instance_id)
            if instance_id == own or (accused and blame.holds(now, accused.report.generation)):
                blamed.setdefault(instance_id, blame.why)
        if asked.request.current:
            current = [Share(share.source_id, normalise(share.chunks)) for share in asked.request.current]
        elif asked.old is not None and asked.old.live:
            current = [Share(read.source_id, read.chunks) for read in asked.old.reads]
            current += [Share(own, read.chunks) for read in asked.old.storage]
        else:
            current = []
        failed = {fault.instance_id for fault in asked.request.faults}
        current = [share for share in current if share.source_id not in failed]
        elected = asked.old is not None and own in asked.old.read_from
        return Demand(asked.fork_id, asked.target.source, blamed, tuple(current), elected)

    def _record(
        self, asked: Asked, decision: Decision, came: Mapping[str, InstanceRecord], now: float
    ) -> ForkRecord:
        report, old = asked.target.report, asked.old
        sources = [each.source_id for each in decision.assignments]
        sources += [report.instance_id] if decision.storage else []
        return ForkRecord(
            fork_id=asked.fork_id,
            instance_id=report.instance_id,
            model=report.model,
            rank=report.rank,
            chunk_count=report.chunk_count,
            image_bytes=report.image_bytes,
            asked_at=old.asked_at if old else now,
            planned_at=now,
            seen_at=now,
            reads=tuple(
                Read(each.source_id, each.chunks, each.transports, source.report.generation)
                for each in decision.assignments
                if (source := came.get(each.source_id) or self._store.state.instance(each.source_id))
            ),
            storage=tuple(
                StorageRead(kind=storage.kind, uri=storage.uri, chunks=chunks)
                for storage, chunks in decision.storage
            ),
            weights_id=decision.weights_id,
            draft=decision.draft,
            reason=decision.reason,
            progress=old.progress if old else None,
            blames=asked.verdict.blames,
            read_from=(old.read_from if old else frozenset()).union(sources),
        )

    def _forgotten(self, asked: Asked, now: float) -> bool:
        """Whether the fork began by plans that nobody here knows of: its sources will be heard of soon."""
        old = asked.old
        known = old is not None and (old.read_from or now >= old.asked_at + self._settings.heartbeat_s)
        return asked.urgent and not known

    def _wire(self, fork: ForkRecord, decision: Decision, *, forgotten: bool) -> Plan:
        other = None if decision.other_layout is None else Read(decision.other_layout, (), (), 0)
        routes = [self._route(fork.fork_id, read) for read in fork.reads]
        again = decision.full or (forgotten and not (fork.reads or fork.storage))
        return Plan(
            fork_id=fork.fork_id,
            weights_id=decision.weights_id,
            draft=decision.draft,
            routes=tuple(route for route in routes if route is not None),
            storage=fork.storage,
            reason=decision.reason,
            retry_after_s=RETRY_S if again or None in routes else None,
            other_layout=self._route(fork.fork_id, other) if other is not None else None,
        )

    def _route(self, fork_id: str, read: Read) -> Route | None:
        source = self._store.state.instance(read.source_id)
        if source is None:
            return None  # it was forgotten while the store took the plan: the target asks again for its part
        return Route(
            source_id=read.source_id,
            address=source.report.address,
            placement=source.report.placement,
            transports=read.transports,
            generation=source.report.generation,
            chunks=read.chunks,
            lease=self._lease(fork_id, source),
        )

    def _lease(self, fork_id: str, source: InstanceRecord) -> Lease:
        report = source.report
        return self._mint.lease(
            fork_id=fork_id, source_id=report.instance_id, layout_id=report.layout_id,
            weights_id=report.weights_id, generation=report.generation,
        )  # fmt: skip


def busy() -> ProblemError:
    """Other replicas changed a group at each attempt."""
    return ProblemError(
        503, "busy", "other planners changed this group at each attempt: ask again",
        headers={"Retry-After": "1"},
    )  # fmt: skip


def finish_of(fork: ForkRecord, outcome: Outcome, reason: str, now: float) -> ForkFinish:
    """How a fork ended that its target did not end."""
    progress = fork.progress
    return ForkFinish(
        outcome=outcome,
        seconds=max(0.0, now - fork.asked_at),
        bytes_read=progress.bytes_read if progress else 0,
        sources=progress.sources if progress else {},
        reasons=(reason,),
    )


def check_ranges(field: str, ranges: tuple[ChunkRange, ...], chunk_count: int) -> None:
    """Raises ProblemError `invalid-request` for ranges that no image of so many chunks has."""
    for begin, end in ranges:
        if not 0 <= begin < end <= chunk_count:
            raise invalid(field, f"({begin}, {end}) is no range of chunks in an image of {chunk_count}")
