"""One simulated fleet: its instances, network, faults and invariants, all drawn from one seed.

Invariants, checked during the run and at its end:

1. A chunk is marked verified only if its bytes are those of the version that the fork receives.
2. A complete image has the content of one version, and of the target's own version if it stated one.
3. Every fork of a live instance ends, in success or with an error, and soon once faults are over.
4. Chunks read again stay within the bound given by failures and invalidated chunks.
5. When everything has ended, no reader slot is used and no fork runs at the planner.
6. Only an instance at fault is quarantined, and only a source that sent wrong bytes is called corrupt.
7. Without faults, instances that start together read each chunk of their files once for all, and none uses a fallback
   unless its sources are slower.
8. A fork that has had a source ends well if a seed of its version stays, whatever else fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rfork.settings import InstanceSettings, PlannerSettings
from tests.simulation.content import content_of
from tests.simulation.event_loop import Deadlock, VirtualLoop
from tests.simulation.instance import Instance
from tests.simulation.planner import SimulatedPlanner
from tests.simulation.target import Target

if TYPE_CHECKING:
    from planner.core.records import InstanceRecord

T = TypeVar("T")
LEASE_TTL_S = 6.0
HEARTBEAT_S = 1.0
INSTANCE_TTL_S = 8.0
END_WITHIN_S = 60.0
"""Every fork ends within this time of the last fault, and of its own start."""
DEADLINE_S = 300.0
"""Deadline of a fork: far beyond `END_WITHIN_S`, so that one that only its deadline ends counts as hanging."""

MAX_TARGETS = 6
SAME_HOST_CHUNK_S = 0.005
"""Time to copy a chunk within a host."""

SETTINGS = InstanceSettings.model_validate(
    {
        "node_name": "node",
        "deadline_s": DEADLINE_S,
        "no_source_timeout_s": 3.0,
        "max_inflight_chunks": 3,
        "source_idle_timeout_s": 2.0,
        "storage_idle_timeout_s": 4.0,
        "min_source_bytes_per_s": 1 << 20,
    }
)


class InvariantViolated(Exception):
    """A promise was broken in a world."""


@dataclass
class Fault:
    """One fault, for the description of a world."""

    at: float
    name: str
    subject: str


class World:
    """A fleet that runs until all its forks have ended and everything is quiet."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.loop = VirtualLoop()
        self.settings = SETTINGS
        self.end_within_s = END_WITHIN_S
        self.ended = False
        self.possible_faults = FAULTS
        self.instances: dict[str, Instance] = {}
        self.targets: list[Target] = []
        self.faults: list[Fault] = []
        self.at_fault: set[str] = set()
        """Instances that may be quarantined."""
        self.ever_corrupt: set[str] = set()
        self.bad_memory: set[str] = set()
        self.storage_reads: list[tuple[str, int]] = []
        self._cuts: set[frozenset[str]] = set()
        self._cut_off: set[str] = set()
        self._resumed: dict[str, list[Callable[[], None]]] = {}
        self._ids = 0
        self._error: BaseException | None = None
        self._last_fault_at = self.loop.time()
        self._tasks: set[asyncio.Task[Any]] = set()

        draw = self.random
        self.chunks = draw.randint(2, 8)
        self.shared_chunks = draw.choice([0, 0, self.chunks // 2])
        self.chunk_s = draw.choice([0.02, 0.05, 0.2])
        self.disk_chunk_s = self.chunk_s * draw.choice([0.5, 1, 3])
        self.load_s = self.disk_chunk_s * self.chunks + 0.1
        self.jitter_s = draw.choice([0.0005, 0.005, 0.05])
        self.opaque_loader = draw.random() < 0.15
        planner_settings = PlannerSettings.model_validate(
            {
                "lease_keys": ["key"],
                "lease_ttl_s": LEASE_TTL_S,
                "heartbeat_interval_s": HEARTBEAT_S,
                "instance_ttl_s": INSTANCE_TTL_S,
                "batch_window_s": draw.choice([0.0, 0.01]),
            }
        )
        self.planner = SimulatedPlanner(self, draw.choice([1, 1, 2]), planner_settings)
        self.max_readers = draw.choice([1, 2, 8])

    # -- services for instances -------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self.loop.time()

    @property
    def unix_s(self) -> float:
        """The virtual wall-clock time."""
        return self.loop.unix_s()

    def latency_s(self) -> float:
        """Return the delay of one message; messages can overtake one another between connections."""
        return 0.0005 + self.random.random() * self.jitter_s

    def later(self, delay_s: float, call: Callable[[], None], *, on: Instance | None) -> None:
        """Call a function after a time, unless its instance has died; while that is suspended, once it resumes."""
        self.loop.call_later(max(0.0, delay_s), self._call, call, on)

    def _call(self, call: Callable[[], None], on: Instance | None) -> None:
        if on is not None and not on.alive:
            return
        if on is not None and on.stopped:
            self.when_resumed(on, call)
            return
        try:
            call()
        except BaseException as error:
            self._stop(error)

    def when_resumed(self, instance: Instance, call: Callable[[], None]) -> None:
        """Call a function once a suspended process continues."""
        self._resumed.setdefault(instance.process.name, []).append(call)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine whose result or error is awaited."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        await asyncio.sleep(seconds)

    def new_id(self, prefix: str) -> str:
        """Return an id that no other object has."""
        self._ids += 1
        return f"{prefix}{self._ids:016x}" if prefix != "files" else f"{self._ids:016x}"

    def instance_at(self, address: str) -> Instance | None:
        """Return the instance whose peer service has this address."""
        return self.instances.get(address.partition(":")[0])

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether no packet passes between two instances."""
        return frozenset((self.process_of(one), self.process_of(other))) in self._cuts

    def is_cut_off(self, name: str) -> bool:
        """Return whether an instance cannot reach the planner."""
        return self.process_of(name) in self._cut_off

    def process_of(self, name: str) -> str:
        """Return the name of an instance's process."""
        return self.instances[name].process.name if name in self.instances else name

    async def resumed(self, instance: Instance) -> None:
        """Wait while an instance's process is suspended; for ever if it has ended."""
        while instance.stopped or not instance.alive:
            continued: asyncio.Future[None] = self.loop.create_future()
            if instance.alive:
                self.when_resumed(instance, partial(_set, continued))
            await continued

    def transfer_s(self, source: Instance, target: Instance) -> float:
        """Return the duration of one chunk between two instances."""
        chunk_s = SAME_HOST_CHUNK_S if source.host == target.host else self.chunk_s
        return chunk_s * max(source.process.slow, target.process.slow) * self.random.uniform(0.8, 1.2)

    def _stop(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self.loop.stop()

    # -- invariants -------------------------------------------------------------------------------------

    def check(self, is_kept: bool, promise: str) -> None:
        """Stop the world if a promise is broken."""
        if not is_kept:
            raise InvariantViolated(f"t={self.now - 1000:.3f} {promise}")

    def check_verified(self, target: Target, chunk: int, digest: bytes | None) -> None:
        """Check a chunk that is about to be served."""
        content = target.instance.memory[chunk]
        self.check(digest is None or content == digest, f"{target.instance.name}: wrong bytes in chunk {chunk}")
        self.check(
            any(content == version[chunk] for version in self._contents()),
            f"{target.instance.name}: chunk {chunk} has bytes of no version",
        )

    def check_complete(self, target: Target) -> None:
        """Check the image of a fork that reports success."""
        instance = target.instance
        content, name = tuple(instance.memory), instance.name
        self.check(content in self._contents(), f"{name}: the image mixes versions")
        if target.outcome == "forked":
            manifest = instance.served.manifest
            self.check(manifest == instance.manifest, f"{name}: the manifest is not that of the image")
        named = self.versions.get(instance.served.version or "", [content])
        self.check(content in named, f"{name}: the image is not of version {instance.served.version}")
        if instance.own_version is not None:
            own = self.versions[instance.own_version]
            self.check(content in own, f"{name}: the image is not of version {instance.own_version}")

    def _contents(self) -> set[tuple[bytes, ...]]:
        return {content for contents in self.versions.values() for content in contents}

    def _check_end(self) -> None:
        for target in self.targets:
            name = target.instance.name
            self.check(target.ended_at is not None or not target.instance.alive, f"{name}: the fork hangs")
            if target.ended_at is None:
                continue
            self._check_transfer(target)
        for instance in self.instances.values():
            if instance.alive and not instance.stopped:
                readers = instance.served.leases.readers(self.unix_s)
                self.check(not readers, f"{instance.name}: reader slots are used: {readers}")
        for service in self.planner.running():
            running = [fork.fork_id for fork in service.state.live_forks()]
            self.check(not running, f"the planner still runs {running}")
        if not self.faults:
            self._check_undisturbed()
        self._check_survivors()

    def _check_transfer(self, target: Target) -> None:
        """Check what a fork that has ended has read, and whom it blamed."""
        name = target.instance.name
        repeated = target.machine.stats.bytes_repeated >> 20
        reads = self.settings.max_inflight_chunks
        bound = reads * len(target.machine.reasons) + target.invalidated
        self.check(repeated <= bound, f"{name}: {repeated} chunks read again, at most {bound} expected")
        for error in target.machine.reasons:
            self.check(
                error.kind != "SourceCorrupt"
                or self.process_of(name) in self.bad_memory
                or any(each in str(error) for each in self.ever_corrupt),
                f"{name}: a correct source was called corrupt: {error}",
            )

    def _check_undisturbed(self) -> None:
        for target in self.targets:
            self.check(
                target.outcome == "forked" or target.abandoned or not self._must_fork(target),
                f"{target.instance.name}: {target.outcome} without a fault: {target.machine.reasons}",
            )
        for version, contents in self.versions.items():
            names = {target.instance.name for target in self.targets if target.instance.files in contents}
            reads = [chunk for name, chunk in self.storage_reads if name in names]
            self.check(
                len(reads) <= self.chunks * max(1, len(contents)),
                f"storage of {version} was read {len(reads)} times for {self.chunks} chunks",
            )

    def _check_survivors(self) -> None:
        """A fork that has had a source ends well if a seed of its version stays, whatever else fails."""
        subjects = {fault.subject for fault in self.faults}
        healthy = {each.own_version for each in self.instances.values() if each.name.startswith("seed")} - {None}
        healthy = {
            version
            for version in healthy
            if any(
                each.own_version == version and each.name.startswith("seed") and each.name not in subjects
                for each in self.instances.values()
            )
        }
        if self.max_readers < len(self.targets) or {"partition", "slow"} & {fault.name for fault in self.faults}:
            return
        for target in self.targets:
            instance = target.instance
            if not target.had_sources or instance.name in subjects or instance.served.version not in healthy:
                continue
            self.check(
                target.outcome == "forked" or target.abandoned,
                f"{instance.name}: {target.outcome} although a seed stayed: {target.machine.reasons}",
            )

    def _must_fork(self, target: Target) -> bool:
        """Return whether a target certainly finds its version, without any fault."""
        seeds = [each for each in self.instances.values() if each.name.startswith("seed")]
        version = target.instance.own_version
        if version is not None:
            return target.instance.files is not None or any(each.own_version == version for each in seeds)
        return len({each.own_version for each in self.instances.values()} - {None}) == 1 and bool(seeds)

    def _check_quarantine(self) -> None:
        for service in self.planner.running():
            for record in service.state.instances():
                self._check_record(record)

    def _check_record(self, record: InstanceRecord) -> None:
        name = record.report.instance_id
        quarantined = self.now < record.quarantined_until and "lease keys" not in record.quarantine
        self.check(
            not quarantined or self.process_of(name) in self.at_fault,
            f"{name} was quarantined without a fault of its own: {record.quarantine}",
        )

    # -- the run ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the world to its end. Raises InvariantViolated, or what a component raised."""
        self.versions: dict[str, list[tuple[bytes, ...]]] = {
            version: [content_of(version, self.chunks, self.shared_chunks)] for version in ("v1", "v2")
        }
        with contextlib.closing(self.loop):
            self._populate()
            self._watch()
            try:
                self.loop.run_forever()
            except Deadlock:
                pass
            finally:
                self.ended = True
                for task in list(self._tasks):
                    task.cancel()
                if self._tasks:
                    self.loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        if self._error is not None:
            raise self._error
        self._check_end()

    def _populate(self) -> None:
        draw = self.random
        for number in range(draw.choice([0, 1, 1, 1, 2, 3])):
            version = draw.choice(["v1", "v1", "v1", "v2"])
            self._add_seed(f"seed{number}", version)
        undisturbed = draw.random() < 0.2
        self._populate_holders()
        for _ in range(draw.randint(1, MAX_TARGETS - 1)):
            at = draw.choice([0.0, 0.0, draw.random() * 0.05, draw.random() * 3])
            self.later(1.5 + at, lambda: self._add_target(self._next_name()), on=None)
        if not undisturbed:
            for _ in range(draw.choice([1, 1, 2, 3])):
                at = 1.5 + draw.random() * draw.choice([0.1, 1.0, 4.0])
                self.later(at, self._inject, on=None)
                self._last_fault_at = max(self._last_fault_at, self.now + at)

    def _populate_holders(self) -> None:
        """Let holders fetch images, in some worlds: on hosts of engines that start later, or on their own."""
        draw = random.Random(f"holders {self.seed}")
        for number in range(draw.choice([0, 0, 1, 2, 3])):
            host = draw.choice([None, f"host-target{number}"])
            name, version, at = f"holder{number}", draw.choice(["v1", "v1", "v2"]), 1.3 + draw.random() * 2
            self.later(at, partial(self._add_holder, name, version, host), on=None)

    def _add_seed(self, name: str, version: str) -> None:
        content = self.versions[version][0]
        seed = Instance(self, name, version=version, files=content, content=content, max_readers=self.max_readers)
        self.instances[name] = seed
        seed.send_report()

    def _add_target(
        self,
        name: str,
        spool: dict[int, bytes] | None = None,
        like: Instance | None = None,
        damaged: frozenset[int] = frozenset(),
    ) -> None:
        draw = self.random
        version = draw.choice(["v1", "v1", "v1", "v2", None]) if like is None else like.own_version
        files = self.versions[version][0] if version is not None and draw.random() < 0.8 else None
        if files is not None and draw.random() < 0.1:
            # The files were saved again under the same version, with other bytes in some or all chunks.
            other, kept = content_of(self.new_id("saved"), self.chunks, 0), draw.choice([0, self.chunks - 1])
            files = (*files[:kept], *other[kept:])
            self.versions[version or ""].append(files)
        if like is not None:
            files = like.files
        instance = Instance(self, name, version=version, files=files, max_readers=self.max_readers)
        self._start_fork(instance, spool, damaged)

    def _start_fork(
        self, instance: Instance, spool: dict[int, bytes] | None = None, damaged: frozenset[int] = frozenset()
    ) -> None:
        self.instances[instance.name] = instance
        target = Target(self, instance, f"fork-{instance.name}", spool, damaged)
        self.targets.append(target)
        instance.send_report()
        target.start()

    def _add_holder(self, name: str, version: str, host: str | None) -> None:
        """Let a holder fetch a version; `host`: of an engine, or its own."""
        holder_id = f"holder-of-{name}"
        self._start_fork(
            Instance(self, name, version=version, files=None, max_readers=self.max_readers, host=host, holder=holder_id)
        )

    def on_forked(self, target: Target) -> None:
        """Let another instance of the same model start the moment that one is complete, in some worlds."""
        if self.random.random() < 0.1 and len(self.targets) < MAX_TARGETS:
            delay_s = self.random.random() * 0.003
            self.later(delay_s, lambda: self._add_target(self._next_name(), like=target.instance), on=None)

    def _next_name(self) -> str:
        return f"target{len(self.targets)}"

    def _watch(self) -> None:
        """Check what must hold at any time, and stop once all is quiet."""
        for service in self.planner.running():
            self.start(service.sweep())
        try:
            self._check_quarantine()
            open_targets = [each for each in self.targets if each.ended_at is None and each.instance.alive]
            for target in open_targets:
                # A prefetch may wait until every engine's fork has ended.
                forks = self.targets if target.instance.holder is not None else [target]
                since = max(self._last_fault_at, *(each.ended_at or each.began_at for each in forks))
                self.check(
                    self.now - since < self.end_within_s or target.instance.stopped,
                    f"{target.instance.name}: the fork hangs",
                )
            quiet_since = max([self._last_fault_at + 5, *(each.ended_at or each.began_at for each in self.targets)])
            if not open_targets and len(self.targets) and self.now > quiet_since + LEASE_TTL_S + 4 * HEARTBEAT_S:
                self.loop.stop()
                return
        except InvariantViolated as error:
            self._stop(error)
            return
        self.loop.call_later(0.5, self._watch)

    # -- faults -----------------------------------------------------------------------------------------

    def _inject(self) -> None:
        draw = self.random
        instances = [each for each in self._main_images() if each.alive and not each.stopped]
        fault = draw.choice(self.possible_faults)
        if fault in (_kill_planner, _silence_planner):
            subject = None
        elif not instances:
            return
        else:
            subject = draw.choice(instances)
        name = subject.name if subject is not None else "planner"
        self.faults.append(Fault(self.now, fault.__name__.strip("_"), name))
        fault(self, subject) if subject is not None else fault(self)

    def _main_images(self) -> list[Instance]:
        """Return one image of each process."""
        return [each for each in self.instances.values() if each.process.images[0] is each]

    def add_version(self, version: str, instance: Instance) -> tuple[bytes, ...]:
        """Return the content that an instance has in a new version."""
        content = content_of(version, self.chunks, self.shared_chunks)
        self.versions[version] = [content]
        return content

    def heal_after(self, low_s: float, high_s: float, heal: Callable[[], None]) -> None:
        """Undo a fault after a random time."""
        after_s = self.random.uniform(low_s, high_s)
        self._last_fault_at = max(self._last_fault_at, self.now + after_s)
        self.later(after_s, heal, on=None)

    def target_of(self, instance: Instance) -> Target | None:
        """Return the running fork of an instance."""
        return next((each for each in self.targets if each.instance is instance and each.ended_at is None), None)


def _set(event: asyncio.Future[None]) -> None:
    if not event.done():
        event.set_result(None)


def _kill(world: World, subject: Instance) -> None:
    world.at_fault.add(subject.name)
    subject.process.kill()


def _kill_and_restart(world: World, subject: Instance) -> None:
    """The process dies during its fork and starts again, with the spool that it left."""
    target = world.target_of(subject)
    _kill(world, subject)
    if target is not None:
        name = f"{subject.name}-again"
        damaged = frozenset(chunk for chunk in target.spool if world.random.random() < 0.2)
        world.heal_after(0.05, 1.0, lambda: world._add_target(name, target.spool, subject, damaged))


def _suspend(world: World, subject: Instance) -> None:
    world.at_fault.add(subject.name)
    subject.process.stopped = True

    def resume() -> None:
        subject.process.stopped = False
        for call in world._resumed.pop(subject.name, []):
            world.later(0.0, call, on=subject)

    world.heal_after(0.2, 8.0, resume)


def _corrupt(world: World, subject: Instance) -> None:
    world.at_fault.add(subject.name)
    world.ever_corrupt.add(subject.name)
    subject.process.corrupt = True


def _bad_memory(world: World, subject: Instance) -> None:
    """The target's memory damages what it receives: every source seems to be corrupt."""
    world.bad_memory.add(subject.name)
    subject.process.bad_memory = True


def _slow(world: World, subject: Instance) -> None:
    subject.process.slow = world.random.choice([3.0, 20.0])
    world.heal_after(1.0, 6.0, lambda: setattr(subject.process, "slow", 1.0))


def _partition(world: World, subject: Instance) -> None:
    others = [each.name for each in world._main_images() if each is not subject and each.alive]
    if not others:
        return
    pair = frozenset((subject.name, world.random.choice(others)))
    world.at_fault |= pair
    world._cuts.add(pair)
    world.heal_after(0.5, 8.0, lambda: world._cuts.discard(pair))


def _cut_off_from_planner(world: World, subject: Instance) -> None:
    world._cut_off.add(subject.name)
    world.heal_after(0.5, 6.0, lambda: world._cut_off.discard(subject.name))


def _update(world: World, subject: Instance) -> None:
    """The seed's weights change in place, as a trainer does, to a version of their own."""
    if subject.served.state != "serving" or subject.served.manifest is None:
        return
    version = world.new_id("update")
    subject.update(version, world.add_version(version, subject), world.random.choice([0.0, 0.01, 0.3]))


def _drain(world: World, subject: Instance) -> None:
    subject.served.drain()
    subject.notify_readers()
    subject.send_report()


def _break_disk(world: World, subject: Instance) -> None:
    if (target := world.target_of(subject)) is not None:
        target.disk_error = True


def _stall_disk(world: World, subject: Instance) -> None:
    if (target := world.target_of(subject)) is not None:
        target.disk_stalled = True


def _kill_planner(world: World) -> None:
    number = world.random.randrange(len(world.planner.replicas))
    world.planner.kill(number)
    world.heal_after(0.1, 4.0, lambda: world.planner.restart(number))


def _silence_planner(world: World) -> None:
    world.planner.silent = True
    world.heal_after(0.1, 4.0, lambda: setattr(world.planner, "silent", False))


FAULTS: list[Callable[..., None]] = [
    _kill,
    _kill_and_restart,
    _suspend,
    _corrupt,
    _bad_memory,
    _slow,
    _partition,
    _cut_off_from_planner,
    _update,
    _drain,
    _break_disk,
    _stall_disk,
    _kill_planner,
    _silence_planner,
]


def run_world(world: World) -> BaseException | None:
    """Run a world; return what broke, or None."""
    try:
        world.run()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return error
    return None
