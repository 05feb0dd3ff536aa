"""Simulated target that reads boxes from other layouts if no instance has its own.

It replaces `rfork.receiver.box_fork`, `rfork.receiver.session.query_source` and `rfork.engines.cross_layout`: which
instances are queried, which boxes are fetched from which layout and what replaces a failed part is decided by
production's state machines, and each part is a fork of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from planner.ownership import Claimant
from planner.plan_service import PlanService
from rfork.errors import (
    AllSourcesFailed,
    DeadlineExceeded,
    LayoutMismatch,
    NetworkError,
    NoSource,
    RforkError,
    SourceError,
    SourceTimeout,
    SourceUnavailable,
)
from rfork.peer.base import BoxImage
from rfork.receiver import box_assignment
from rfork.receiver.box_assignment import AssignedPart, BoxAssignment, OpenedParts
from rfork.receiver.box_fork import LAST_READS_S
from rfork.receiver.events import LoaderFailed
from rfork.receiver.fallback import OTHER_LAYOUTS_URI
from rfork.receiver.source_query import SourceQuery
from rfork.schema import (
    InstanceInfo,
    InstanceReport,
    Placement,
    Plan,
    Route,
    StorageAssignment,
    StorageCandidate,
)
from rfork.source.served_image import InstanceIdentity
from tests.simulation.boxes import BoxImages
from tests.simulation.content import UNKNOWN
from tests.simulation.instance import MODEL, Instance
from tests.simulation.sharded_model import Cells, ImageShape, box_shape, cell_copies, chunks_of
from tests.simulation.target import LOADED, Target

if TYPE_CHECKING:
    from tests.simulation.layouts import LayoutsWorld

T = TypeVar("T")
Question = Callable[[BoxImages], Awaitable[T]]
"""Request to the instance whose box images are passed."""


async def list_serving(service: PlanService, claimant: Claimant) -> list[InstanceInfo]:
    """Return the serving instances of the model, as the planner's API does."""
    await service.sweep()
    now = service.now()
    return [
        record.view(now)
        for record in service.state.instances_after(None)
        if record.report.model == MODEL and record.source.state == "serving"
    ]


@dataclass(frozen=True)
class OtherLayout:
    """One rank of one layout in which the weights are served."""

    sample: InstanceReport
    shape: ImageShape


@dataclass
class FetchedPart:
    """Boxes that were fetched from one layout."""

    assignment: BoxAssignment
    part: AssignedPart
    instance: Instance
    shape: ImageShape


class PartTarget(Target):
    """The fork of one part: an image of boxes, which this process serves afterwards."""

    world: LayoutsWorld

    def __init__(self, world: LayoutsWorld, instance: Instance, deadline_at: float) -> None:
        super().__init__(world, instance, f"fork-{instance.name}", deadline_at=deadline_at)
        self.done: asyncio.Future[RforkError | None] = world.loop.create_future()
        """Has None once the boxes are there, and otherwise the error."""

    def _fall_back(self, error: RforkError) -> None:
        failures = [*self.machine.reasons, error]
        self._end(error.kind)
        self.done.set_result(AllSourcesFailed(f"no source worked: {error}", failures))

    def _end(self, outcome: str) -> None:
        super()._end(outcome)
        if outcome in LOADED:
            self.done.set_result(None)

    def _on_failed(self) -> None:
        """The process continues without these boxes."""


