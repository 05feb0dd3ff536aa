"""Random rolling updates against two planners that share a store: which weights each rank ends with."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from random import Random
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.problems import ProblemError
from planner.plan_service import PlanService
from planner.store.memory import MemoryStore
from rfork.schema import ForkRequest, ForkResult, InstanceReport, Plan, Rank
from rfork.weights_version import is_unnamed, unnamed
from tests.unit.planner.builders import CHUNKS, FakeTime, make_service, report

STEPS: Final = 60
HEARTBEAT_S: Final = 5.0
VERSIONS: Final = ("v1", "v2", "v3")
COMPLETE: Final = ((0, CHUNKS),)


@dataclass
class Member:
    """One rank of a replica, with the weights it really has."""

    name: str
    rank: Rank
    loaded_version: str | None = None
    """Version of its bytes, once it has all of them."""
    reported_version: str | None = None
    """Version that it reports."""
    plan: Plan | None = None
    reported_at: float = 0.0


@dataclass
class Replica:
    """A server with files of one version, or without files."""

    name: str
    files: str | None
    members: list[Member]
    updates: int = 0

    @property
    def loaded_versions(self) -> set[str]:
        return {member.loaded_version for member in self.members if member.loaded_version is not None}


@dataclass
class RolloutSimulation:
    """A fleet of one model, and its planners."""

    random: Random
    time: FakeTime = field(default_factory=FakeTime)
    replicas: list[Replica] = field(default_factory=list)
    started: int = 0
    forks: int = 0
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planners: list[PlanService] = []
        self.restart_planners()

    def restart_planners(self) -> None:
        """Restart the planners: all records are lost until instances report again."""
        store = MemoryStore(self.time.clock, max_finished_forks=100)
        self.planners = [
            make_service(self.time, store, heartbeat_interval_s=HEARTBEAT_S, instance_ttl_s=20.0) for _ in range(2)
        ]

    @property
    def planner(self) -> PlanService:
        return self.random.choice(self.planners)

    async def step(self) -> None:
        """Run one random event."""
        events = [
            self.start,
            self.request_plan,
            self.request_plan,
            self.complete,
            self.complete,
            self.tick,
            self.update,
        ]
        events += [self.kill, self.drain] if self.random.random() < 0.3 else []
        event = self.random.choice(events)
        if event == self.tick and self.random.random() < 0.1:
            self.restart_planners()
        await event()

    async def start(self) -> None:
        """Start a replica of one or two ranks, with the files of a version or without files."""
        size = self.random.choice((1, 2))
        self.started += 1
        name = f"replica-{self.started}"
        members = [Member(f"{name}-{tp}", Rank(tp=tp, tp_size=size)) for tp in range(size)]
        self.replicas.append(Replica(name, self.random.choice((*VERSIONS, None)), members))

    async def request_plan(self) -> None:
        """Let a rank without weights request a plan."""
        waiting = [(each, one) for each in self.replicas for one in each.members if one.loaded_version is None]
        if not waiting:
            return
        replica, member = self.random.choice(waiting)
        self.forks += 1
        request = ForkRequest(fork_id=f"fork-{member.name}", instance=self.report_of(replica, member))
        sources = self.sources_for(replica, member)
        choices = (
            self.served()
            if replica.files is None and not any(one.reported_version for one in replica.members)
            else set()
        )
        try:
            plan = await self.planner.plan(request)
        except ProblemError as error:
            if error.slug == "fork-ended":
                return
            raise
        member.reported_at = self.time.now
        if plan.version is not None and replica.files is None:
            member.reported_version = plan.version
        member.plan = plan
        if len(choices) > 1 and plan.version in choices:
            self.violations.append(f"{member.name} took {plan.version} of {sorted(choices)}")
        for route in plan.routes:
            served = self.claimed_by(route.source_id)
            if served != member.reported_version:
                self.violations.append(f"{member.name} of {member.reported_version} reads {served}")
        if sources and not plan.routes and plan.retry_after_s is None:
            self.violations.append(f"{member.name} got no plan though {sources} serve it: {plan.reason}")

    async def complete(self) -> None:
        """Complete a rank by its plan, else from its own files; without either its server exits."""
        begun = [
            (each, one) for each in self.replicas for one in each.members if one.plan and one.loaded_version is None
        ]
        if not begun:
            return
        replica, member = self.random.choice(begun)
        plan = member.plan
        if plan is None or (not plan.routes and plan.retry_after_s is not None):
            return
        if plan.routes:
            sources = [self.find(route.source_id) for route in plan.routes]
            if any(source is None or source.loaded_version != member.reported_version for source in sources):
                member.plan = None  # the source is removed or fenced: replan
                return
            member.loaded_version, outcome = member.reported_version, "forked"
        elif replica.files is not None or (member.reported_version is not None and is_unnamed(member.reported_version)):
            member.loaded_version, outcome = replica.files or unnamed(replica.name), "fallback"
        else:
            await self.end(replica)
            return
        finish = ForkResult.model_validate({"outcome": outcome, "seconds": 1, "bytes_read": 1})
        await self.planner.finish(f"fork-{member.name}", finish)
        member.reported_version = member.loaded_version
        await self.send(replica, member)
        if len(replica.loaded_versions) > 1:
            self.violations.append(f"{replica.name} holds {sorted(replica.loaded_versions)}")

    async def tick(self) -> None:
        """Advance the time; ranks report every four seconds."""
        self.time.now += self.random.choice((0.1, 1.0, 4.0))
        for replica in self.replicas:
            for member in replica.members:
                if self.time.now - member.reported_at >= 0.8 * HEARTBEAT_S and member.reported_version is not None:
                    await self.send(replica, member)

    async def update(self) -> None:
        """Update a complete replica in place."""
        complete = [each for each in self.replicas if all(one.loaded_version for one in each.members)]
        if not complete or self.random.random() < 0.5:
            return
        replica = self.random.choice(complete)
        replica.updates += 1
        for member in replica.members:
            member.loaded_version = member.reported_version = f"update:{replica.name}:{replica.updates}"
            await self.send(replica, member)

    async def kill(self) -> None:
        """Stop a server, with or without removing it at the planner."""
        if self.replicas:
            await self.end(self.random.choice(self.replicas))

    async def drain(self) -> None:
        """Drain an instance."""
        complete = [one for each in self.replicas for one in each.members if one.loaded_version]
        if complete:
            with contextlib.suppress(ProblemError):  # the planner may have forgotten it
                await self.planner.drain(self.random.choice(complete).name, force=True)

    async def end(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        if self.random.random() < 0.5:
            for member in replica.members:
                await self.planner.remove(member.name)

    async def send(self, replica: Replica, member: Member) -> None:
        member.reported_at = self.time.now
        await self.planner.report(self.report_of(replica, member))

    def report_of(self, replica: Replica, member: Member) -> InstanceReport:
        if member.reported_version is None:
            member.reported_version = replica.files
        complete = member.loaded_version is not None
        return report(
            member.name,
            *(COMPLETE if complete else ()),
            version=member.reported_version,
            any_version=replica.files is None and not complete,
            replica=replica.name,
            rank=member.rank,
            max_readers=100,
            weights_id=_digest(member.loaded_version) if member.loaded_version is not None else None,
        )

    def find(self, name: str) -> Member | None:
        return next((one for each in self.replicas for one in each.members if one.name == name), None)

    def claimed_by(self, name: str) -> str | None:
        """Return the version of an instance, or the planner's record of a removed one."""
        member = self.find(name)
        if member is not None:
            return member.reported_version
        record = self.planners[0].state.instance(name)
        return record.version if record is not None else None

    def served(self) -> set[str]:
        """Return the versions of complete instances known to the planner."""
        return {
            record.version
            for record in self.planners[0].state.members_of("m")
            if record.source.complete and record.source.state == "serving" and self.time.now < record.expires_at
        }

    def sources_for(self, replica: Replica, member: Member) -> list[str]:
        """Return the known instances that serve this rank in the version of the member's files."""
        if replica.files is None:
            return []
        state = self.planners[0].state
        return [
            record.report.instance_id
            for record in state.members_of("m")
            if record.version == replica.files
            and record.report.rank.key == member.rank.key
            and record.source.complete
            and record.source.state == "serving"
            and self.time.now < record.expires_at
        ]


def _digest(version: str) -> str:
    return version.encode().hex().ljust(32, "0")[:32]


@given(st.integers(0, 2**32))
@settings(max_examples=50)
def test_rolling_updates_never_mix_versions(seed: int) -> None:
    """No rank reads another version than its own, no replica has two, and permitted sources are used."""

    async def run() -> RolloutSimulation:
        simulation = RolloutSimulation(Random(seed))
        for _ in range(STEPS):
            await simulation.step()
        return simulation

    assert [] == asyncio.run(run()).violations
