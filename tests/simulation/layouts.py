"""A simulated fleet in which instances of one model have different layouts.

Besides the promises of `tests.simulation.world`:

1. An instance that reports success has the bytes of its own layout and version, compared in checkpoint coordinates.
2. Each box that a fork across layouts needs is fetched once, whatever fails; what fails is fetched again at most twice
   for each layout.
3. Boxes that were accepted have the bytes of their version, and boxes of changed weights are never accepted.
4. Once a fork has ended, its boxes are no longer served.
5. Without faults, a target whose layout is served is forked from it; boxes come from one layout that has them all, if
   there is one; and none that has sources in any layout uses its own files.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rfork.errors import NetworkError, SourceUnavailable
from rfork.placement.boxes import divide, wanted_boxes
from rfork.source.served_image import InstanceIdentity
from tests.simulation.box_target import BoxFork, LayoutTarget, PartTarget
from tests.simulation.boxes import CLOSE_GRACE_S, BoxImages, covers
from tests.simulation.content import GARBAGE
from tests.simulation.instance import MODEL, Instance
from tests.simulation.sharded_model import ImageShape, RankLayout, box_shape
from tests.simulation.target import Target
from tests.simulation.world import FAULTS, MAX_TARGETS, World

if TYPE_CHECKING:
    from planner.core.records import InstanceRecord

ONE = RankLayout(0, 1)
OTHER_ENGINE = RankLayout(0, 1, is_packed=False)
PAIR = (RankLayout(0, 2), RankLayout(1, 2))
OTHER_PAIR = (RankLayout(0, 2, is_packed=False), RankLayout(1, 2, is_packed=False))
FLEETS: list[list[RankLayout]] = [
    [ONE],
    [ONE, ONE],
    [OTHER_ENGINE],
    [*PAIR],
    [*PAIR, *PAIR],
    [*PAIR, PAIR[0]],
    [*PAIR, *OTHER_PAIR],
    [*PAIR, OTHER_PAIR[0]],
    [ONE, *PAIR],
    [OTHER_ENGINE, *PAIR],
]
ALL = [ONE, OTHER_ENGINE, *PAIR]
MAX_FETCHES = 2
"""Attempts to fetch a part from one layout."""


class LayoutsWorld(World):
    """Seeds of one or two layouts, and targets of others."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.random
        self.layers = draw.choice([1, 2])
        self.chunks = len(ONE.shape(self.layers).layout.chunks)
        self.load_s = self.disk_chunk_s * self.chunks + 0.1
        self.gather_chunk_s = self.chunk_s * draw.choice([0.1, 1.0])
        self.is_cooperative = draw.random() < 0.6
        """True if targets that wait elect one that reads from other layouts."""
        self.possible_faults = [*FAULTS, _change_memory]
        self.max_readers = draw.choice([2, 8])
        self.layout_versions = ["v1", "v2"]
        self.shapes: dict[str, ImageShape] = {}
        """By instance."""
        self.rank_layouts: dict[str, RankLayout] = {}
        """By instance; not those of boxes."""
        self.box_images: dict[str, BoxImages] = {}
        """By instance; those of instances that serve other layouts."""

    # -- services for instances -------------------------------------------------------------------------

    def add_image(self, instance: Instance, shape: ImageShape) -> None:
        """Add an image of boxes, and report it."""
        self.instances[instance.name], self.shapes[instance.name] = instance, shape
        instance.send_report()

    def serve_boxes(self, instance: Instance, shape: ImageShape) -> None:
        """Let an instance serve other layouts."""
        self.box_images[instance.name] = BoxImages(self, instance, shape)

    async def close_image(self, image: Instance) -> None:
        """Stop serving boxes, once the readers know it."""
        image.fence()
        await self.sleep(CLOSE_GRACE_S)
        image.is_closed = True
        image.notify_readers()
        await self._remove(image)

    def add_version(self, version: str, instance: Instance) -> tuple[bytes, ...]:
        """See `World`."""
        self.layout_versions.append(version)
        return self.shapes[instance.name].content(version)

    async def _remove(self, image: Instance) -> None:
        if image.process.alive:
            with suppress(NetworkError):
                await self.planner.call(
                    image.name, image.host, lambda service, claimant: service.remove(image.name, claimant)
                )

    # -- the fleet --------------------------------------------------------------------------------------

    def _populate(self) -> None:
        draw = self.random
        fleets = [("v1", draw.choice(FLEETS))]
        if draw.random() < 0.15:
            fleets.append(("v2", draw.choice(FLEETS)))
        for version, fleet in fleets:
            for rank_layout in fleet:
                self._add_rank(f"seed{len(self.instances)}", version, rank_layout)
        undisturbed = draw.random() < 0.25
        is_one_layout = draw.random() < 0.5
        chosen = draw.choice(ALL)
        for _ in range(draw.randint(1, MAX_TARGETS - 2)):
            at = draw.choice([0.0, 0.0, draw.random() * 0.05, draw.random() * 3])
            rank_layout = chosen if is_one_layout else draw.choice(ALL)
            self.later(1.5 + at, partial(self._add_first_target, rank_layout), on=None)
        if not undisturbed:
            for _ in range(draw.choice([1, 1, 2, 3])):
                at = 1.5 + draw.random() * draw.choice([0.1, 1.0, 4.0])
                self.later(at, self._inject, on=None)
                self._last_fault_at = max(self._last_fault_at, self.now + at)

    def _add_rank(self, name: str, version: str, rank_layout: RankLayout) -> None:
        shape = rank_layout.shape(self.layers)
        content = shape.content(version)
        seed = self._instance(name, rank_layout, version, content, content)
        self.serve_boxes(seed, shape)
        seed.send_report()

    def _instance(
        self,
        name: str,
        rank_layout: RankLayout,
        version: str | None,
        files: tuple[bytes, ...] | None,
        content: tuple[bytes, ...] | None = None,
    ) -> Instance:
        shape = rank_layout.shape(self.layers)
        instance = Instance(
            self,
            name,
            version=version,
            files=files,
            content=content,
            max_readers=self.max_readers,
            layout=shape.layout,
            identity=InstanceIdentity(MODEL, rank_layout.rank, name, version),
        )
        self.instances[name], self.shapes[name], self.rank_layouts[name] = instance, shape, rank_layout
        return instance

    def _add_first_target(self, rank_layout: RankLayout) -> None:
        draw = self.random
        version = draw.choice(["v1", "v1", "v1", None])
        has_files = version is not None and draw.random() < 0.3
        files = rank_layout.shape(self.layers).content("v1") if has_files else None
        self._fork(self._instance(self._next_name(), rank_layout, version, files))

    def _add_target(
        self,
        name: str,
        spool: dict[int, bytes] | None = None,
        like: Instance | None = None,
        damaged: frozenset[int] = frozenset(),
    ) -> None:
        assert like is not None
        instance = self._instance(name, self.rank_layouts[like.name], like.own_version, like.files)
        self._fork(instance, spool, damaged)

    def _fork(
        self, instance: Instance, spool: dict[int, bytes] | None = None, damaged: frozenset[int] = frozenset()
    ) -> None:
        target = LayoutTarget(self, instance, self.shapes[instance.name], spool, damaged)
        self.targets.append(target)
        instance.send_report()
        target.start()

    def on_forked(self, target: Target) -> None:
        """See `World`."""
        if not isinstance(target, PartTarget):
            super().on_forked(target)

    # -- invariants -------------------------------------------------------------------------------------

    def check_verified(self, target: Target, chunk: int, digest: bytes | None) -> None:
        """See `World`; a chunk of boxes has the bytes of the version that was requested."""
        instance = target.instance
        content, shape = instance.memory[chunk], self.shapes[instance.name]
        self.check(digest is None or content == digest, f"{instance.name}: wrong bytes in chunk {chunk}")
        versions = [instance.own_version or ""] if isinstance(target, PartTarget) else self.layout_versions
        self.check(
            any(content == shape.content(version)[chunk] for version in versions),
            f"{instance.name}: chunk {chunk} has bytes of no version",
        )

    def check_complete(self, target: Target) -> None:
        """See `World`; the bytes are compared in checkpoint coordinates."""
        instance = target.instance
        version = target.loaded_version if target.outcome != "forked" else instance.served.version
        self.check(version in self.layout_versions, f"{instance.name}: unknown version {version}")
        if instance.own_version is not None:
            self.check(version == instance.own_version, f"{instance.name}: version {version} was not requested")
        self.check(
            tuple(instance.memory) == self.shapes[instance.name].content(version or ""),
            f"{instance.name}: the image does not have the bytes of version {version} after {target.outcome}",
        )
        if target.outcome == "forked":
            self.check(instance.served.manifest == instance.manifest, f"{instance.name}: the manifest is another one")

    def _check_end(self) -> None:
        super()._check_end()
        for target in self.layout_targets():
            for fork in target.box_forks:
                if target.ended_at is not None:
                    self._check_box_fork(target, fork)

    def layout_targets(self) -> list[LayoutTarget]:
        return [each for each in self.targets if isinstance(each, LayoutTarget)]

    def _check_box_fork(self, target: LayoutTarget, fork: BoxFork) -> None:
        name = target.instance.name
        for part, attempt in fork.attempts:
            if attempt.ended_at is not None:
                self._check_transfer(attempt)
            elif attempt.instance.process.alive:
                self.check(False, f"{attempt.instance.name}: the fork of boxes hangs")
            count = sum(each == part for each, _ in fork.attempts)
            self.check(count <= MAX_FETCHES, f"{name}: a part was requested {count} times")
        if not target.instance.process.alive:
            return
        for _, attempt in fork.attempts:
            image = attempt.instance
            self.check(image.is_closed, f"{image.name}: boxes are still served")
            known = any(service.state.instance(image.name) for service in self.planner.running())
            self.check(not known, f"{image.name}: the planner still knows the boxes")
        if target.outcome == "layouts" and fork is target.box_forks[-1]:
            fetched = [each.shape.checkpoint_indices for each in fork.fetched]
            needed = box_shape(tuple(wanted_boxes(target.shape.placement_map)), self.layers).checkpoint_indices
            self.check(
                sorted(np.concatenate(fetched).tolist()) == sorted(needed.tolist()),
                f"{name}: the boxes that were fetched are not those that are needed, each once",
            )

    def _check_undisturbed(self) -> None:
        for target in self.layout_targets():
            name, version = target.instance.name, target.instance.own_version
            seeds = [each for each in self._main_images() if each.name.startswith("seed")]
            versions = {each.own_version for each in seeds}
            if version is None and len(versions) == 1:
                (version,) = versions
            seeds = [each for each in seeds if each.own_version == version]
            own = [each for each in seeds if self.rank_layouts[each.name] == self.rank_layouts[name]]
            expected = ["forked"] if own else ["forked", "layouts"]
            has_all = (
                own
                or divide(
                    wanted_boxes(target.shape.placement_map), [self.shapes[each.name].placement_map for each in seeds]
                ).missing
                == ()
            )
            self.check(
                not has_all or target.outcome in expected or target.abandoned,
                f"{name}: {target.outcome} instead of {expected} without a fault: "
                f"{[*target.machine.reasons, *target.failures]!r}",
            )
            if target.outcome == "layouts":
                self._check_few_parts(target, target.box_forks[-1])

    def _check_few_parts(self, target: LayoutTarget, fork: BoxFork) -> None:
        for assignment in fork.assignments:
            layouts = {each.part.layout for each in fork.fetched if each.assignment is assignment}
            boxes = [box for each in fork.fetched if each.assignment is assignment for box in each.part.boxes]
            if boxes and any(covers(each.shape, box_shape(tuple(boxes), self.layers)) for each in fork.layouts):
                self.check(len(layouts) == 1, f"{target.instance.name}: boxes that one layout has came from {layouts}")

    def _check_record(self, record: InstanceRecord) -> None:
        if len(self.bad_memory) >= 2:  # two hosts with bad memory outvote a source
            return
        # The removal of a closed image is lost if no planner answers: until it is forgotten, readers report it missing.
        image = self.instances.get(record.report.instance_id)
        is_missing = record.quarantine.startswith(SourceUnavailable.__name__)
        if not (image is not None and image.is_closed and is_missing):
            super()._check_record(record)

    def _check_survivors(self) -> None:
        """Do nothing: what remains may lack some boxes."""


def _change_memory(world: LayoutsWorld, subject: Instance) -> None:
    """The weights of a seed change without notice."""
    if subject.served.state == "serving" and subject.served.manifest is not None:
        world.at_fault.add(subject.name)
        world.ever_corrupt.add(subject.name)
        chunk = world.random.randrange(len(subject.memory))
        subject.memory[chunk] = GARBAGE[: len(subject.memory[chunk])]
