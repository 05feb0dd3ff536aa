"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One finding: what was looked at, how it stands, what was seen, and what to do about it.

    `warn` and `fail` say what to do in `fix`: what nobody can mend is no finding. ValueError without.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status in ("warn", "fail") and not self.fix:
            raise ValueError(f"{self.name}: a finding that says nothing to do")
