"""Wire models of the models that a fleet serves."""

from __future__ import annotations

from pydantic import Field

from rfork.schema.base import WireModel
from rfork.schema.types import Bytes, HexId, Label, ModelName, WeightsVersion


class ModelInfo(WireModel):
    """A model in the fleet, with one entry for each combination of version, rank key, layout and weights."""

    model: ModelName = Field(description="name of the model")
    version: WeightsVersion | None = Field(None, description="version of the weights; null: targets whose version is not determined yet")
    rank_key: Label = Field(description="rank key")
    layout_id: HexId = Field(description="id of the layout")
    weights_id: HexId | None = Field(description="digest of the weights; null: not known yet")
    image_bytes: Bytes = Field(description="size of the image")
    seeds: int = Field(description="number of complete instances")
    relays: int = Field(description="number of instances that are still receiving and serve verified chunks")
    forks_running: int = Field(description="number of running forks")
    storage_bytes: int = Field(0, description="bytes that forks of this rank read from storage; kept for a while after its last instance has left")
    forked_bytes: int = Field(0, description="bytes that forks of this rank read from peers")
    storage_s: float | None = Field(None, description="median seconds of recent forks that read only from storage; null: none")
    fork_s: float | None = Field(None, description="median seconds of recent forks that read only from peers; null: none")
    seconds_saved: float = Field(0, description="total seconds by which recent forks from peers were faster than `storage_s`; negative: slower")
