"""What seeds and forks of a vLLM server meet under."""

from __future__ import annotations

import re
from pathlib import Path

HUB_FOLDER = re.compile(r"models--(.+?)/snapshots/[0-9a-f]+/?$")
"""Where the hub's cache keeps a model: what vLLM makes of the model's id when it is offline."""


def model_name(model: str, revision: str | None, told: str | None, draft: bool) -> str:
    """What seeds and forks of a model meet under: a hub's id as it is, a folder's last component.

    `told` is the setting. A draft keeps its own name behind it: two servers may well have two drafts.
    """
    if hub := HUB_FOLDER.search(model):
        name = hub.group(1).replace("--", "/")
    else:
        name = Path(model).resolve().name if Path(model).exists() else model
    if told is not None:
        return f"{told}/{name}" if draft else told
    return f"{name}@{revision}" if revision else name
