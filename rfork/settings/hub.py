"""Location of the local Hugging Face cache, from the variables that huggingface_hub itself reads."""

from __future__ import annotations

import os
from pathlib import Path


def hub_cache() -> Path:
    """Return the directory in which huggingface_hub keeps models: ``$HF_HUB_CACHE``, or ``$HF_HOME/hub``."""
    environment = os.environ
    if cache := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(cache)).expanduser()
    home = environment.get("HF_HOME")
    if not home:
        home = os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"
