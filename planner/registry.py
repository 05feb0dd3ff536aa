"""The planner's mind: what instances and forks told it, and the plans it made of that.

Called from the event loop's thread only. Decisions are made from the store's state, and count once the
store has taken them; see `planner.store.base` for what two replicas may do at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from planner import policy
from planner.accusations import Witness
from planner.answering import RETRY_S, Answering
from planner.asking import Asked, Asking, finish_of
from planner.batches import Batches, Gathering
from planner.blame import Bounds, contradictions
from planner.held import held_rates
from planner.leases import Clock, LeaseMint
from planner.metrics import Metrics
from planner.ownership import PLANNER, Claimant
from planner.planning import ATTEMPTS, Planning
from planner.policy.ways import takes_one_host
from planner.problems import ProblemError, busy, check_ranges
from planner.scaleups import ScaleUps
from planner.state import State
from planner.store.base import Change, Conflict, Store, StoreUnavailable
from planner.store.records import ForkRecord, InstanceRecord
from planner.traced import TracedPlans
from rfork.fields import Outcome
from rfork.logs import logger
from rfork.settings import PlannerSettings
from rfork.tracing import OFF, Tracer
from rfork.weights_version import is_single, short
from rfork.wire import (
    ForkFinish,
    ForkProgress,
    ForkRequest,
    InstanceAck,
    InstanceReport,
    MayExit,
    Plan,
    ProgressAck,
)

SWEEP_S: Final = 1.0
HEARD_PART: Final = 0.9
"""Part of the heartbeat's interval after which each instance has reported: they send after 0.8 of it."""
FEW: Final = 3
"""Forks under way in a group before one of them can be told to be slow."""


