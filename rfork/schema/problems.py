"""How the planner says that something went wrong."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rfork.schema.types import SanitizedText


class Problem(BaseModel):
    """RFC 9457 problem document; `type` ends in a word that is stable across releases."""

    model_config = ConfigDict(extra="allow")

    type: SanitizedText = Field(description="ends in the word that programs can rely on", examples=["https://rfork.dev/problems/unknown-fork"])
    title: SanitizedText = Field(description="the kind of problem, for people")
    status: int = Field(description="the HTTP status")
    detail: SanitizedText = Field(description="what is wrong with this request, and what to do")
    instance: SanitizedText | None = Field(None, description="the path that was asked")
