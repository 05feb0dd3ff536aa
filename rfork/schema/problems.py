"""The planner's error responses."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rfork.schema.types import SanitizedText


class Problem(BaseModel):
    """RFC 9457 problem document. The last part of `type` is stable across releases."""

    model_config = ConfigDict(extra="allow")

    type: SanitizedText = Field(description="URI whose last part identifies the problem", examples=["https://rfork.dev/problems/unknown-fork"])
    title: SanitizedText = Field(description="name of the problem, for display")
    status: int = Field(description="the HTTP status")
    detail: SanitizedText = Field(description="what is wrong with this request, and what to do")
    instance: SanitizedText | None = Field(None, description="path of the request")
