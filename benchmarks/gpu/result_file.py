"""JSON file of a step that is written again after each change, so that a step that is ended leaves what it found.

Uses only the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

Value: TypeAlias = "str | int | float | bool | None"


def write_json(path: Path, document: object) -> None:
    """Replace a JSON file; a reader, or an interrupt, never sees half of it."""
    write_text(path, json.dumps(document, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file; a reader, or an interrupt, never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


class ResultFile:
    """Rows of a step. Each is printed as one line when it is added, and written to the file, if there is one."""

    def __init__(self, path: Path | None, **document: object) -> None:
        self.rows: list[dict[str, Value]] = []
        self._path = path
        self._document = {**document, "rows": self.rows}
        self.write()

    def add(self, row: Mapping[str, Value]) -> None:
        """Add a row; the first value is its name."""
        self.rows.append(dict(row))
        name, *values = row.items()
        texts = [_text(value) if key == "value" else f"{key} {_text(value)}" for key, value in values if value != ""]
        print(f"{_text(name[1])}: {', '.join(texts)}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the document again."""
        if self._path is not None:
            write_json(self._path, self._document)


def _text(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
