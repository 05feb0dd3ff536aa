"""Table of architectures that were forked through each engine, from docs/model-zoo.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from docs.site.reference.markdown import table

RESULTS: Final = Path(__file__).parents[2] / "model-zoo.json"
ENGINES: Final = ("vllm", "sglang", "transformers")


def architectures() -> str:
    """Return the table."""
    results = json.loads(RESULTS.read_text())
    rows = [[name, *(_cell(found.get(engine)) for engine in ENGINES)] for name, found in results.items()]
    return table(["architecture", *ENGINES], rows)


def _cell(result: dict[str, str] | None) -> str:
    if result is None:
        return ""
    return "forked" if result["level"] == "forked" else f"{result['level']}: {result['note']}"[:90]
