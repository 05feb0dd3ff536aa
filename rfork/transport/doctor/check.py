"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, how it stands, what was seen, and what to do about it."""

    name: str
    status: Status
    detail: str
    fix: str = ""
