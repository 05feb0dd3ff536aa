"""Seed of the demo: a model that keeps answering a prompt while it serves its weights.

Run as ``python -m rfork.cli.demo.seed_process MODEL_DIR NAME PROMPT``; settings come from ``RFORK_*``. Writes
one JSON line when it is ready and one per answer, until SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import torch

from rfork import _api as engine
from rfork import logs
from rfork import settings as options
from rfork.cli.console import handle_errors, print_json
from rfork.engines.transformers import generate, loaded_model, tokenizer_of
from rfork.image.checksum import image_sha256
from rfork.settings import InstanceSettings

TOKENS = 12


def main() -> None:
    """Seed the model and answer the prompt until SIGTERM."""
    folder, name, prompt = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    with handle_errors(as_json=True):
        chosen = options.load(InstanceSettings)
        logs.configure(json=True, level=chosen.log_level)
        torch.set_num_threads(1)
        stopped = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        model, tokenizer = loaded_model(folder), tokenizer_of(folder)
        with engine.seed(model, model=name, settings=chosen) as seed:
            seed.wait_registered(chosen.planner_timeout_s)
            report = seed.report()
            print_json({"event": "ready", "sha256": image_sha256(seed.image), **report.model_dump(mode="json")})
            while not stopped.is_set():
                began = time.time()
                with seed.measure_step():
                    text = generate(model, tokenizer, prompt, tokens=TOKENS)
                print_json({"event": "answer", "at": began, "seconds": time.time() - began, "text": text})


if __name__ == "__main__":
    main()
