"""A text server that forks its model, and seeds it while it serves: FastAPI, transformers, rfork.

    rfork planner &
    python server.py HuggingFaceTB/SmolLM2-135M-Instruct --planner http://127.0.0.1:8700 --port 8000
    python server.py HuggingFaceTB/SmolLM2-135M-Instruct --planner http://127.0.0.1:8700 --port 8001
    curl 127.0.0.1:8001/generate -H 'Content-Type: application/json' -d '{"prompt": "Paris is"}'

Both are started in the same way: the first finds no seed and reads its checkpoint, the second forks from it.
Each serves /health from the start, with 503 until every chunk of its weights is verified. On SIGTERM it stops
cleanly: requests in progress are completed, and its readers may finish within RFORK_DRAIN_TIMEOUT_S seconds.

Needs: pip install 'rfork[planner,transformers]'. All settings of rfork (RFORK_*) apply.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Annotated

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import rfork


class Prompt(BaseModel):
    """Text to continue."""

    prompt: str
    max_new_tokens: Annotated[int, Field(ge=1, le=1024)] = 32


class Completion(BaseModel):
    """The continuation."""

    tokens: list[int]
    text: str


class Generator:
    """A model and its tokenizer: one prompt at a time, greedy decoding."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        report = rfork.fork_report(model)
        self._seed = report.seed if report is not None else None

    def generate(self, prompt: Prompt) -> Completion:
        """Continue the prompt until the end-of-sequence token."""
        new = self._tokenizer(prompt.prompt, return_tensors="pt")["input_ids"].to(self._model.device)
        tokens: list[int] = []
        with self._lock, torch.inference_mode():
            output = self._model(input_ids=new, use_cache=True)
            while True:
                new = output.logits[:, -1:].argmax(-1)
                tokens.append(int(new))
                if len(tokens) == prompt.max_new_tokens or tokens[-1] == self._tokenizer.eos_token_id:
                    break
                with self._step():
                    output = self._model(input_ids=new, past_key_values=output.past_key_values, use_cache=True)
        return Completion(tokens=tokens, text=str(self._tokenizer.decode(tokens, skip_special_tokens=True)))

    def _step(self) -> AbstractContextManager[object]:
        """Context of one decoding step: forks are throttled while steps take longer."""
        return self._seed.measure_step() if self._seed is not None else nullcontext()


class Service:
    """The web application. It serves before its model is loaded, and reports so."""

    def __init__(self) -> None:
        self.generator: Generator | None = None
        self.is_draining = False
        self.app = FastAPI(title="rfork example")
        self.app.get("/health")(self.health)
        self.app.post("/generate")(self.generate)

    def health(self) -> dict[str, str]:
        """200 once the weights are complete, until the shutdown starts."""
        self._ready()
        if self.is_draining:
            raise HTTPException(503, "shutting down")
        return {"status": "ready"}

    def generate(self, prompt: Prompt) -> Completion:
        """Return the greedy continuation of a prompt."""
        return self._ready().generate(prompt)

    def _ready(self) -> Generator:
        if self.generator is None:
            raise HTTPException(503, "the weights are not complete yet")
        return self.generator


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a directory, or a model of the hub")
    parser.add_argument("--planner", help="URL of the planner [RFORK_PLANNER]")
    parser.add_argument("--name", help="name of the model; seeds and forks meet under it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # every call to the planner
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, terminate)
    try:
        serve(options)
    except Terminated:
        pass
    except rfork.RforkError as error:
        sys.exit(f"{error.kind}: {error} {error.hint}".rstrip())
    log_event("ended")


class Terminated(KeyboardInterrupt):
    """SIGTERM or Ctrl-C was received."""

    received = False


def terminate(number: int, frame: FrameType | None) -> None:
    """Interrupt the main thread, which leaves its context managers in order."""
    # Python drops exceptions raised in a finalizer or a weakref callback: `serve` checks this event then.
    Terminated.received = True
    raise Terminated


def serve(options: argparse.Namespace) -> None:
    """Listen, load the model, and serve until Terminated."""
    service = Service()
    with listening(service.app, options.host, options.port) as url:
        log_event("listening", url=url)
        model = rfork.fork_pretrained(options.model, planner=options.planner, name=options.name)
        report = rfork.fork_report(model)
        try:
            service.generator = Generator(model, AutoTokenizer.from_pretrained(options.model))
            if not Terminated.received:
                log_event("ready", weights=report.line() if report is not None else "loaded by transformers")
            while not Terminated.received:
                time.sleep(1)  # not longer: a signal during the wait is handled at its end
        finally:
            service.is_draining = True
            if report is not None and report.seed is not None:
                report.seed.drain(report.seed.settings.drain_timeout_s)  # while requests are still being completed
                report.seed.close()


@contextmanager
def listening(app: FastAPI, host: str, port: int) -> Iterator[str]:
    """Serve on another thread and yield the URL; at the end requests in progress are completed."""
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
    socket = server.config.bind_socket()  # bind here, so that an occupied port ends the process
    socket.listen()
    server.config.load()  # import on this thread: an import interrupted by SIGTERM must not block the other
    thread = threading.Thread(target=server.run, args=([socket],), name="http")
    thread.start()
    try:
        yield f"http://{host}:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def log_event(event: str, **values: str) -> None:
    """Print one line of JSON."""
    print(json.dumps({"event": event, **values}), flush=True)


if __name__ == "__main__":
    main()
