"""Wire models of announced scale-ups."""

from __future__ import annotations

from pydantic import Field

from rfork.schema.base import WireModel
from rfork.schema.types import Bytes, Identifier, Label, ModelName, SanitizedText, WeightsVersion


class ScaleUp(WireModel):
    """An announcement of new replicas, whose forks should share one plan."""

    scaleup_id: Identifier = Field(description="chosen by the caller; a repeated announcement replaces the earlier one")
    model: ModelName = Field(description="model of the replicas")
    version: WeightsVersion | None = Field(None, description="version of the weights; null: unknown")
    replicas: int = Field(ge=0, le=100_000, description="new replicas that have not requested a fork yet; 0: all have arrived")
    expires_in_s: float = Field(900.0, gt=0, le=86_400, description="seconds until replicas that have not arrived are no longer waited for")
    announced_by: Label = Field("", description="name of the announcing party, for display", examples=["deployment/default/llama"])


class ScaleUpInfo(WireModel):
    """An announced scale-up, and how its replicas will get their weights."""

    scaleup: ScaleUp = Field(description="as announced")
    arrived_count: int = Field(description="replicas of which a rank has requested a fork")
    expires_in_s: float = Field(description="seconds until it expires")
    seeds: int = Field(description="number of complete instances, for the rank that has fewest")
    image_bytes: Bytes = Field(description="size of the images of all ranks of a replica, if known; else 0")
    reason: SanitizedText = Field(description="what the replicas will do: fork from seeds, or read storage once for the group")
