"""Example bodies and responses for the OpenAPI page; the bodies can be sent as they are, in order."""

from __future__ import annotations

from typing import Final

from rfork.schema import (
    ChunkAssignment,
    ExitCheck,
    ForkEvent,
    ForkInfo,
    ForkPage,
    ForkProgress,
    ForkRequest,
    ForkResult,
    HeldImage,
    HolderAck,
    HolderInfo,
    HolderPage,
    HolderReport,
    ImageSelector,
    InstanceAck,
    InstanceInfo,
    InstancePage,
    InstanceReport,
    Lease,
    ModelInfo,
    Placement,
    Plan,
    Preview,
    PreviewPage,
    PreviewRequest,
    PreviewTarget,
    ProgressAck,
    Rank,
    RefusedImage,
    Route,
    ScaleUp,
    ScaleUpInfo,
    SourceFault,
    StorageAssignment,
    StorageCandidate,
    WantedImage,
)

LAYOUT: Final = "9f86d081884c7d659a2feaa0c55ad015"
WEIGHTS: Final = "a3bf4f1b2b0b822cd15d6c15b0f00a08"
ORIGIN: Final = "5d41402abc4b2a76b9719d911017c592"
MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
IMAGE_BYTES: Final = 269_060_352
CHUNKS: Final = 65
FOLDER: Final = "file:///models/smollm2"

SEED: Final = InstanceReport(
    instance_id="seed-1",
    model=MODEL,
    layout_id=LAYOUT,
    weights_id=WEIGHTS,
    image_bytes=IMAGE_BYTES,
    chunk_count=CHUNKS,
    state="serving",
    verified=((0, CHUNKS),),
    address="10.0.0.7:41234",
    transports=("http",),
    placement=Placement(host="node-a", rack="r1", zone="z1"),
)
TARGET: Final = SEED.model_copy(
    update={
        "instance_id": "target-1",
        "weights_id": None,
        "state": "loading",
        "verified": (),
        "address": "10.0.0.8:41234",
        "placement": Placement(host="node-b", rack="r1", zone="z1"),
    }
)
COLD_TARGET: Final = TARGET.model_copy(
    update={
        "instance_id": "target-2",
        "layout_id": "0cc175b9c0f1b6a831c399e269772661",
        "address": "10.0.0.9:41234",
        "placement": Placement(host="node-c", rack="r2", zone="z1"),
        "storage": (
            StorageCandidate(kind="checkpoint", uri=FOLDER, origin=ORIGIN),
            StorageCandidate(kind="loader"),
        ),
    }
)
PARTIAL_TARGET: Final = TARGET.model_copy(update={"weights_id": WEIGHTS, "verified": ((0, 30),)})
FORK_REQUEST: Final = ForkRequest(fork_id="fork-1", instance=TARGET)
REPLAN_REQUEST: Final = ForkRequest(
    fork_id="fork-1",
    instance=PARTIAL_TARGET,
    faults=(SourceFault(instance_id="seed-1", fault="source", error="SourceUnavailable", detail="connection reset"),),
)
COLD_FORK_REQUEST: Final = ForkRequest(fork_id="fork-2", instance=COLD_TARGET)
PROGRESS: Final = ForkProgress(
    verified=((0, 30),),
    bytes_read=125_829_120,
    bytes_per_s=1.1e9,
    sources={"seed-1": 125_829_120},
    source_bytes_per_s={"seed-1": 1.1e9},
    active_bytes_per_s=1.1e9,
    source_active_bytes_per_s={"seed-1": 1.1e9},
    transports={"seed-1": "http"},
    phases={"capture": 0.02, "plan": 0.004, "transfer": 0.11},
)
FINISH: Final = ForkResult(
    outcome="forked",
    seconds=0.31,
    bytes_read=IMAGE_BYTES,
    sources={"seed-1": IMAGE_BYTES},
    efficiency=0.93,
    link_bytes_per_s=1.2e9,
    source_bytes_per_s={"seed-1": 1.2e9},
    transports={"seed-1": "http"},
    phases={"capture": 0.02, "plan": 0.004, "transfer": 0.28},
)

