"""Bodies that the OpenAPI page shows and can send as they are."""

from __future__ import annotations

from typing import Final

from rfork.wire import ForkFinish, ForkProgress, ForkRequest, InstanceReport, Placement, SourceFault

LAYOUT: Final = "9f86d081884c7d659a2feaa0c55ad015"
WEIGHTS: Final = "a3bf4f1b2b0b822cd15d6c15b0f00a08"

SEED: Final = InstanceReport(
    instance_id="seed-1",
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    layout_id=LAYOUT,
    weights_id=WEIGHTS,
    image_bytes=269_060_352,
    chunk_count=65,
    state="serving",
    verified=((0, 65),),
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
HALF_WAY: Final = TARGET.model_copy(update={"weights_id": WEIGHTS, "verified": ((0, 30),)})
ASK: Final = ForkRequest(fork_id="fork-1", instance=TARGET)
ASK_AGAIN: Final = ForkRequest(
    fork_id="fork-1",
    instance=HALF_WAY,
    faults=(
        SourceFault(instance_id="seed-1", fault="source", error="SourceGone", detail="connection reset"),
    ),
)
PROGRESS: Final = ForkProgress(
    verified=((0, 30),), bytes_read=125_829_120, bytes_per_s=1.1e9, sources={"seed-1": 125_829_120}
)
FINISH: Final = ForkFinish(
    outcome="forked", seconds=0.31, bytes_read=269_060_352, sources={"seed-1": 269_060_352}
)
