"""A planner in memory, as hooks see it, and the instances and forks that it is told of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from planner.hooks.fleet import PlannerAway
from planner.hooks.kubernetes.cluster import PodSeen
from rfork.fields import ForkState, InstanceState, Outcome
from rfork.wire import (
    ForkFinish,
    ForkProgress,
    ForkView,
    InstanceReport,
    InstanceView,
    ModelView,
    Placement,
    Rank,
    ScaleUp,
    ScaleUpView,
    Share,
)
from tests.unit.clock import Clock
from tests.unit.hooks.kubernetes.fake_cluster import MODEL

LAYOUT: Final = "a" * 32
WEIGHTS: Final = "1" * 32
CHUNKS: Final = 100
IMAGE_BYTES: Final = 15_200_000_000
WHOLE: Final = ((0, CHUNKS),)


def instance_id(uid: str, rank: Rank | None = None, start: str = "00") -> str:
    """As an instance names itself whose RFORK_REPLICA is the Pod's UID."""
    rank = rank or Rank()
    return f"{uid}-{rank.key}-dp{rank.dp}-{start}"


def instance(
    uid: str,
    state: InstanceState = "serving",
    *,
    chunks: int = CHUNKS,
    rank: Rank | None = None,
    start: str = "00",
    age_s: float = 1.0,
    quarantined: str | None = None,
    version: str | None = None,
    **changes: object,
) -> InstanceView:
    """One rank of a Pod; whole and serving."""
    report = InstanceReport(
        instance_id=instance_id(uid, rank, start),
        model=MODEL,
        rank=rank or Rank(),
        layout_id=LAYOUT,
        weights_id=WEIGHTS,
        image_bytes=IMAGE_BYTES,
        chunk_count=CHUNKS,
        state=state,
        verified=((0, chunks),) if chunks else (),
        address="10.0.0.1:1",
        transports=("http",),
        placement=Placement(host="node-1", pod=f"default/of-{uid[:8]}"),
    ).model_copy(update=changes)
    return InstanceView(report=report, version=version, age_s=age_s, quarantined=quarantined)


def fork(
    uid: str,
    outcome: Outcome | None = None,
    *,
    chunks: int = 0,
    rank: Rank | None = None,
    start: str = "00",
    age_s: float = 5.0,
    seconds: float = 3.1,
    sources: Mapping[str, int] | None = None,
    fallback: str | None = None,
    reasons: tuple[str, ...] = (),
    plan: tuple[str, ...] = (),
    reason: str = "",
    version: str | None = None,
) -> ForkView:
    """The fork of one rank of a Pod: under way, or ended as `outcome` says. `plan`: whom it reads from."""
    finish = None
    state: ForkState = "running" if plan or chunks else "planning"
    if outcome is not None:
        state = "finished" if outcome in ("forked", "fallback") else "failed"
        finish = ForkFinish(
            outcome=outcome, seconds=seconds, bytes_read=IMAGE_BYTES, sources=dict(sources or {}),
            fallback=fallback, reasons=reasons,
        )  # fmt: skip
    progress = ForkProgress(verified=((0, chunks),) if chunks else (), bytes_read=0, bytes_per_s=0.0)
    return ForkView(
        fork_id=f"fork-{instance_id(uid, rank, start)}",
        instance_id=instance_id(uid, rank, start),
        model=MODEL,
        version=version,
        rank=rank or Rank(),
        state=state,
        plan=tuple(Share(source_id=source, chunks=WHOLE) for source in plan),
        reason=reason,
        progress=progress,
        finish=finish,
        age_s=age_s,
        chunk_count=CHUNKS,
        image_bytes=IMAGE_BYTES,
    )


def announced(scaleup: ScaleUp, *, seeds: int = 2) -> ScaleUpView:
    """A scale-up as the planner lists it."""
    return ScaleUpView(
        scaleup=scaleup, arrived=0, expires_in_s=scaleup.expires_in_s, seeds=seeds, image_bytes=IMAGE_BYTES,
        reason=f"they fork from {seeds} seeds",
    )  # fmt: skip


