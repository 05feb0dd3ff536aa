"""Builders of forks, instances and models for tests of the commands."""

from __future__ import annotations

from rfork.schema import (
    ChunkAssignment,
    CrossLayoutResult,
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
)

SEED, RELAY, TARGET = "a" * 32, "b" * 32, "c" * 32
SNAPSHOT = "snapshot:s3://models/llama/"
GB = 10**9
KEY = "main-tp0of1-pp0of1-ep0of1"


def finished_fork(
    *,
    seconds: float = 4.0,
    phases: dict[str, float] | None = None,
    link: float | None = 1e9,
    sources: dict[str, int] | None = None,
    source_rate_limits: dict[str, int] | None = None,
    reasons: tuple[str, ...] = (),
    replans: int = 0,
    repeated: int = 0,
    outcome: Outcome = "forked",
    fallback: str | None = None,
    transports: dict[str, str] | None = None,
    rates: dict[str, float] | None = None,
    age_s: float = 10.0,
    fork_id: str = "f1",
    instance_id: str = TARGET,
    reason: str = "",
    version: str | None = None,
    cross_layout: CrossLayoutResult | None = None,
) -> ForkInfo:
    """Return a finished fork of 4 GB; by default it took 4 s over a link of 1 GB/s."""
    bytes_by_source = {SEED: 4 * GB} if sources is None else sources
    finish = ForkResult(
        outcome=outcome,
        seconds=seconds,
        bytes_read=sum(bytes_by_source.values()) + repeated,
        sources=bytes_by_source,
        fallback=fallback,
        cross_layout=cross_layout,
        reasons=reasons,
        bytes_repeated=repeated,
        replans=replans,
        link_bytes_per_s=link,
        source_bytes_per_s=rates or {},
        transports={SEED: "http"} if transports is None else transports,
        phases={"capture": 0.1, "plan": 0.1, "transfer": seconds - 0.2} if phases is None else phases,
    )
    state: ForkState = "finished" if outcome in ("forked", "fallback") else "failed"
    return ForkInfo(
        fork_id=fork_id, instance_id=instance_id, model="llama", rank=Rank(), state=state, finish=finish,
        source_rate_limits=source_rate_limits or {}, age_s=age_s, chunk_count=4, image_bytes=4 * GB, reason=reason,
        version=version,
    )  # fmt: skip


def running_fork(
    *,
    verified: tuple[tuple[int, int], ...] = ((0, 2),),
    bytes_per_s: float = 1e9,
    plan: tuple[ChunkAssignment, ...] = (ChunkAssignment(source_id=SEED, chunks=((0, 4),)),),
    source_rate_limits: dict[str, int] | None = None,
    sources: dict[str, int] | None = None,
    rates: dict[str, float] | None = None,
    age_s: float = 2.0,
    fork_id: str = "f2",
    instance_id: str = TARGET,
    reason: str = "",
    version: str | None = None,
) -> ForkInfo:
    """Return a half-finished fork of 4 GB."""
    progress = ForkProgress(
        verified=verified, bytes_read=2 * GB, bytes_per_s=bytes_per_s, sources=sources or {SEED: 2 * GB},
        source_bytes_per_s={SEED: bytes_per_s} if rates is None else rates,
        transports={SEED: "http"}, phases={"capture": 0.1, "plan": 0.1, "transfer": 1.8},
        link_bytes_per_s=1e9,
    )  # fmt: skip
    return ForkInfo(
        fork_id=fork_id, instance_id=instance_id, model="llama", rank=Rank(),
        state="running" if plan else "planning", plan=plan, progress=progress if plan else None,
        source_rate_limits=source_rate_limits or {}, age_s=age_s, chunk_count=4, image_bytes=4 * GB, reason=reason,
        version=version,
    )  # fmt: skip


def instance(
    instance_id: str = SEED,
    *,
    state: InstanceState = "serving",
    host: str = "node-0",
    readers: tuple[str, ...] = (),
    egress_rate: int | None = None,
    quarantined: str | None = None,
    age_s: float = 1.0,
    version: str | None = None,
) -> InstanceInfo:
    """Return an instance with all 4 chunks."""
    report = InstanceReport(
        instance_id=instance_id, model="llama", layout_id="0" * 32, image_bytes=4 * GB, chunk_count=4,
        state=state, verified=((0, 4),), address="a:1", placement=Placement(host=host), readers=readers,
        egress_rate=egress_rate,
    )  # fmt: skip
    return InstanceInfo(report=report, version=version, age_s=age_s, quarantined=quarantined)


def model(
    name: str = "llama",
    *,
    fork_s: float | None = None,
    storage_s: float | None = None,
    running: int = 0,
    seeds: int = 1,
    version: str | None = None,
) -> ModelInfo:
    """Return a row of `/v1/models`."""
    return ModelInfo(
        model=name, rank_key=KEY, layout_id="0" * 32, weights_id="1" * 32, image_bytes=4 * GB, seeds=seeds,
        version=version, relays=0, forks_running=running, fork_s=fork_s, storage_s=storage_s,
    )  # fmt: skip
