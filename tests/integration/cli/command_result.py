"""Runs `rfork ARGUMENTS` in this process and captures its output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast


@dataclass(frozen=True)
class CommandResult:
    """Output and exit code of a finished command."""

    out: str
    err: str
    code: int

    @property
    def json(self) -> dict[str, object]:
        """Parse the single line on stdout."""
        return cast(dict[str, object], json.loads(self.out))


Rfork = Callable[..., CommandResult]