@dataclass
class FakeFleet:
    """See `Fleet`. Instances live until they are removed; what is asked for and changed is in `calls`."""

    clock: Clock
    away: bool = False
    views: dict[str, InstanceView] = field(default_factory=dict)
    fork_views: dict[str, ForkView] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    """When each fork did."""
    scaleup_views: dict[str, ScaleUpView] = field(default_factory=dict)
    before: dict[str, set[str]] = field(default_factory=dict)
    """Who had asked when each scale-up was announced."""
    calls: list[str] = field(default_factory=list)
    """``announce ID NUMBER``, ``withdraw ID``, ``remove ID``."""
    looks: int = 0
    seeds: int = 2

    # -- what happens in it ------------------------------------------------------------------------

    def asks(self, pod: PodSeen, *plan: PodSeen, start: str = "00") -> None:
        """The Pod's one rank asks for its fork, and reads from these Pods."""
        self.has(instance(pod.uid, "loading", chunks=0, start=start))
        self.began[f"fork-{instance_id(pod.uid, None, start)}"] = self.clock.now
        self.runs(fork(pod.uid, plan=tuple(instance_id(one.uid) for one in plan), start=start))

    def receives(self, pod: PodSeen, chunks: int, *plan: PodSeen) -> None:
        """So many chunks are there."""
        self.runs(fork(pod.uid, chunks=chunks, plan=tuple(instance_id(one.uid) for one in plan)))

    def forked(self, pod: PodSeen, *sources: PodSeen) -> None:
        """Its fork ends well, with as much from each of these Pods; it serves at once."""
        given = {instance_id(one.uid): IMAGE_BYTES // len(sources) for one in sources}
        seconds = self.clock.now - self.began[f"fork-{instance_id(pod.uid)}"]
        self.runs(fork(pod.uid, "forked", sources=given, seconds=seconds))
        self.serves(pod)

    def serves(self, pod: PodSeen) -> None:
        """It is a seed."""
        self.has(instance(pod.uid))

    def has(self, view: InstanceView) -> None:
        """An instance is as this says."""
        self.views[view.report.instance_id] = view

    def runs(self, view: ForkView) -> None:
        """A fork is as this says."""
        self.fork_views[view.fork_id] = view
        self.began.setdefault(view.fork_id, self.clock.now - view.age_s)

    def restart(self) -> None:
        """It forgets everything; instances report themselves again, if the test has them do so."""
        for table in (self.views, self.fork_views, self.began, self.scaleup_views):
            table.clear()

    # -- as Fleet ----------------------------------------------------------------------------------

    async def instances(self, *, model: str | None = None) -> tuple[InstanceView, ...]:
        self._answers()
        self.looks += 1
        return tuple(self.views.values())

    async def forks(self) -> tuple[ForkView, ...]:
        self._answers()
        return tuple(
            view.model_copy(update={"age_s": self.clock.now - self.began[view.fork_id]})
            for view in self.fork_views.values()
        )

    async def models(self) -> tuple[ModelView, ...]:
        self._answers()
        return ()

    async def scaleups(self) -> tuple[ScaleUpView, ...]:
        self._answers()
        return tuple(
            view.model_copy(
                update={"arrived": min(view.scaleup.replicas, len(self._came() - self.before[uid]))}
            )
            for uid, view in self.scaleup_views.items()
        )

    async def announce(self, scaleup: ScaleUp) -> ScaleUpView:
        self._answers()
        self.calls.append(f"announce {scaleup.scaleup_id} {scaleup.replicas}")
        self.before[scaleup.scaleup_id] = self._came()
        self.scaleup_views[scaleup.scaleup_id] = announced(scaleup, seeds=self.seeds)
        return self.scaleup_views[scaleup.scaleup_id]

    async def withdraw(self, scaleup_id: str) -> None:
        self._answers()
        self.calls.append(f"withdraw {scaleup_id}")
        self.scaleup_views.pop(scaleup_id, None)

    async def remove(self, instance_id: str) -> None:
        self._answers()
        self.calls.append(f"remove {instance_id}")
        self.views.pop(instance_id, None)

    async def close(self) -> None:
        pass

    def _came(self) -> set[str]:
        """UIDs of the Pods that have asked for their forks."""
        return {view.instance_id[:36] for view in self.fork_views.values()}

    def _answers(self) -> None:
        if self.away:
            raise PlannerAway("GET /v1/instances: no answer")
