"""A planner in memory, and its instances and forks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.planner_api import PlannerUnavailable
from rfork.schema import (
    ChunkAssignment,
    ForkInfo,
    ForkProgress,
    ForkResult,
    ForkState,
    InstanceInfo,
    InstanceReport,
    InstanceState,
    ModelInfo,
    Outcome,
    Placement,
    Rank,
    ScaleUp,
    ScaleUpInfo,
)
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.kubernetes.fake_cluster import MODEL

LAYOUT: Final = "a" * 32
WEIGHTS: Final = "1" * 32
CHUNKS: Final = 100
IMAGE_BYTES: Final = 15_200_000_000
ALL_CHUNKS: Final = ((0, CHUNKS),)


def instance_id(uid: str, rank: Rank | None = None, start: str = "00") -> str:
    """Return the id of an instance whose RFORK_REPLICA is the Pod's UID."""
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
) -> InstanceInfo:
    """Return one rank of a Pod; by default complete and serving."""
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
    return InstanceInfo(report=report, version=version, age_s=age_s, quarantined=quarantined)


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
) -> ForkInfo:
    """Return the fork of one rank of a Pod: active, or finished with `outcome`. `plan`: its sources."""
    finish = None
    state: ForkState = "running" if plan or chunks else "planning"
    if outcome is not None:
        state = "finished" if outcome in ("forked", "fallback") else "failed"
        finish = ForkResult(
            outcome=outcome, seconds=seconds, bytes_read=IMAGE_BYTES, sources=dict(sources or {}),
            fallback=fallback, reasons=reasons,
        )  # fmt: skip
    progress = ForkProgress(verified=((0, chunks),) if chunks else (), bytes_read=0, bytes_per_s=0.0)
    return ForkInfo(
        fork_id=f"fork-{instance_id(uid, rank, start)}",
        instance_id=instance_id(uid, rank, start),
        model=MODEL,
        version=version,
        rank=rank or Rank(),
        state=state,
        plan=tuple(ChunkAssignment(source_id=source, chunks=ALL_CHUNKS) for source in plan),
        reason=reason,
        progress=progress,
        finish=finish,
        age_s=age_s,
        chunk_count=CHUNKS,
        image_bytes=IMAGE_BYTES,
    )


def scaleup_view(scaleup: ScaleUp, *, seeds: int = 2) -> ScaleUpInfo:
    """Return a scale-up as the planner lists it."""
    return ScaleUpInfo(
        scaleup=scaleup, arrived_count=0, expires_in_s=scaleup.expires_in_s, seeds=seeds, image_bytes=IMAGE_BYTES,
        reason=f"they fork from {seeds} seeds",
    )  # fmt: skip


@dataclass
class FakePlannerApi:
    """Implements `PlannerApi`. Instances stay until they are removed; `calls` has all changes."""

    clock: FakeClock
    unavailable: bool = False
    views: dict[str, InstanceInfo] = field(default_factory=dict)
    fork_views: dict[str, ForkInfo] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)
    """Start time of each fork."""
    scaleup_views: dict[str, ScaleUpInfo] = field(default_factory=dict)
    arrived_before: dict[str, set[str]] = field(default_factory=dict)
    """Pods that had arrived when each scale-up was announced."""
    calls: list[str] = field(default_factory=list)
    """``announce ID NUMBER``, ``withdraw ID``, ``remove ID``."""
    poll_count: int = 0
    seeds: int = 2

    # -- changes of the fleet ----------------------------------------------------------------------

    def request_fork(self, pod: ObservedPod, *plan: ObservedPod, start: str = "00") -> None:
        """Start a fork of the Pod's only rank, from these Pods."""
        self.put_instance(instance(pod.uid, "loading", chunks=0, start=start))
        self.started_at[f"fork-{instance_id(pod.uid, None, start)}"] = self.clock.now
        self.put_fork(fork(pod.uid, plan=tuple(instance_id(one.uid) for one in plan), start=start))

    def receive_chunks(self, pod: ObservedPod, chunks: int, *plan: ObservedPod) -> None:
        """Set the number of received chunks."""
        self.put_fork(fork(pod.uid, chunks=chunks, plan=tuple(instance_id(one.uid) for one in plan)))

    def finish_fork(self, pod: ObservedPod, *sources: ObservedPod) -> None:
        """Finish its fork successfully, with equal shares from these Pods; it serves immediately."""
        served_bytes = {instance_id(one.uid): IMAGE_BYTES // len(sources) for one in sources}
        seconds = self.clock.now - self.started_at[f"fork-{instance_id(pod.uid)}"]
        self.put_fork(fork(pod.uid, "forked", sources=served_bytes, seconds=seconds))
        self.become_seed(pod)

    def become_seed(self, pod: ObservedPod) -> None:
        """Make it a seed."""
        self.put_instance(instance(pod.uid))

    def put_instance(self, view: InstanceInfo) -> None:
        """Replace an instance."""
        self.views[view.report.instance_id] = view

    def put_fork(self, view: ForkInfo) -> None:
        """Replace a fork."""
        self.fork_views[view.fork_id] = view
        self.started_at.setdefault(view.fork_id, self.clock.now - view.age_s)

    def restart(self) -> None:
        """Forget everything; instances register again if the test lets them."""
        for table in (self.views, self.fork_views, self.started_at, self.scaleup_views):
            table.clear()

    # -- implementation of PlannerApi --------------------------------------------------------------

    async def instances(self, *, model: str | None = None) -> tuple[InstanceInfo, ...]:
        self._check_available()
        self.poll_count += 1
        return tuple(self.views.values())

    async def forks(self) -> tuple[ForkInfo, ...]:
        self._check_available()
        return tuple(
            view.model_copy(update={"age_s": self.clock.now - self.started_at[view.fork_id]})
            for view in self.fork_views.values()
        )

    async def models(self) -> tuple[ModelInfo, ...]:
        self._check_available()
        return ()

    async def scaleups(self) -> tuple[ScaleUpInfo, ...]:
        self._check_available()
        return tuple(
            view.model_copy(
                update={
                    "arrived_count": min(view.scaleup.replicas, len(self._arrived_pods() - self.arrived_before[uid]))
                }
            )
            for uid, view in self.scaleup_views.items()
        )

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        self._check_available()
        self.calls.append(f"announce {scaleup.scaleup_id} {scaleup.replicas}")
        self.arrived_before[scaleup.scaleup_id] = self._arrived_pods()
        self.scaleup_views[scaleup.scaleup_id] = scaleup_view(scaleup, seeds=self.seeds)
        return self.scaleup_views[scaleup.scaleup_id]

    async def withdraw(self, scaleup_id: str) -> None:
        self._check_available()
        self.calls.append(f"withdraw {scaleup_id}")
        self.scaleup_views.pop(scaleup_id, None)

    async def remove(self, instance_id: str) -> None:
        self._check_available()
        self.calls.append(f"remove {instance_id}")
        self.views.pop(instance_id, None)

    async def close(self) -> None:
        pass

    def _arrived_pods(self) -> set[str]:
        """UIDs of the Pods that have requested their forks."""
        return {view.instance_id[:36] for view in self.fork_views.values()}

    def _check_available(self) -> None:
        if self.unavailable:
            raise PlannerUnavailable("GET /v1/instances: no response")
