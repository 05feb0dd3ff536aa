"""Runs `rfork.fork_pretrained` and serves the model until SIGTERM.

``python -m tests.engines.transformers_source FOLDER``, with settings in the environment. Prints one JSON object once
the planner knows the model: ``{"event": "ready", "instance_id", "fallback", "sha256"}``. The digest covers all tensors.
"""

from __future__ import annotations

import json
import signal
import sys

import torch

import rfork
from rfork.image.capture import capture
from rfork.image.memory import image_sha256

REGISTERED_S = 60.0


def main() -> int:
    """Serve the model of a folder."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    model = rfork.fork_pretrained(sys.argv[1])
    report = rfork.fork_report(model)
    if report is None or report.seed is None or not report.seed.wait_registered(REGISTERED_S):
        raise RuntimeError("the model is not served")
    ready = {
        "event": "ready",
        "instance_id": report.instance_id,
        "fallback": report.fallback,
        "sha256": image_sha256(capture(model)),
    }
    print(json.dumps(ready), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
