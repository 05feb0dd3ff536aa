"""Makes plans of requests: builds what the policy decides over, and keeps what it decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from planner import policy
from planner.answering import Answering
from planner.asking import Asked, Asking
from planner.fleet import Decision, Demand, Share
from planner.metrics import Metrics
from planner.problems import busy
from planner.store.base import Change, Conflict, Store
from planner.store.records import ForkRecord, InstanceRecord, Read
from rfork.image.ranges import normalise
from rfork.logs import logger
from rfork.wire import Plan, StorageRead

ATTEMPTS: Final = 20
"""How often a batch is planned anew because other replicas were quicker."""


class Planning:
    """Turns requests into decisions and records.

    Who was not known before a restart has been heard of after `heartbeat_s`.
    """

    def __init__(
        self, store: Store, asking: Asking, answering: Answering, metrics: Metrics, heartbeat_s: float
    ) -> None:
        self._store = store
        self._asking = asking
        self._answering = answering
        self._metrics = metrics
        self._heartbeat_s = heartbeat_s
        self._log = logger("planner.planning")

    async def plan(self, batch: Sequence[Asked]) -> dict[str, Plan]:
        """Plan requests of one group together; by fork_id, less those whose instance was removed, or whose
        fork ended, meanwhile.

        One that another replica planned meanwhile has that plan. Raises ProblemError where other replicas
        always win.
        """
        key, plans = batch[0].group, dict[str, Plan]()
        for _ in range(ATTEMPTS):
            now = self._store.now()
            version = self._store.version(key)
            for asked in batch:
                if (fork := self._asking.planned_meanwhile(asked)) is not None:
                    plans[fork.fork_id] = self._answering.standing(fork)
            waiting = [asked for asked in batch if asked.fork_id not in plans]
            batch = [still for asked in waiting if (still := self._asking.still(asked)) is not None]
            if not batch:
                return plans
            with self._metrics.plan_seconds.time():
                demands = [self._demand(asked, now) for asked in batch]
                state = self._store.state
                group = state.group(key).view(
                    demands, state.other_ranks(key), other_versions=state.other_versions(key)
                )
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
                    self._asking.log_new(asked.request.instance)
                before = {read.source_id for read in asked.old.reads} if asked.old else set()
                for read in fork.reads:
                    if read.source_id not in before:
                        self._metrics.routed(read.transports)
                # What goes as it should is told at its end.
                unusual = asked.old is not None or not (fork.reads or fork.storage)
                (self._log.info if unusual else self._log.debug)(
                    "fork planned", fork_id=fork.fork_id, instance_id=fork.instance_id, model=fork.model,
                    version=fork.version, rank=fork.rank.key, again=asked.old is not None,
                    together=len(batch), sources=[read.source_id for read in fork.reads], reason=fork.reason,
                )  # fmt: skip
            return plans | {
                fork.fork_id: self._answering.plan(
                    fork, decisions[fork.fork_id], forgotten=self._forgotten(asked, now)
                )
                for asked, fork in zip(batch, forks, strict=True)
            }
        raise busy()

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
            version=asked.target.version,
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
            reason="; ".join(filter(None, (asked.version_note, decision.reason))),
            progress=old.progress if old else None,
            blames=asked.verdict.blames,
            read_from=(old.read_from if old else frozenset()).union(sources),
            owner=asked.target.owner,
        )

    def _forgotten(self, asked: Asked, now: float) -> bool:
        """Whether the fork began by plans that nobody here knows of: its sources will be heard of soon."""
        old = asked.old
        known = old is not None and (old.read_from or now >= old.asked_at + self._heartbeat_s)
        return asked.urgent and not known
