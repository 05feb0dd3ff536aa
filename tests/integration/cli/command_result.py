"""`rfork ARGUMENTS` in this process, and what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast


@dataclass(frozen=True)
class CommandResult:
    """A command that has ended: what it wrote, and its exit code."""

    out: str
    err: str
    code: int

    @property
    def json(self) -> dict[str, object]:
        """Its one line on stdout."""
        return cast(dict[str, object], json.loads(self.out))


Rfork = Callable[..., CommandResult]
