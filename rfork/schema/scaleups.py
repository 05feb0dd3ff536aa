"""New replicas that are about to start."""

from __future__ import annotations

from pydantic import Field

from rfork.schema.base import WireModel
from rfork.schema.types import Bytes, Identifier, Label, ModelName, SanitizedText, WeightsVersion


class ScaleUp(WireModel):
    """New replicas of a model are about to start: their forks are to share one plan."""

    scaleup_id: Identifier = Field(description="chosen by the caller; saying it again replaces what was said before")
    model: ModelName = Field(description="whose replicas start")
    version: WeightsVersion | None = Field(None, description="of the weights that they will ask for; none: not known")
    replicas: int = Field(ge=0, le=100_000, description="new replicas that have not asked for their fork yet; 0: none comes any more")
    expires_in_s: float = Field(900.0, gt=0, le=86_400, description="who has not come by then is not waited for")
    announced_by: Label = Field("", description="who says so, for people", examples=["deployment/default/llama"])


class ScaleUpInfo(WireModel):
    """A scale-up that was announced, and what awaits those that come."""

    scaleup: ScaleUp = Field(description="as announced")
    arrived_count: int = Field(description="replicas of which a rank has asked for its fork since")
    expires_in_s: float = Field(description="seconds until it is forgotten")
    seeds: int = Field(description="instances that hold the model whole now, of the rank that fewest hold")
    image_bytes: Bytes = Field(description="of all ranks of one replica, where any is known; else 0")
    reason: SanitizedText = Field(description="what they will do: fork from seeds, or read storage once for all")
