"""Tables of engine versions, from docs/engine-matrix.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from docs.site.reference.markdown import table

MATRIX: Final = Path(__file__).parents[2] / "engine-matrix.json"
LEVELS: Final = {
    "forked": "forked on a CPU: equal tensors and tokens",
    "checked": "all hook points found in its sources",
    "unsupported": "not supported",
}


def table_of(engine: str) -> str:
    """Return the table of one engine's versions."""
    rows = [row for row in json.loads(MATRIX.read_text()) if row["engine"] == engine]
    return table(["version", "tested", "notes"], [[row["version"], LEVELS[row["level"]], row["notes"]] for row in rows])
