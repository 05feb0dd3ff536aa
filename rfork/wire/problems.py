"""How the planner says that something went wrong."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rfork.fields import Told


class Problem(BaseModel):
    """RFC 9457 problem document; `type` ends in a word that is stable across releases."""

    model_config = ConfigDict(extra="allow")

    type: Told = Field(examples=["https://rfork.dev/problems/unknown-fork"])
    title: Told
    status: int
    detail: Told
    instance: Told | None = None