LEASE: Final = Lease(token="eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiJmb3JrLTEifQ.c2lnbmVk", expires_in_s=30)
ACK: Final = InstanceAck(heartbeat_s=5, lease_keys=("3q2-78r-uu-3q2-78r-uu-3q2-78r-uu-3q2-78r-uuw=",))
PLAN: Final = Plan(
    fork_id="fork-1",
    weights_id=WEIGHTS,
    routes=(
        Route(
            source_id="seed-1",
            address=SEED.address,
            placement=SEED.placement,
            transports=("http",),
            generation=0,
            chunks=((0, CHUNKS),),
            lease=LEASE,
        ),
    ),
    reason="from seed seed-1 (0 other readers)",
)
COLD_PLAN: Final = Plan(
    fork_id="fork-2",
    provisional_id=ORIGIN,
    storage=(StorageAssignment(kind="checkpoint", uri=FOLDER, chunks=((0, CHUNKS),)),),
    reason=f"elected to read 65 of 65 chunks from checkpoint {FOLDER}",
)
PROGRESS_ACK: Final = ProgressAck(leases={"seed-1": LEASE})
INSTANCE: Final = InstanceInfo(report=SEED, age_s=1.5)
INSTANCES: Final = InstancePage(items=(INSTANCE,), next="seed-1")
DRAINING: Final = InstanceInfo(report=SEED.model_copy(update={"state": "draining"}), age_s=0.2)
EXIT_CHECK: Final = ExitCheck(can_exit=False, readers=2, reason="forks that read from it: 2")
FORK: Final = ForkInfo(
    fork_id="fork-1",
    instance_id="target-1",
    model=MODEL,
    rank=Rank(),
    state="running",
    plan=(ChunkAssignment(source_id="seed-1", chunks=((0, CHUNKS),)),),
    reason="from seed seed-1 (0 other readers)",
    progress=PROGRESS,
    source_rate_limits={"seed-1": 1_200_000_000},
    age_s=0.12,
    chunk_count=CHUNKS,
    image_bytes=IMAGE_BYTES,
)
FORKS: Final = ForkPage(items=(FORK,))
EVENT: Final = ForkEvent(kind="progress", fork=FORK)
MODELS: Final = (
    ModelInfo(
        model=MODEL,
        rank_key=Rank().key,
        layout_id=LAYOUT,
        weights_id=WEIGHTS,
        image_bytes=IMAGE_BYTES,
        seeds=1,
        relays=1,
        forks_running=1,
        storage_bytes=IMAGE_BYTES,
        forked_bytes=3 * IMAGE_BYTES,
        storage_s=1.9,
        fork_s=0.33,
        seconds_saved=4.71,
    ),
)
SCALEUP: Final = ScaleUp(
    scaleup_id="default.llama",
    model=MODEL,
    replicas=3,
    expires_in_s=900,
    announced_by="deployment/default/llama",
    hosts=("node-c", "node-d"),
)
FINISHED_SCALEUP: Final = SCALEUP.model_copy(update={"replicas": 0})
SCALEUP_VIEW: Final = ScaleUpInfo(
    scaleup=SCALEUP,
    arrived_count=1,
    expires_in_s=871.5,
    seeds=2,
    image_bytes=IMAGE_BYTES,
    reason="they fork from 2 seeds",
)
SCALEUPS: Final = (SCALEUP_VIEW,)
HOLDER: Final = HolderReport(
    holder_id="holder-1",
    placement=Placement(host="node-c", rack="r2", zone="z1"),
    memory_bytes=96 << 30,
    used_bytes=IMAGE_BYTES,
    selectors=(ImageSelector(model=MODEL),),
    images=(
        HeldImage(
            instance_id="holder-1-image-1",
            model=MODEL,
            version="files:9f86d081884c7d659a2feaa0c55ad015",
            rank=Rank(),
            layout_id=LAYOUT,
            image_bytes=IMAGE_BYTES,
            state="ready",
            idle_s=12.5,
        ),
    ),
    refused=(
        RefusedImage(
            model="meta-llama/Llama-3.1-405B",
            version="commit:b906e4dc842aa489c962f9db26554dcfdde901fe",
            rank_key=Rank(tp_size=8).key,
            reason="needs 102 GB of 96 GB memory",
        ),
    ),
)
WANTED: Final = WantedImage(
    model=MODEL,
    version="files:9f86d081884c7d659a2feaa0c55ad015",
    rank=Rank(),
    layout_id=LAYOUT,
    image_bytes=IMAGE_BYTES,
    cause="announced",
    reason="scale-up default.llama announced by deployment/default/llama for this host",
)
HOLDER_ACK: Final = HolderAck(heartbeat_s=1, wanted=(WANTED,))
HOLDER_INFO: Final = HolderInfo(report=HOLDER, age_s=0.4, wanted=(WANTED,))
HOLDERS: Final = HolderPage(items=(HOLDER_INFO,))
PREVIEW_REQUEST: Final = PreviewRequest(model=MODEL, targets=3, link_bytes_per_s=1.25e9)
PREVIEWS: Final = PreviewPage(
    items=(
        Preview(
            model=MODEL,
            rank_key="main-tp0of1-pp0of1-ep0of1",
            image_bytes=IMAGE_BYTES,
            chunk_count=CHUNKS,
            seeds=1,
            link_bytes_per_s=1.25e9,
            measured=False,
            storage_bytes_per_s=1e9,
            targets=(
                PreviewTarget(
                    instance_id="preview-1",
                    host="preview-host-1",
                    shares=(ChunkAssignment(source_id="seed-1", chunks=((0, CHUNKS),)),),
                    transports={"seed-1": "http"},
                    seconds=0.215,
                    reason="from seed seed-1 (0 other readers)",
                ),
                PreviewTarget(
                    instance_id="preview-2",
                    host="preview-host-2",
                    shares=(ChunkAssignment(source_id="preview-1", chunks=((0, CHUNKS),)),),
                    transports={"preview-1": "http"},
                    seconds=0.219,
                    reason="from relay preview-1 (0 of 65 chunks, 0 other readers)",
                ),
                PreviewTarget(
                    instance_id="preview-3",
                    host="preview-host-3",
                    shares=(ChunkAssignment(source_id="preview-2", chunks=((0, CHUNKS),)),),
                    transports={"preview-2": "http"},
                    seconds=0.222,
                    reason="from relay preview-2 (0 of 65 chunks, 0 other readers)",
                ),
            ),
            seconds=0.222,
            bound_s=0.215,
            storage_bytes=0,
        ),
    )
)
