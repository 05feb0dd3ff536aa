"""Simulates fleets through the planner's REST interface, for the tests and screenshots of its page.

Their instances do not exist: they report, request forks, report progress and finish, and the planner accepts
it.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final

import httpx
from typing_extensions import Self

from rfork.planner_client.client import PlannerClient
from rfork.schema import (
    ForkProgress,
    ForkRequest,
    ForkResult,
    InstanceReport,
    Placement,
    Plan,
    Rank,
    ScaleUp,
    SourceFault,
    StorageCandidate,
)

LLAMA: Final = "meta-llama/Llama-3.1-8B-Instruct"
QWEN: Final = "Qwen/Qwen3-32B"
MISTRAL: Final = "mistralai/Mistral-Small-3.2-24B"
IMAGE_BYTES: Final = {LLAMA: 16_060_522_496, QWEN: 32_763_871_232, MISTRAL: 47_144_806_400}
CHUNKS: Final = 120
CHECKPOINT: Final = "file:///models/checkpoint"
GB: Final = 1e9
TIMEOUT_S: Final = 30.0
"""Timeout of each planner request on a busy machine."""


class FleetPlayer:
    """All instances of a fleet in one object. Close it, or use it in a `with` block."""

    def __init__(self, url: str, token: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._planner = PlannerClient(url, token=token, timeout_s=TIMEOUT_S)
        self._http = httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=TIMEOUT_S)
        self.reports: dict[str, InstanceReport] = {}
        self._last_progress: dict[str, ForkProgress] = {}
        self._progress_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reporting."""
        self._planner.close()
        self._http.close()

    # -- instances ------------------------------------------------------------------------------------------

    def seed(self, instance_id: str, host: str, **changes: object) -> None:
        """Report a complete instance."""
        self.report(instance_id, host, state="serving", verified=((0, CHUNKS),), **changes)

    def report(self, instance_id: str, host: str, **changes: object) -> InstanceReport:
        """Send a heartbeat: the previous one with `changes`."""
        model = str(changes.get("model", LLAMA))
        version = str(changes.get("version", f"files:{_digest('files', model)}"))
        rack = host.split("-")[0] if "-" in host else None
        values: dict[str, object] = {
            "instance_id": instance_id,
            "model": model,
            "version": version,
            "layout_id": _digest("layout", model),
            "weights_id": _digest("weights", version) if changes.get("verified") else None,
            "image_bytes": IMAGE_BYTES.get(model, 1 << 30),
            "chunk_count": CHUNKS,
            "state": "loading",
            "address": f"{host}:41234",
            "transports": ("http",),
            "placement": Placement(host=host, rack=rack, zone="west" if rack else None),
            "max_readers": 2,
            "storage": (StorageCandidate(kind="checkpoint", uri=CHECKPOINT, origin="d" * 32),),
        }
        before = self.reports.get(instance_id)
        if before is not None:
            values = dict(before)
        report = InstanceReport.model_validate(values | changes)
        self.reports[instance_id] = report
        self._planner.report(report)
        return report

    def resend_heartbeats(self, instance_ids: Iterable[str] | None = None) -> None:
        """Send the last heartbeat of all instances (or those named) again."""
        for instance_id in self.reports if instance_ids is None else instance_ids:
            self._planner.report(self.reports[instance_id])

    def drain(self, instance_id: str) -> None:
        """Drain an instance: it gets no new readers."""
        self._http.post(f"/v1/instances/{instance_id}/drain", params={"force": True}).raise_for_status()

    def announce(self, model: str, replicas: int, by: str) -> None:
        """Announce a scale-up."""
        scaleup = ScaleUp(scaleup_id=f"up-{len(model)}", model=model, replicas=replicas, announced_by=by)
        self._http.post("/v1/scaleups", json=scaleup.model_dump(mode="json")).raise_for_status()

    # -- forks ----------------------------------------------------------------------------------------------

    def request_fork(
        self, instance_id: str, host: str, *, faults: Sequence[SourceFault] = (), **changes: object
    ) -> Plan:
        """Request the fork `fork-INSTANCE` for a new instance."""
        if instance_id not in self.reports:
            self.report(instance_id, host, **changes)
        report = self.reports[instance_id]
        request = ForkRequest(fork_id=f"fork-{instance_id}", instance=report, faults=tuple(faults))
        return self._planner.request_plan(request)

    def progress(
        self,
        instance_id: str,
        chunks: int,
        rate: float,
        plan: Plan,
        *,
        seconds: float = 1.0,
        rates: dict[str, float] | None = None,
    ) -> None:
        """Report progress: `chunks` verified, and `rate` bytes a second along its plan.

        `rates` divides the rate among sources; by default all have the same share.
        """
        report = self.reports[instance_id]
        bytes_received = report.image_bytes * chunks // CHUNKS
        same = {name: float(part) for name, part in _sources(plan, int(rate)).items()}
        self.reports[instance_id] = report.model_copy(update={"verified": ((0, chunks),) if chunks else ()})
        progress = ForkProgress(
            verified=((0, chunks),) if chunks else (),
            bytes_read=bytes_received,
            bytes_per_s=rate,
            sources=_sources(plan, bytes_received),
            source_bytes_per_s=same if rates is None else rates,
            transports={route.source_id: "http" for route in plan.routes},
            link_bytes_per_s=max(rate, 1.2 * GB),
            phases={"capture": 0.1, "offer": 0.05, "plan": 0.1, "transfer": seconds},
        )
        with self._progress_lock:
            self._planner.progress(f"fork-{instance_id}", progress)
            self._last_progress[instance_id] = progress

    def resend_progress(self) -> None:
        """Send the last progress of each running fork again; on any thread."""
        with self._progress_lock:
            for instance_id, progress in self._last_progress.items():
                self._planner.progress(f"fork-{instance_id}", progress)

    def end(self, instance_id: str, plan: Plan, seconds: float, **changes: object) -> None:
        """Finish a fork: complete unless `changes` differ; a complete instance serves afterwards."""
        report = self.reports[instance_id]
        outcome = str(changes.get("outcome", "forked"))
        waits = seconds * (0.8 if outcome == "fallback" else 0.04)
        phases = {"capture": 0.02 * seconds, "offer": 0.01 * seconds, "plan": 0.01 * seconds}
        phases["transfer"] = seconds - waits - sum(phases.values())
        phases["fallback" if outcome == "fallback" else "digest"] = waits
        values: dict[str, object] = {
            "outcome": outcome,
            "seconds": seconds,
            "bytes_read": report.image_bytes,
            "sources": _sources(plan, report.image_bytes) if outcome == "forked" else {},
            "efficiency": 0.92 if outcome == "forked" else None,
            "phases": phases,
        }
        finish = ForkResult.model_validate(values | changes)
        with self._progress_lock:
            self._last_progress.pop(instance_id, None)
            self._planner.finish(f"fork-{instance_id}", finish)
        if outcome in ("forked", "fallback"):
            weights = _digest("weights", report.version or report.model)
            self.report(
                instance_id, report.placement.host, model=report.model, state="serving",
                verified=((0, CHUNKS),), weights_id=weights,
            )  # fmt: skip


