"""Fork across layouts: boxes of checkpoint tensors from instances whose layouts differ from the target's.

Runs on the target. The target knows from its placement map which boxes it needs, and from those of the sources who has
them. Each source serves its part on request, as an image of its own whose tensors are the boxes. These images are
forked like any other; so they are verified, and targets of one layout relay them to each other.

Boxes that a loader only copies are received where its copies lie, in the tensors of the model: the loader runs first,
with tensors that are not copied, and post-processing afterwards. Boxes with which it computes are received in host
memory before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Final, TypeVar
from uuid import uuid4

import torch
from torch import nn

from rfork.errors import (
    DeadlineExceeded,
    EngineMismatch,
    LayoutMismatch,
    NoSource,
    RforkError,
)
from rfork.image.capture import image_from_tensors
from rfork.image.staging import allocate_host
from rfork.logs import logger
from rfork.peer.base import BoxImage, Peer
from rfork.placement.box_tensors import BoxMemory, CheckpointMemory, OwnMemory, SkippedCopies
from rfork.placement.boxes import Box, encode_boxes
from rfork.placement.placement_map import PlacementMap, TensorTable
from rfork.planner_client.client import PlannerClient
from rfork.receiver.box_assignment import (
    AssignedPart,
    BoxAssignment,
    OpenedParts,
    check_opened,
    choose_samples,
    first_and_later,
)
from rfork.receiver.box_race import BoxRace, SampleLoad
from rfork.receiver.report import ForkReport
from rfork.receiver.session import ForkOptions, ForkSession, Network, module_of, query_source
from rfork.schema import MAX_LAYOUT_PARTS, InstanceReport, LayoutPart, Rank
from rfork.settings import InstanceSettings
from rfork.source.seed import InstanceIdentity, Seed

log = logger(__name__)

OPEN_TIMEOUT_S: Final = 300.0
"""Maximum time in which a source begins to serve the boxes of one target."""
MAX_QUERIES: Final = 8
"""Placement maps that are requested concurrently."""
MAX_PARTS: Final = 4
"""Parts that are fetched concurrently."""
TensorsOf = Callable[[nn.Module], Mapping[str, torch.Tensor]]
"""Returns a model's tensors by name, with tied ones under each name."""
OwnTensors = Callable[[], Mapping[str, torch.Tensor]]
"""`TensorsOf` of one model."""
Weights = Iterator[tuple[str, torch.Tensor]]
"""Names and tensors of a checkpoint, in its order."""
Module = TypeVar("Module", bound=nn.Module)
COMPARE_INTERVAL_S: Final = 0.1
"""Maximum interval between comparisons with the own load."""
LAST_READS_S: Final = 0.5
"""Maximum time that a target waits for readers of its boxes before it changes its model."""


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """One rank of one layout in which the weights are served."""

    sample: InstanceReport
    """Report of one of its instances."""
    placement_map: PlacementMap

    @property
    def name(self) -> str:
        """Name for display: rank and start of the layout's id."""
        return f"{self.sample.rank.key}/{self.sample.layout_id[:8]}"


@dataclass(slots=True)
class FetchedPart:
    """Boxes from one layout, and their fork."""

    boxes: tuple[Box, ...]
    report: ForkReport
    layout: OtherLayout
    seconds: float = 0.0
    """Duration, including the gather on the source."""
    seed: Seed | None = None
    """Serves them to other targets."""

    def suspend(self, until: float) -> None:
        """Stop serving the boxes to other targets, once their current readers have finished, or at `until`.

        The seed drops its references to the boxes, which a loader may have kept as parameters.
        """
        if self.seed is not None:
            self.seed.drain(max(0.0, until - time.monotonic()))
            self.seed.suspend()

    def close(self) -> None:
        """Close the seed."""
        seed, self.seed = self.seed, None
        if seed is not None:
            seed.close()

    @property
    def description(self) -> LayoutPart:
        """Its layout, source, size and duration, for reports."""
        sample, shares = self.layout.sample, self.report.sources
        return LayoutPart(
            rank_key=sample.rank.key,
            layout_id=sample.layout_id,
            host=shares[0].host if shares else sample.placement.host,
            instance_id=shares[0].source_id if shares else sample.instance_id,
            boxes=len(self.boxes),
            bytes_read=self.report.bytes_read,
            seconds=self.seconds,
        )


