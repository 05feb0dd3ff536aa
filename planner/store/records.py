"""What the planner keeps of an instance and of a fork; each change makes a new record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from planner.fleet import Place, Source
from rfork.image.ranges import normalise
from rfork.wire import (
    ForkFinish,
    ForkProgress,
    ForkState,
    ForkView,
    InstanceReport,
    InstanceView,
    Plan,
    Rank,
)

GroupKey = tuple[str, str]
"""Model and rank key."""


@dataclass(frozen=True)
class InstanceRecord:
    """An instance as it last reported itself, and what others said of it. Times are monotonic seconds."""

    report: InstanceReport
    seen_at: float
    forget_s: float
    drained: bool = False
    """Drained through the planner; its own reports do not undo that."""
    quarantined_until: float = 0.0
    quarantine: str = ""
    missing: bool = False
    """A reader found it gone, and nothing has been heard of it since."""

    @property
    def group(self) -> GroupKey:
        """What it may share weights with."""
        return self.report.model, self.report.rank.key

    @property
    def expires_at(self) -> float:
        """When it is forgotten."""
        return self.seen_at + self.forget_s

    @cached_property
    def source(self) -> Source:
        """The instance as the policy sees it."""
        report = self.report
        return Source(
            instance_id=report.instance_id,
            address=report.address,
            layout_id=report.layout_id,
            weights_id=report.weights_id,
            generation=report.generation,
            chunk_count=report.chunk_count,
            state="draining" if self.drained else report.state,
            verified=normalise(report.verified),
            transports=report.transports,
            place=Place(report.placement.host, report.placement.rack, report.placement.zone),
            max_readers=report.max_readers,
            expires_at=self.expires_at,
            quarantined_until=self.quarantined_until,
            quarantine=self.quarantine,
        )

    def view(self, now: float) -> InstanceView:
        """The instance as it is listed."""
        return InstanceView(
            report=self.report.model_copy(update={"state": self.source.state}),
            age_s=max(0.0, now - self.seen_at),
            quarantined=self.quarantine if now < self.quarantined_until else None,
        )


@dataclass(frozen=True)
class Blame:
    """Why a fork is not sent to an instance again, for a while."""

    why: str
    until: float
    generation: int | None = None
    """Set where only this generation of the source's weights is to be avoided."""

    def holds(self, now: float, generation: int) -> bool:
        """Whether a source with this generation is still to be avoided."""
        return now < self.until and self.generation in (None, generation)


@dataclass(frozen=True)
class ForkRecord:
    """One fork, from its first request to some time after its end. Times are monotonic seconds."""

    fork_id: str
    instance_id: str
    model: str
    rank: Rank
    chunk_count: int
    image_bytes: int
    plan: Plan
    asked_at: float
    seen_at: float
    progress: ForkProgress | None = None
    finish: ForkFinish | None = None
    lost: bool = False
    """Given up by the planner, not ended by the target: it may ask again."""
    blames: Mapping[str, Blame] = field(default_factory=dict)
    read_from: frozenset[str] = frozenset()
    """Every instance that any of its plans named."""

    @property
    def group(self) -> GroupKey:
        """What it may share weights with."""
        return self.model, self.rank.key

    @property
    def live(self) -> bool:
        """Whether it is under way."""
        return self.finish is None

    @property
    def state(self) -> ForkState:
        """The fork's state, in the word that is listed."""
        if self.finish is not None:
            return "finished" if self.finish.outcome in ("forked", "fallback") else "failed"
        return "running" if self.plan.routes else "planning"

    @property
    def sources(self) -> tuple[str, ...]:
        """The instances it reads from now; none once it has ended."""
        return tuple(route.source_id for route in self.plan.routes) if self.live else ()

    def view(self, now: float) -> ForkView:
        """The fork as it is listed."""
        return ForkView(
            fork_id=self.fork_id,
            instance_id=self.instance_id,
            model=self.model,
            rank=self.rank,
            state=self.state,
            plan=tuple((route.source_id, route.chunks) for route in self.plan.routes),
            progress=self.progress,
            finish=self.finish,
            age_s=max(0.0, now - self.asked_at),
            chunk_count=self.chunk_count,
            image_bytes=self.image_bytes,
        )