def _digest(what: str, model: str) -> str:
    return hashlib.sha256(f"{what} {model}".encode()).hexdigest()[:32]


def _sources(plan: Plan, bytes_received: int) -> dict[str, int]:
    names = [route.source_id for route in plan.routes]
    names += [f"{read.kind}:{read.uri}" for read in plan.storage]
    return {name: bytes_received // len(names) for name in names} if names else {}


# -- fleets ---------------------------------------------------------------------------------------------


def identity(replica: str, tp: int = 0, tp_size: int = 1) -> str:
    """Return an instance id as chosen by a replica with a name."""
    tail = hashlib.sha256(f"{replica} {tp}".encode()).hexdigest()[:8]
    return f"{replica}-{Rank(tp=tp, tp_size=tp_size).key}-dp0-{tail}"


def llama(index: int) -> str:
    """Return the instance of one Llama replica."""
    return identity(f"llama-7c9f-{index:02}")


def play_busy_fleet(fleet: FleetPlayer) -> None:
    """Play three models: one is scaled up, one starts cold from its checkpoint; nothing fails."""
    draw = random.Random(4)
    cold = fleet.request_fork(llama(0), "a1-n1")
    fleet.end(llama(0), cold, 38.4, efficiency=None)
    for index in range(1, 4):
        plan = fleet.request_fork(llama(index), f"a{1 + index % 3}-n{1 + index}")
        fleet.end(llama(index), plan, 8.9 + draw.random() * 2, efficiency=0.86 + draw.random() * 0.1)
    fleet.announce(LLAMA, 10, "deployment/inference/llama")
    plans = {index: fleet.request_fork(llama(index), f"a{1 + index % 3}-n{7 + index}") for index in range(4, 12)}
    # The last of each chain first: no instance should appear to fall behind its source at any time.
    for index, plan in reversed(plans.items()):
        fleet.progress(llama(index), 116 - 6 * index, (1.31 - 0.02 * index) * GB, plan, seconds=2.4)
    fleet.report(llama(2), "a3-n3", egress_rate=int(1.6 * GB))
    for tp in range(2):
        rank = Rank(tp=tp, tp_size=2)
        for index in range(3):
            fleet.seed(identity(f"qwen-{index}", tp, 2), f"b1-n{1 + index}", model=QWEN, rank=rank)
        name = identity("qwen-3", tp, 2)
        plan = fleet.request_fork(name, "b2-n4", model=QWEN, rank=rank)
        fleet.progress(name, 71 + tp, 2.2 * GB, plan, seconds=2.0)
    names = [hashlib.sha256(f"mistral {index}".encode()).hexdigest()[:32] for index in range(3)]
    colds = [fleet.request_fork(name, f"b2-n{index}", model=MISTRAL) for index, name in enumerate(names)]
    for index, name in reversed([*enumerate(names)]):
        fleet.progress(name, 31 - 3 * index, (0.9 - 0.02 * index) * GB, colds[index], seconds=2.0)


def play_rollout(fleet: FleetPlayer, old: int = 6, forking: int = 3) -> tuple[str, str]:
    """Play a rollout: the first instance of a new version has loaded its files, and others fork from it.

    Instances of the old version keep serving. Returns both versions, the old one first.
    """
    before, after = f"files:{_digest('files', LLAMA)}", f"files:{_digest('files of today', LLAMA)}"
    for index in range(old):
        fleet.seed(identity(f"llama-5d8b-{index:02}"), f"a1-n{index}", version=before)
    names = [identity(f"llama-7c9f-{index:02}") for index in range(1 + forking)]
    cold = fleet.request_fork(names[0], "a2-n0", version=after)
    fleet.end(names[0], cold, 38.4, efficiency=None)
    plans = [fleet.request_fork(name, f"a2-n{index}", version=after) for index, name in enumerate(names[1:], 1)]
    for index, name in reversed([*enumerate(names[1:])]):
        fleet.progress(name, 96 - 9 * index, (1.31 - 0.02 * index) * GB, plans[index], seconds=2.0)
    return before, after


def play_unhealthy_fleet(fleet: FleetPlayer) -> None:
    """Play a fleet with almost every kind of problem."""
    play_busy_fleet(fleet)
    # One source sends wrong bytes, and its readers on two hosts report it.
    plan = fleet.request_fork(llama(20), "a4-n1")
    accused = plan.routes[0].source_id
    detail = "chunk 41 does not match its digest in the manifest"
    wrong = SourceFault(instance_id=accused, fault="source", error="ChunkMismatch", detail=detail)
    plan = fleet.request_fork(llama(20), "a4-n1", faults=[wrong])
    # The reported source has no reader now, and is the nearest source of this one.
    second = fleet.request_fork(llama(30), "a1-n20")
    if accused not in [route.source_id for route in second.routes]:
        raise AssertionError(f"no second reader of {accused}: {second.reason}")
    fleet.request_fork(llama(30), "a1-n20", faults=[wrong])
    fleet.progress(llama(20), 36, 0.31 * GB, plan)
    # One instance was killed, and one reader did not reach it.
    plan = fleet.request_fork(llama(21), "a4-n2")
    fault = SourceFault(instance_id=plan.routes[0].source_id, fault="network", error="SourceUnavailable")
    fleet.request_fork(llama(21), "a4-n2", faults=[fault])
    for index, reason in enumerate(
        (
            "SourceTimeout: llama-7c9f-02 sent nothing for 5 s",
            "SourceTimeout: llama-7c9f-03 sent nothing for 5 s",
            "DeadlineExceeded: 84 of 120 chunks after 60 s",
        )
    ):
        plan = fleet.request_fork(llama(30 + index), f"a4-n{5 + index}")
        fallback = {"outcome": "fallback", "fallback": f"checkpoint:{CHECKPOINT}", "reasons": (reason,)}
        fleet.end(llama(30 + index), plan, 61.0 + 7 * index, **fallback)
    plan = fleet.request_fork(llama(40), "a4-n9")
    why = ("OutOfMemory: 16.1 GB required, 9.8 GB free on cuda:0",)
    fleet.end(llama(40), plan, 2.2, outcome="failed", reasons=why)
    for index in range(3):
        fleet.drain(identity(f"qwen-{index}", 0, 2))
    # No instance has this model, and those that request it have no storage to read.
    for index in range(2):
        fleet.request_fork(identity(f"gemma-{index}"), f"b3-n{index}", model="google/gemma-3-27b", storage=())


def play_large_fleet(fleet: FleetPlayer, count: int = 1000, forking: int = 150) -> dict[str, Plan]:
    """Play `count` instances of three models on hosts of four, some forking; return their plans by instance."""
    plans: dict[str, Plan] = {}
    for index in range(count):
        host = f"r{1 + index // 40:02}-n{1 + index // 4 % 10:02}"
        if index % 100 == 0:
            plan = fleet.request_fork(identity(f"llama-{index:04}"), host)
            fleet.end(identity(f"llama-{index:04}"), plan, 9.0 + index / 500 if index else 38.4)
        elif index % 5 == 0 and len(plans) < forking:
            plans[identity(f"llama-{index:04}")] = fleet.request_fork(
                identity(f"llama-{index:04}"), host, storage=(), max_readers=4
            )
        else:
            model, short = ((QWEN, "qwen"), (MISTRAL, "mistral"))[index % 2]
            fleet.seed(identity(f"{short}-{index:04}"), host, model=model)
    return plans


def advance_forks(fleet: FleetPlayer, plans: dict[str, Plan], step: int, draw: random.Random) -> None:
    """Report progress of every fork of `play_large_fleet`: less with more distance from a seed."""
    depths: dict[str, int] = {}
    for name, plan in plans.items():
        depths[name] = 1 + max((depths.get(route.source_id, 0) for route in plan.routes), default=0)
    for name, plan in reversed(plans.items()):
        chunks = max(0, min(CHUNKS - 1, 110 + step - 3 * depths[name]))
        fleet.progress(name, chunks, (1.1 + 0.1 * draw.random()) * GB, plan, seconds=float(step))
