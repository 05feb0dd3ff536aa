"""What the fleet holds of each model."""

from __future__ import annotations

from pydantic import Field

from rfork.fields import Bytes, HexId, Label, ModelName
from rfork.wire.base import WireModel


class ModelView(WireModel):
    """What the fleet holds of one model and rank."""

    model: ModelName
    rank_key: Label
    layout_id: HexId
    weights_id: HexId | None
    image_bytes: Bytes
    seeds: int
    relays: int
    forks_running: int
    storage_bytes: int = Field(0, description="bytes that forks of this rank read from storage; kept for a while after its last instance is gone")
    forked_bytes: int = Field(0, description="bytes that they read from one another")
    storage_s: float | None = Field(None, description="median seconds of the last forks that read it all from storage; none: none did")
    fork_s: float | None = Field(None, description="median seconds of the last forks that read it all from one another")
    saved_s: float = Field(0, description="seconds that forks from one another took less, in all of those that are kept, than `storage_s` each; below 0: more")