class LayoutTarget(Target):
    """A fork of one rank, which tries instances with its layout, then other layouts, then its own files."""

    world: LayoutsWorld

    def __init__(
        self,
        world: LayoutsWorld,
        instance: Instance,
        shape: ImageShape,
        spool: dict[int, bytes] | None = None,
        damaged: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(world, instance, f"fork-{instance.name}", spool, damaged)
        self.shape = shape
        self.box_forks: list[BoxFork] = []
        self.failures: list[RforkError] = []
        """Failures of these forks."""
        self._version = ""
        """Version of the weights that were read from other layouts."""

    async def _candidates(self) -> tuple[StorageCandidate, ...]:
        if not self.world.is_cooperative:
            return ()
        own = await super()._candidates()
        try:
            await BoxFork(self).samples()
        except (NoSource, NetworkError):
            return own
        return StorageCandidate(kind="loader", uri=OTHER_LAYOUTS_URI), *own

    def _run_loader(self, assignment: StorageAssignment) -> None:
        if assignment.uri != OTHER_LAYOUTS_URI:
            super()._run_loader(assignment)
            return

        async def load() -> None:
            self.instance.set_storage_activity(lambda: self.world.now, relayed=False)
            if (error := await self._load_from_layouts()) is not None:
                self.instance.set_storage_activity(None, relayed=False)
                self.handle(LoaderFailed(assignment, error))

        self.world.start(load())

    def _fall_back(self, error: RforkError) -> None:
        async def load() -> None:
            failure = await self._load_from_layouts()
            if failure is not None and self.ended_at is None:
                super(LayoutTarget, self)._fall_back(failure)

        self.world.start(load())

    async def _load_from_layouts(self) -> RforkError | None:
        """Fill the image with boxes, and end the fork. Return an error if it is not filled."""
        fork = BoxFork(self)
        self.box_forks.append(fork)
        try:
            cells = await fork.run()
        except RforkError as error:
            self.failures.append(error)
            return error
        finally:
            if not self.world.ended:
                self.world.start(fork.close())
        await self.world.resumed(self.instance)
        if self.ended_at is None:
            self._close_sources()
            self.instance.fence()
            self.instance.memory[:] = chunks_of(cells)
            self._version = fork.version
            self._end("layouts")
        return None

    @property
    def loaded_version(self) -> str:
        return self._version or super().loaded_version

    def _end(self, outcome: str) -> None:
        super()._end(outcome)
        if outcome in LOADED and (outcome != "forked" or self.instance.files is not None):
            # A fork without files does not know the names of the checkpoint's tensors.
            self.world.serve_boxes(self.instance, self.shape)


class BoxFork:
    """Fetches the boxes of one target."""

    def __init__(self, target: LayoutTarget) -> None:
        self.target = target
        self.version = ""
        self.layouts: list[OtherLayout] = []
        self.assignments: list[BoxAssignment] = []
        self.fetched: list[FetchedPart] = []
        self.attempts: list[tuple[AssignedPart, PartTarget]] = []
        """Parts that were requested, and their forks."""
        self._world = target.world
        self._instance = target.instance
        self._deadline = target.began_at + self._world.settings.deadline_s
        self._opened = OpenedParts()

    async def samples(self) -> list[InstanceReport]:
        """Return an instance of each rank and layout. Raises NoSource, and the planner's errors."""
        required = self._instance.served.version
        serving = await self._call(list_serving)
        rank = self._instance.served.identity.rank
        self.version, samples = box_assignment.choose_samples(MODEL, serving, rank, required)
        return samples

    async def run(self) -> Cells:
        """Return the cells of the target's image. Raises RforkError."""
        await self._find_layouts()
        maps = [layout.shape.placement_map for layout in self.layouts]
        wanted = box_assignment.first_and_later(self.target.shape.placement_map)
        first, later = self.assignments = [BoxAssignment(boxes, maps) for boxes in wanted]
        await self._open_all(later.start())
        first.start()
        await self._fetch_into(first)
        await self._world.sleep(self._world.load_s)
        await self._world.resumed(self._instance)
        await self._fetch_into(later)
        shape = self.target.shape
        cells = shape.cells([UNKNOWN] * len(shape.layout.chunks))
        for each in self.fetched:
            boxes = each.shape.cells(each.instance.memory)
            for copy in cell_copies(each.shape, shape):
                cells[copy.written] = boxes[copy.read]
        return cells

    async def close(self) -> None:
        """Stop serving the boxes to other targets, once their current readers have finished."""
        images = [part.instance for part in self.fetched]
        for image in images:
            image.served.drain()
            image.notify_readers()
            image.send_report()
        await self._world.sleep(LAST_READS_S)
        for image in images:
            await self._world.close_image(image)

    async def _find_layouts(self) -> None:
        refusals: list[RforkError] = []
        samples, timeout_s = await self.samples(), self._world.settings.source_idle_timeout_s
        queries = [self._query(sample, timeout_s, _shape_of) for sample in samples]
        for sample, shape in zip(samples, await asyncio.gather(*queries, return_exceptions=True), strict=True):
            if isinstance(shape, ImageShape):
                self.layouts.append(OtherLayout(sample, shape))
            elif isinstance(shape, RforkError):
                refusals.append(shape)
            else:
                raise shape
        if not self.layouts:
            raise NoSource(f"no instance can serve another layout: {refusals}")
        self.layouts.sort(key=lambda layout: (layout.sample.rank.key, layout.sample.layout_id))

    async def _open_all(self, parts: Sequence[AssignedPart]) -> None:
        """Let sources begin to gather parts."""
        opened = [self._open(part) for part in parts]
        for part, image in zip(parts, await asyncio.gather(*opened, return_exceptions=True), strict=True):
            if not isinstance(image, BaseException):
                self._opened.add(part, image, self._world.now)
            elif not isinstance(image, RforkError):
                raise image

    async def _fetch_into(self, assignment: BoxAssignment) -> None:
        running: dict[asyncio.Task[FetchedPart], AssignedPart] = {}
        pending = list(assignment.in_flight)
        try:
            while pending or running:
                running |= {self._world.task(self._fetch_part(assignment, part)): part for part in pending}
                pending = []
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in [each for each in running if each.done()]:
                    part, error = running.pop(task), task.exception()
                    if isinstance(error, RforkError):
                        pending += assignment.failed(part, error)
                    else:
                        self.fetched.append(task.result())
                        assignment.completed(part)
        finally:
            for ended in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(ended, FetchedPart):
                    self.fetched.append(ended)

    async def _fetch_part(self, assignment: BoxAssignment, part: AssignedPart) -> FetchedPart:
        world, process = self._world, self._instance.process
        opened = self._opened.pop(part, world.now) or await self._open(part)
        shape = box_shape(part.boxes, world.layers)
        box_assignment.check_opened(opened, self.version, shape.layout.layout_id)
        if world.now >= self._deadline:
            raise DeadlineExceeded("the deadline passed before the first box")
        name = world.new_id(f"{self._instance.name}-part-")
        instance = Instance(
            world,
            name,
            version=opened.version,
            files=None,
            max_readers=world.max_readers,
            layout=shape.layout,
            identity=InstanceIdentity(opened.model, instance_id=name, version=opened.version, replica=name),
            process=process,
        )
        world.add_image(instance, shape)
        fork = PartTarget(world, instance, self._deadline)
        self.attempts.append((part, fork))
        fork.start()
        if (error := await fork.done) is not None:
            await world.close_image(instance)
            raise error
        return FetchedPart(assignment, part, instance, shape)

    async def _open(self, part: AssignedPart) -> BoxImage:
        sample, timeout_s = self.layouts[part.layout].sample, self._world.settings.source_idle_timeout_s
        return await self._query(sample, timeout_s, lambda images: images.open(part.boxes))

    async def _query(self, sample: InstanceReport, timeout_s: float, question: Question[T]) -> T:
        """Return the answer of an instance that has the image of a sample."""
        world = self._world
        retry_until = min(world.now + timeout_s, self._deadline)
        query = SourceQuery(
            sample,
            world.new_id("query-fork-"),
            world.new_id("query-"),
            placement=Placement(host=self._instance.host),
            retry_until=retry_until,
        )
        try:
            while True:
                plan: Plan = await self._call(lambda service, claimant: service.plan(query.request, claimant))
                for route in query.plan_received(plan):
                    try:
                        return await self._request(route, question, min(world.now + timeout_s, self._deadline))
                    except (LayoutMismatch, SourceError, NetworkError) as error:
                        query.failed(route, error)
                await world.sleep(query.pause_s(plan, world.now))
                await world.resumed(self._instance)
        finally:
            if not world.ended:
                world.start(self._end_query(query))

    async def _end_query(self, query: SourceQuery) -> None:
        instance_id = query.request.instance.instance_id
        try:
            await self._call(lambda service, claimant: service.remove(instance_id, claimant))
        except NetworkError:
            return

    async def _request(self, route: Route, question: Question[T], until: float) -> T:
        """Return the answer of one instance."""
        world, target = self._world, self._instance
        source = world.instance_at(route.address)

        async def reach() -> Instance:
            await world.sleep(world.latency_s())
            await world.resumed(target)
            if source is None or not source.alive:
                raise SourceUnavailable("connection refused")
            if source.stopped or world.is_cut(source.name, target.name):
                await world.sleep(max(0.0, until - world.now))
                await world.resumed(target)
                raise SourceTimeout("no response")
            return source

        reached = await reach()
        reached.served.check(route.lease.token, world.unix_s)
        images = world.box_images.get(reached.name)
        if images is None:
            raise LayoutMismatch("this instance has no placement map")
        answer = await question(images)
        await reach()
        return answer

    async def _call(self, call: Callable[[PlanService, Claimant], Awaitable[T]]) -> T:
        await self._world.resumed(self._instance)
        answer = await self._world.planner.call(self._instance.name, self._instance.host, call)
        await self._world.resumed(self._instance)
        return answer


async def _shape_of(images: BoxImages) -> ImageShape:
    return images.shape
