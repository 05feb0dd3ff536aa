"""A text server that forks its model, and seeds it while it serves: FastAPI, transformers, rfork.

    rfork planner &
    python server.py HuggingFaceTB/SmolLM2-135M-Instruct --planner http://127.0.0.1:8700 --port 8000
    python server.py HuggingFaceTB/SmolLM2-135M-Instruct --planner http://127.0.0.1:8700 --port 8001
    curl 127.0.0.1:8001/generate -H 'Content-Type: application/json' -d '{"prompt": "Paris is"}'

Both are started alike: the first finds nobody and reads its checkpoint, the second forks from it. Each
answers on /health from the start, with 503 until every chunk of its weights is verified. SIGTERM ends it in
order: the answers under way are given, and who forks from it may finish, for RFORK_DRAIN_TIMEOUT_S seconds.

Needs: pip install 'rfork[transformers]'. All options of rfork (RFORK_*) hold here too.
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
    """What is to be continued."""

    prompt: str
    max_new_tokens: Annotated[int, Field(ge=1, le=1024)] = 32


class Completion(BaseModel):
    """The continuation."""

    tokens: list[int]
    text: str


class Generator:
    """A model and its tokenizer: one prompt at a time, the likeliest token at each step."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        report = rfork.fork_report(model)
        self._seed = report.seed if report is not None else None

    def generate(self, prompt: Prompt) -> Completion:
        """Continue the prompt, until the model says that it is done."""
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
        """Around a unit of work that is alike each time: forks read more slowly while it takes longer."""
        return self._seed.measure_step() if self._seed is not None else nullcontext()


class Service:
    """The web application. It is up before its model is, and says so."""

    def __init__(self) -> None:
        self.generator: Generator | None = None
        self.is_draining = False
        self.app = FastAPI(title="rfork example")
        self.app.get("/health")(self.health)
        self.app.post("/generate")(self.generate)

    def health(self) -> dict[str, str]:
        """200 once the weights are whole, and until it is about to end."""
        self._ready()
        if self.is_draining:
            raise HTTPException(503, "about to end")
        return {"status": "ready"}

    def generate(self, prompt: Prompt) -> Completion:
        """The likeliest continuation of a prompt."""
        return self._ready().generate(prompt)

    def _ready(self) -> Generator:
        if self.generator is None:
            raise HTTPException(503, "the weights are not whole yet")
        return self.generator


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a folder, or a model of the hub")
    parser.add_argument("--planner", help="URL of the planner [RFORK_PLANNER]")
    parser.add_argument("--name", help="name of the model; seeds and forks meet under it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # each call to the planner
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
    """SIGTERM or Ctrl-C came."""

    received = False


def terminate(number: int, frame: FrameType | None) -> None:
    """The main thread, wherever it is, leaves its blocks in order."""
    # Python drops what is raised in a finalizer or a weak reference's callback: then `serve` sees this.
    Terminated.received = True
    raise Terminated


def serve(options: argparse.Namespace) -> None:
    """Listen, get the model, and serve, until Terminated."""
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
                time.sleep(1)  # no longer: a signal that comes as it begins is heard when it ends
        finally:
            service.is_draining = True
            if report is not None and report.seed is not None:
                report.seed.drain(report.seed.settings.drain_timeout_s)  # while answers are still given
                report.seed.close()


@contextmanager
def listening(app: FastAPI, host: str, port: int) -> Iterator[str]:
    """Serve on another thread, at the URL that is given; in the end the answers under way are sent."""
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
    socket = server.config.bind_socket()  # here, so that a port that is taken ends the process
    socket.listen()
    server.config.load()  # imports on this thread: one that SIGTERM interrupts must not hold up the other
    thread = threading.Thread(target=server.run, args=([socket],), name="http")
    thread.start()
    try:
        yield f"http://{host}:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def log_event(event: str, **values: str) -> None:
    """One line of JSON."""
    print(json.dumps({"event": event, **values}), flush=True)


if __name__ == "__main__":
    main()
