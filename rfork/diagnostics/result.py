"""Result of a doctor check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "off", "skip"]
"""`off`: an optional feature is not in use; `skip`: the check does not apply to this machine."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check: name, status, what was found, and how to fix or enable it.

    Raises ValueError for `warn` and `fail` without a `fix`.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status in ("warn", "fail") and not self.fix:
            raise ValueError(f"{self.name}: status {self.status} requires a fix")
