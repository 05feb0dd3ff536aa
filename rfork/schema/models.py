"""Models of the fleet's weights."""

from __future__ import annotations

from pydantic import Field

from rfork.schema.base import WireModel
from rfork.schema.types import Bytes, HexId, Label, ModelName, WeightsVersion


class ModelInfo(WireModel):
    """Summary of one model, version and rank in the fleet."""

    model: ModelName = Field(description="name of the model")
    version: WeightsVersion | None = Field(None, description="version of the weights, with one entry each; null: targets whose version is not determined yet")
    rank_key: Label = Field(description="rank key, with one entry each")
    layout_id: HexId = Field(description="layout, with one entry each")
    weights_id: HexId | None = Field(description="digest of the weights, with one entry each; null: not known yet")
    image_bytes: Bytes = Field(description="size of the image")
    seeds: int = Field(description="number of complete instances")
    relays: int = Field(description="number of instances that are still receiving and serve verified chunks")
    forks_running: int = Field(description="number of running forks")
    storage_bytes: int = Field(0, description="bytes that forks of this rank read from storage; kept for a while after its last instance is gone")
    forked_bytes: int = Field(0, description="bytes that forks of this rank read from peers")
    storage_s: float | None = Field(None, description="median seconds of recent forks that read only from storage; null: none")
    fork_s: float | None = Field(None, description="median seconds of recent forks that read only from peers; null: none")
    seconds_saved: float = Field(0, description="total seconds by which recent forks from peers were faster than `storage_s`; negative: slower")
