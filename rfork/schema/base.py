"""Base classes of all wire models and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class StrictCopyModel(BaseModel):
    """Model whose copies reject updates of fields that do not exist; pydantic ignores them silently."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, which are not validated. Raises TypeError for an unknown field."""
        if update and (unknown := update.keys() - type(self).model_fields.keys()):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)


class WireModel(StrictCopyModel):
    """Base of all wire models: immutable; rejects unknown fields and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
