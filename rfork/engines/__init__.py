"""How each engine's models are captured, filled and served: one thin room an engine."""

from __future__ import annotations

from typing import Final

LOAD_FORMAT: Final = "rfork"
"""The load format that engines know rfork by. Here, as plug-ins ask for it before they import anything."""