@dataclass(slots=True)
class BoxWeights:
    """Weights of one target: boxes that were fetched for its loader, and those that fill the model after it."""

    fork: BoxFork
    placement_map: PlacementMap
    memory: CheckpointMemory
    later: BoxAssignment
    """Boxes that the loader only copies."""
    needed_bytes: int
    """Bytes of the boxes that the target needs."""
    parts: list[FetchedPart] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Layouts that failed, and why."""
    failure: RforkError | None = None
    """Reason if the boxes in `later` could not be fetched."""
    transfer_s: float = 0.0
    """Duration of all transfers so far."""
    fill_s: float = 0.0
    """Part of it that the loader has waited for."""

    @property
    def version(self) -> str:
        """Version of the weights."""
        return self.fork.version

    @property
    def received_bytes(self) -> int:
        """Bytes that the forks of all parts have read."""
        return sum(part.report.bytes_read for part in self.parts)

    def load(self, load_from: Callable[[Callable[[nn.Module], Weights]], Module], tensors_of: TensorsOf) -> Module:
        """Return the model that a loader, such as `RelocatingEngine.load_from`, builds from these weights.

        The loader reads all tensors of the checkpoint, of which only the fetched boxes have their values. Once it has
        read the last one, the others fill the model. Raises as `BoxFork.fetch`, and what the loader raises.
        """
        skipped = contextlib.nullcontext() if self.later.is_complete else SkippedCopies(self.memory.zeros)
        with skipped:
            return load_from(lambda module: self._weights(partial(tensors_of, module)))

    def _weights(self, own: OwnTensors) -> Weights:
        """Yield all tensors of the checkpoint in its order, then fill the model with the boxes that were not fetched.

        `own` returns the tensors of the model, which has the placement map.
        """
        computed_from = frozenset(self.placement_map.read_completely)
        for name, tensor in self.memory.tensors():
            # Boxes are still served to other targets.
            yield name, tensor.clone() if name in computed_from else tensor
        if self.later.is_complete:
            return
        began = time.monotonic()
        try:
            self._fill(own())
        except RforkError as error:
            self.failure = error
            raise
        finally:
            self.fill_s = time.monotonic() - began

    def _fill(self, own: Mapping[str, torch.Tensor]) -> None:
        try:
            memory = OwnMemory(self.placement_map, own, allocate_host)
        except ValueError as error:
            raise EngineMismatch(f"the engine built another model than before: {error}") from None
        before = len(self.parts)
        try:
            self.fork.fetch_into(memory, self.later, self)
        finally:
            # The model is about to be changed.
            _suspend_all(self.parts[before:], LAST_READS_S)
            _close_all(self.parts[before:])

    @property
    def part_descriptions(self) -> tuple[LayoutPart, ...]:
        """The largest parts, by size."""
        found = [part.description for part in self.parts]
        return tuple(sorted(found, key=lambda part: -part.bytes_read)[:MAX_LAYOUT_PARTS])

    def line(self) -> str:
        """Return a one-line description for logs."""
        names = ", ".join(sorted({part.layout.name for part in self.parts}))
        return f"{self.received_bytes / 1e9:.3f} GB of {self.needed_bytes / 1e9:.3f} GB needed, from {names}"

    def release(self, drain_s: float) -> None:
        """Stop serving the boxes to other targets once their current readers have finished, and free the memory."""

        def close() -> None:
            _suspend_all(self.parts, drain_s)
            _close_all(self.parts)

        threading.Thread(target=close, name="rfork-boxes", daemon=True).start()


def _suspend_all(parts: Sequence[FetchedPart], drain_s: float) -> None:
    until = time.monotonic() + drain_s
    for part in parts:
        part.suspend(until)


def _close_all(parts: Sequence[FetchedPart]) -> None:
    for part in parts:
        part.close()


def other_layouts(
    planner: PlannerClient, model: str, rank: Rank, version: str | None, deadline: float
) -> tuple[str, list[InstanceReport]]:
    """Return the version and a serving instance of each rank and layout of it; see `choose_samples`."""
    return choose_samples(model, planner.instances(model=model, state="serving", deadline=deadline), rank, version)


class BoxFork:
    """Fetches the boxes of one target. Call `checkpoint`, then `fetch`."""

    def __init__(
        self,
        model: str,
        rank: Rank,
        version: str | None,
        settings: InstanceSettings,
        *,
        deadline: float,
        sample_load: SampleLoad | None = None,
    ) -> None:
        """`version`: the required one; None: the one that is served.

        With `sample_load`, the fork is abandoned while its sources are slower than the engine's own loader.
        """
        self.model = model
        self.rank = rank
        self._required_version = version
        self._settings = settings
        self._deadline = deadline
        self._race = BoxRace(sample_load)
        self._opened = OpenedParts()
        self.refusals: list[tuple[InstanceReport, str]] = []
        """Instances that cannot serve other layouts, and why; known after `layouts`."""

    @cached_property
    def _found(self) -> tuple[str, list[InstanceReport]]:
        with PlannerClient.of(self._settings) as planner:
            return other_layouts(planner, self.model, self.rank, self._required_version, self._deadline)

    @property
    def version(self) -> str:
        """Version of the weights. Raises NoSource."""
        return self._found[0]

    @cached_property
    def layouts(self) -> list[OtherLayout]:
        """Layouts whose instances have a placement map. Raises NoSource with the reasons if there is none."""
        found: list[OtherLayout] = []
        samples = self._found[1]
        with ThreadPoolExecutor(MAX_QUERIES, thread_name_prefix="rfork-maps") as pool:
            maps = [pool.submit(self._map_of, sample) for sample in samples]
            for sample, placement_map in zip(samples, maps, strict=True):
                try:
                    found.append(OtherLayout(sample, placement_map.result()))
                except (RforkError, ValueError) as error:
                    self.refusals.append((sample, str(error)))
        reasons = [f"{sample.rank.key} on {sample.placement.host}: {reason}" for sample, reason in self.refusals]
        if not found:
            raise NoSource(f"no instance of {self.model} can serve another layout: {'; '.join(reasons)}")
        for reason in reasons:
            log.info("an instance cannot serve other layouts", reason=reason)
        return sorted(found, key=lambda layout: (layout.sample.rank.key, layout.sample.layout_id))

    def _map_of(self, sample: InstanceReport) -> PlacementMap:
        data = query_source(sample, self._settings, self._deadline, lambda peer, until: peer.placement(until))
        return PlacementMap.from_bytes(data)

    @property
    def checkpoint(self) -> TensorTable:
        """Names and types of all tensors of the checkpoint.

        Raises NoSource, or LayoutMismatch if the sources differ.
        """
        table = max((layout.placement_map.checkpoint for layout in self.layouts), key=len)
        for layout in self.layouts:
            other = layout.placement_map.checkpoint
            for index, name in enumerate(other.names):
                position = table.positions.get(name)
                if position is not None and table.type_of(position) != other.type_of(index):
                    raise LayoutMismatch(
                        f"checkpoint tensor {name} is {table.type_of(position)} for one source and"
                        f" {other.type_of(index)} for {layout.name}, although both serve version {self.version}"
                    )
        return table

    def fetch(self, placement_map: PlacementMap) -> BoxWeights:
        """Return the weights of a target with this map, once all boxes are there that its loader computes with.

        The others are opened, so that their sources gather them while the target builds its model. Raises
        LayoutMismatch, with the name, for a tensor that no source has; otherwise the failure of the last source.
        """
        maps = [layout.placement_map for layout in self.layouts]
        first, later = (BoxAssignment(boxes, maps) for boxes in first_and_later(placement_map))
        needed_bytes = first.needed_bytes + later.needed_bytes
        memory = CheckpointMemory(self.checkpoint, allocate_host)
        weights = BoxWeights(self, placement_map, memory, later, needed_bytes)
        try:
            self._open_all(later.start())
            first.start()
            self.fetch_into(weights.memory, first, weights)
        except BaseException:
            weights.release(0.0)
            raise
        return weights

    def fetch_into(self, memory: BoxMemory, assignment: BoxAssignment, weights: BoxWeights) -> None:
        """Fetch the parts of an assignment, and add them to `weights`. Raises as `fetch`, and SlowSources."""
        began = time.monotonic()
        self._race.begin()
        running: dict[Future[FetchedPart], AssignedPart] = {}
        try:
            with ThreadPoolExecutor(MAX_PARTS, thread_name_prefix="rfork-boxes") as pool:
                try:
                    pending = list(assignment.in_flight)
                    while pending or running:
                        for part in pending:
                            running[pool.submit(self._timed_part, part, _allocated(memory, part.boxes))] = part
                        pending = []
                        done = wait(running, COMPARE_INTERVAL_S, FIRST_COMPLETED).done
                        self._race.compare(weights.needed_bytes)
                        for future in done:
                            part = running[future]
                            if isinstance(error := future.exception(), RforkError):
                                del running[future]
                                memory.forget(part.boxes)
                                pending += self._replaced(part, error, assignment, weights)
                            else:
                                weights.parts.append(future.result())
                                del running[future]
                                memory.filled(part.boxes)
                                assignment.completed(part)
                except BaseException:
                    for future in running:
                        future.cancel()
                    self._race.cancel()
                    raise
        finally:  # their seeds are closed with the others
            ended = [each for each in running if not each.cancelled() and each.exception() is None]
            weights.parts += [each.result() for each in ended]
            weights.transfer_s += time.monotonic() - began

    def _replaced(
        self, part: AssignedPart, error: RforkError, assignment: BoxAssignment, weights: BoxWeights
    ) -> list[AssignedPart]:
        """Return the parts that replace a failed one. Raises its error if there are none."""
        layout, replacements = self.layouts[part.layout].name, list[AssignedPart]()
        try:
            replacements = assignment.failed(part, error)
            return replacements
        finally:
            if part in replacements:
                log.info("boxes requested again", layout=layout, reason=str(error))
            else:
                log.warning("a source of another layout failed", layout=layout, reason=str(error))
                weights.failures.append(f"{layout}: {error.kind}: {error}")

    def _timed_part(self, part: AssignedPart, tensors: Mapping[str, torch.Tensor]) -> FetchedPart:
        began = time.monotonic()
        return replace(self._fetch_part(part, tensors), seconds=time.monotonic() - began)

    def _open_all(self, parts: Sequence[AssignedPart]) -> None:
        """Let sources begin to gather parts. One that fails now fails again when it is read."""

        def attempt(part: AssignedPart) -> None:
            try:
                self._opened.add(part, self._open(part), time.monotonic())
            except RforkError as error:
                log.info("boxes not opened", layout=self.layouts[part.layout].name, reason=str(error))

        with ThreadPoolExecutor(MAX_PARTS, thread_name_prefix="rfork-boxes") as pool:
            list(pool.map(attempt, parts))

    def _open(self, part: AssignedPart) -> BoxImage:
        """Let a source gather and serve boxes."""
        encoded, opening_until = encode_boxes(part.boxes), min(self._deadline, time.monotonic() + OPEN_TIMEOUT_S)

        def question(peer: Peer, until: float) -> BoxImage:
            return peer.open_boxes(encoded, opening_until)

        return query_source(self.layouts[part.layout].sample, self._settings, self._deadline, question)

    def _fetch_part(self, part: AssignedPart, tensors: Mapping[str, torch.Tensor]) -> FetchedPart:
        opened = self._opened.pop(part, time.monotonic()) or self._open(part)
        expected = image_from_tensors(tensors).layout
        check_opened(opened, self.version, expected.layout_id)
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"the deadline passed before the first box of {self.model}")
        identity = InstanceIdentity(opened.model, version=opened.version, replica=f"boxes-{uuid4().hex[:12]}")
        # Mapped pages would be read-only, and laid out for one target: copies cost the same here.
        settings = self._settings.model_copy(
            update={"deadline_s": remaining_s, "snapshot": None, "resume_dir": None, "shm_mode": "copy"}
        )
        session = ForkSession(module_of(tensors), identity, settings, Network.of(settings), ForkOptions(like=expected))
        with self._race.running(session):
            report = session.run()
        return FetchedPart(part.boxes, report, self.layouts[part.layout], seed=report.seed)


def _allocated(memory: BoxMemory, boxes: Sequence[Box]) -> dict[str, torch.Tensor]:
    try:
        return memory.allocate_boxes(boxes)
    except ValueError as error:
        raise LayoutMismatch(str(error)) from None