class Registry:
    """Registers instances, plans forks and follows them to their end."""

    def __init__(
        self,
        settings: PlannerSettings,
        store: Store,
        clock: Clock,
        metrics: Metrics,
        tracer: Tracer = OFF,
    ) -> None:
        self.store = store
        self._settings = settings
        self._metrics = metrics
        self._mint = LeaseMint(
            tuple(key.get_secret_value() for key in settings.secret), ttl_s=settings.lease_ttl_s, clock=clock
        )
        self._asking = Asking(settings, store, metrics)
        self._answering = Answering(store, self._mint)
        self._bounds = Bounds(settings.quarantine_s, settings.heartbeat_s)
        self.scaleups = ScaleUps(store)
        metrics.follow(self.scaleups.count)
        gathering = Gathering(self.scaleups, settings.gather_s, self._arrive, metrics.gathered)
        planning = Planning(store, self._asking, self._answering, metrics, settings.heartbeat_s)
        self._plans = TracedPlans(planning.plan, lambda group: len(self.state.group(group).sources), tracer)
        self._batches = Batches(settings.batch_s, self._plans, clock.monotonic, gathering)
        self._next_sweep = 0.0
        self._settled_at: float | None = None
        """When every instance that there is has been heard of, if the planner knew none at its start."""
        self._log = logger("planner.registry")

    @property
    def state(self) -> State:
        """All records, as this replica knows them."""
        return self.store.state

    def now(self) -> float:
        """Seconds on the store's clock."""
        return self.store.now()

    # -- instances --------------------------------------------------------------------------------

    async def report(self, report: InstanceReport, claimant: Claimant = PLANNER) -> InstanceAck:
        """Register an instance or take its heartbeat."""
        await self.sweep()
        old = self.state.instance(report.instance_id)
        record = self._asking.heard(report, claimant.owner_of(report.instance_id, old))
        await self.store.commit(Change(instances=(record,)))
        if old is None or old.report.state != report.state:
            self._asking.log_new(report)
        return InstanceAck(
            heartbeat_s=self._settings.heartbeat_s,
            lease_keys=self._mint.keys_of(report.instance_id, record.owner),
            unix_s=self._mint.unix_s,
        )

    async def drain(
        self, instance_id: str, claimant: Claimant = PLANNER, *, force: bool = False
    ) -> InstanceRecord:
        """Give the instance no new readers, whatever it reports, until it is removed or forgotten.

        ProblemError `last-seed` (409) where nobody else holds its weights whole, unless forced.
        """
        for _ in range(ATTEMPTS):
            record = replace(self.instance(instance_id), drained=True)
            claimant.check_end(record)
            version = self.store.version(record.group)
            if not force and self._last_seed(self.instance(instance_id)):
                raise ProblemError(
                    409,
                    "last-seed",
                    f"instance {instance_id} is the last that holds {_named(record)}"
                    f"{self._awaited(record)}: start another, or drain it with force",
                )
            try:
                # Of two that drain the last two at once, one has to find out that it is the last.
                await self.store.commit(Change(instances=(record,), group=record.group, version=version))
            except Conflict:
                continue
            break
        else:
            raise busy()
        self._log.info("instance drained", instance_id=instance_id)
        return record

    async def may_exit(self, instance_id: str) -> MayExit:
        """Whether the instance may end now: nobody reads from it, and nobody will have to."""
        await self.sweep()
        record = self.state.instance(instance_id)
        if record is None and self._settled_at is not None and self.now() < self._settled_at:
            reason = "the planner has just started: it does not know yet who reads from whom"
            return MayExit(may_exit=False, readers=0, reason=reason)
        if record is None:
            return MayExit(
                may_exit=True, readers=0, reason="the planner does not know it: nobody is sent to it"
            )
        group = self.state.group(record.group)
        readers = len(group.readers.get(instance_id, {}))
        if readers:
            return MayExit(may_exit=False, readers=readers, reason=f"forks that read from it: {readers}")
        waiting = [name for name in group.shares if name != instance_id]
        if waiting and self._last_seed(record):
            reason = f"it is the last that holds {_named(record)}, and {len(waiting)} forks are under way"
            return MayExit(may_exit=False, readers=0, reason=reason)
        awaited = self._awaited(record)
        # One that is drained gets no more readers: there is nothing to keep it for.
        if awaited and record.source.state != "draining" and self._last_seed(record):
            reason = f"it is the last that holds {_named(record)}{awaited}"
            return MayExit(may_exit=False, readers=0, reason=reason)
        if record.source.state != "draining":
            reason = "nobody reads from it; drain it first, or somebody may be sent to it"
        else:
            reason = "it is drained and nobody reads from it"
        return MayExit(may_exit=True, readers=0, reason=reason)

    async def remove(self, instance_id: str, claimant: Claimant = PLANNER) -> None:
        """Forget the instance and end its fork."""
        fork, record = self.state.live_fork_of(instance_id), self.state.instance(instance_id)
        known = record is not None
        if record is not None:
            claimant.check_end(record)
        elif fork is not None:
            claimant.check_fork(fork)
        ended = (self._given_up(fork, "interrupted", "its instance was removed"),) if fork is not None else ()
        if known or ended:
            await self.store.commit(Change(forks=ended, gone=(instance_id,) if known else ()))
            self._log.info("instance removed", instance_id=instance_id)

    def instance(self, instance_id: str) -> InstanceRecord:
        """The instance's record; ProblemError `unknown-instance` where there is none."""
        record = self.state.instance(instance_id)
        if record is None or self.now() >= record.expires_at:
            raise ProblemError(404, "unknown-instance", f"no instance {instance_id} is known")
        return record

    # -- forks ------------------------------------------------------------------------------------

    def fork(self, fork_id: str) -> ForkRecord:
        """The fork's record; ProblemError `unknown-fork` where there is none."""
        record = self.state.fork(fork_id)
        if record is None:
            raise ProblemError(404, "unknown-fork", f"no fork {fork_id} is known")
        return record

    async def ask(self, request: ForkRequest, claimant: Claimant = PLANNER) -> Plan:
        """Plan a fork, or plan it again around the sources that failed it."""
        await self.sweep()
        if self._is_early(request.instance):
            reason = "the planner has just started: it does not know yet which version the replica has"
            return Plan(fork_id=request.fork_id, reason=reason, retry_after_s=RETRY_S)
        name, old = request.instance.instance_id, self.state.fork(request.fork_id)
        owner = claimant.owner_of(name, self.state.instance(name))
        if old is not None:
            claimant.check_fork(old)
        asked = await self._asking.asked(request, owner, claimant.address)
        return await self._plans.waiting(asked, self._batches.add)

    def _is_early(self, report: InstanceReport) -> bool:
        """Return whether the target's replica may have a version that its other ranks did not report yet.

        That is so until each instance had time for a heartbeat, if the planner began without records.
        """
        if report.version is not None or (is_single(report.rank) and report.rank.role == "target"):
            return False
        return self._settled_at is not None and self.now() < self._settled_at

    async def _arrive(self, asked: Asked) -> None:
        """One of those that a scale-up expects came: every replica of the planner is to know it at once."""
        await self.store.commit(Change(instances=(asked.target,)))
        if not asked.known:
            self._asking.log_new(asked.request.instance)

    async def progress(
        self, fork_id: str, progress: ForkProgress, claimant: Claimant = PLANNER
    ) -> ProgressAck:
        """Take a fork's progress, which is a sign of life of its instance too, and renew its leases."""
        await self.sweep()
        fork = self.fork(fork_id)
        claimant.check_fork(fork)
        if fork.lost:
            raise ProblemError(404, "unknown-fork", f"fork {fork_id} was given up: ask again")
        if not fork.live:
            raise ProblemError(409, "fork-ended", f"fork {fork_id} has ended")
        check_ranges("verified", progress.verified, fork.chunk_count)
        now = self.now()
        held = held_rates(fork, self.state.instance)
        before, fork = fork, replace(fork, progress=progress, held=held, seen_at=now)
        target = self.state.instance(fork.instance_id)
        instances: tuple[InstanceRecord, ...] = ()
        if target is not None:
            report = target.report.model_copy(update={"verified": progress.verified})
            # How fast it reads within its host says nothing of its link.
            staying = any(takes_one_host(read.transports) for read in fork.reads)
            fastest = max(target.ingress_rate or 0.0, 0.0 if staying else progress.bytes_per_s) or None
            witness = Witness(fork.instance_id, target.report.placement.host, claimant.address)
            doubts = contradictions(before, progress, witness, self.state.instance, now, self._bounds)
            target = next((each for each in doubts if each.report.instance_id == fork.instance_id), target)
            others = tuple(each for each in doubts if each.report.instance_id != fork.instance_id)
            instances = (
                replace(target, report=report, seen_at=now, missing=False, ingress_rate=fastest), *others,
            )  # fmt: skip
        try:
            await self.store.commit(Change(instances=instances, forks=(fork,)))
        except StoreUnavailable as error:
            # A store that is away must not end forks under way: their leases live on.
            self._log.warning("progress not stored", fork_id=fork_id, reason=str(error))
        return self._answering.renewed(fork)

    async def finish(self, fork_id: str, finish: ForkFinish, claimant: Claimant = PLANNER) -> None:
        """End a fork; one that is not known, or has ended, holds no lease to release."""
        fork = self.state.fork(fork_id)
        if fork is None:
            await self._batches.leave(fork_id)
            fork = self.state.fork(fork_id)
        if fork is None or not (fork.live or fork.lost):
            return
        claimant.check_fork(fork)
        instances: tuple[InstanceRecord, ...] = ()
        target = self.state.instance(fork.instance_id)
        if finish.outcome == "forked" and target is not None and target.report.state == "loading":
            # Who comes before its next report must find it whole, or storage is read once more.
            weights_id = target.report.weights_id or fork.weights_id
            whole = {"verified": ((0, fork.chunk_count),), "weights_id": weights_id}
            report = target.report.model_copy(update=whole)
            instances = (replace(target, report=report),)
        ended = self._ended(replace(fork, lost=False), finish)
        await self.store.commit(Change(instances=instances, forks=(ended,)))

    # -- what time brings ---------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Forget silent instances, give up silent forks, mark slow relays, forget scale-ups that expired.

        Looks once a second at most.
        """
        now = self.now()
        if self._settled_at is None:
            known = self.state.instance_count > 0
            self._settled_at = now if known else now + self._settings.heartbeat_s * HEARD_PART
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_S
        forks: dict[str, ForkRecord] = {}
        gone: list[str] = []
        for instance in self.state.silent_instances(now):
            instance_id = instance.report.instance_id
            fork = self.state.live_fork_of(instance_id)
            if fork is not None:
                forks[fork.fork_id] = self._given_up(fork, "failed", "its instance fell silent")
            gone.append(instance_id)
            self._log.warning("instance forgotten", instance_id=instance_id, silent_s=now - instance.seen_at)
        ttl_s = self._settings.lease_ttl_s
        for fork in self.state.silent_forks(now - ttl_s):
            if fork.fork_id not in forks:
                forks[fork.fork_id] = self._given_up(fork, "failed", f"no progress for {ttl_s:g} s")
        slow, expired = tuple(self._slowed(now)), self.scaleups.expired()
        if forks or gone or slow or expired:
            change = Change(instances=slow, forks=tuple(forks.values()), gone=tuple(gone), withdrawn=expired)
            try:
                await self.store.commit(change)
            except StoreUnavailable as error:
                self._log.warning("silent instances not forgotten", reason=str(error))

    def _slowed(self, now: float) -> list[InstanceRecord]:
        """Relays that were found to fall behind since the last look."""
        found: list[InstanceRecord] = []
        for group in self.state.groups():
            if len(group.shares) < FEW:
                continue
            for instance_id in policy.stragglers(group.view(()), now):
                record = self.state.instance(instance_id)
                if record is not None and record.slow_since is None:
                    found.append(replace(record, slow_since=now))
                    self._log.warning("relay falls behind", instance_id=instance_id, model=group.model)
        return found

    def _last_seed(self, record: InstanceRecord) -> bool:
        """Whether no other instance that is to be read from holds the same weights whole."""
        source = record.source
        if not source.complete:
            return False
        held = self.state.group(record.group).holders_of(source.layout_id).get((source.weights_id, None))
        others = (held.seeds if held else 0) - (source.state != "draining" and not source.quarantine)
        return others <= 0

    def _awaited(self, record: InstanceRecord) -> str:
        """What to say of the replicas that are expected in its group; empty where none is."""
        count = self.scaleups.expected(record.group)
        return f", and {count} replica{' is' if count == 1 else 's are'} expected" if count else ""

    def _given_up(self, fork: ForkRecord, outcome: Outcome, reason: str) -> ForkRecord:
        """End a fork in its target's stead; the target may still ask again under the same id."""
        return self._ended(replace(fork, lost=True), finish_of(fork, outcome, reason, self.now()))

    def _ended(self, fork: ForkRecord, finish: ForkFinish) -> ForkRecord:
        if fork.lost:
            self._metrics.lost()
        else:
            self._metrics.ended(finish, self.state.group(fork.group).past.durations.saved(fork, finish))
        self._log.info(
            "fork ended", fork_id=fork.fork_id, instance_id=fork.instance_id, outcome=finish.outcome,
            seconds=finish.seconds, bytes_read=finish.bytes_read, sources=finish.sources,
            reasons=finish.reasons,
        )  # fmt: skip
        return replace(fork, finish=finish, held=held_rates(fork, self.state.instance))


def _named(record: InstanceRecord) -> str:
    """Return the weights of an instance as people are told of them."""
    return f"version {short(record.version)} of these weights" if record.version else "these weights"
