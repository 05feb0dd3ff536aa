"""What the fleet holds of each model."""

from __future__ import annotations

from pydantic import Field

from rfork.schema.base import WireModel
from rfork.schema.types import Bytes, HexId, Label, ModelName, WeightsVersion


class ModelInfo(WireModel):
    """What the fleet holds of one model and rank."""

    model: ModelName = Field(description="name under which seeds and forks meet")
    version: WeightsVersion | None = Field(None, description="each version has its own entry; none: targets whose version is not settled yet")
    rank_key: Label = Field(description="the rank; each has its own entry")
    layout_id: HexId = Field(description="each layout has its own entry")
    weights_id: HexId | None = Field(description="each content has its own entry; none: those that are not sealed yet")
    image_bytes: Bytes = Field(description="size of all tensors of one instance")
    seeds: int = Field(description="instances that hold it whole")
    relays: int = Field(description="instances that hold a part, and give that on")
    forks_running: int = Field(description="forks that have not ended")
    storage_bytes: int = Field(0, description="bytes that forks of this rank read from storage; kept for a while after its last instance is gone")
    forked_bytes: int = Field(0, description="bytes that they read from one another")
    storage_s: float | None = Field(None, description="median seconds of the last forks that read it all from storage; none: none did")
    fork_s: float | None = Field(None, description="median seconds of the last forks that read it all from one another")
    seconds_saved: float = Field(0, description="seconds that forks from one another took less, in all of those that are kept, than `storage_s` each; below 0: more")
