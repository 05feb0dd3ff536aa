"""Prints the layouts of transformers' models as JSON, keyed by the names of their folders. Run as a separate process.

``python -m tests.unit.engines.model_layout FOLDER loaded|built``: either loads the models from the subfolders
and runs them, or builds them from their configurations alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rfork.image.capture import capture


def model_of(folder: Path, mode: str) -> Any:
    """Return one model."""
    if mode == "built":
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(8).reshape(1, 8)
    model(tokens)
    model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0)
    return model


def main(folder: str, mode: str) -> None:
    """Print the layouts of all models of a folder."""
    found = {}
    for each in sorted(Path(folder).iterdir()):
        layout = capture(model_of(each, mode)).layout
        found[each.name] = {"id": layout.layout_id, "attributes": layout.attributes}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
