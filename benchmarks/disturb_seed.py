"""The seed of `benchmarks.disturb`: answers requests, one after the other, while it gives its weights."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Literal

import torch
import torch.distributed as dist

import rfork
from benchmarks.disturb_case import Case, Told
from benchmarks.disturb_crew import LOOPBACK, MODEL, PATIENCE_S, settings_for
from benchmarks.disturb_model import Model
from rfork.errors import RforkError
from rfork.seed.seed import Seed

WARM_REQUESTS = 30

Unit = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Order:
    """`open` a case, `serve` so many requests of so many tokens (or idle for seconds), `close` the case."""

    verb: Literal["open", "serve", "idle", "close", "socket", "gloo"]
    case: Case | None = None
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    store: str = ""


class Server:
    """Obeys in the seed's process. One case is open at a time."""

    def __init__(self, planner: str) -> None:
        torch.set_num_threads(1)
        self._planner = planner
        self._model = Model()
        self._open = contextlib.ExitStack()
        self._unit: Unit = contextlib.nullcontext

    def obey(self, order: Order) -> Told | int | None:
        """See `Order`."""
        match order.verb:
            case "open" if order.case is not None:
                self._unit = self._open.enter_context(self._giving(order.case, order.store))
                if order.case.serves:
                    self._serve(WARM_REQUESTS, order.tokens)
                return None
            case "serve":
                return self._serve(order.requests, order.tokens)
            case "idle":
                time.sleep(order.seconds)
                return Told(seconds=order.seconds)
            case "socket":
                return self._listen()
            case _:
                self._open.close()
                self._unit = contextlib.nullcontext
                return None

    def _serve(self, requests: int, tokens: int) -> Told:
        told = Told()
        began = time.perf_counter()
        for _ in range(requests):
            asked = time.perf_counter()
            told.tokens += self._model.answer(tokens, self._unit)
            told.requests.append(time.perf_counter() - asked)
        told.seconds = time.perf_counter() - began
        return told

    @contextlib.contextmanager
    def _giving(self, case: Case, store: str) -> Iterator[Unit]:
        if case.way == "gloo":
            with broadcasting(self._model, 0, case.readers + 1, store):
                yield contextlib.nullcontext
            return
        way = "http" if case.way == "idle" else case.way
        options = settings_for(self._planner, way, governed=case.governed, reads=False)
        with rfork.seed(self._model, model=MODEL, settings=options) as giving:
            if not giving.wait_acknowledged(PATIENCE_S):
                raise RforkError("the planner did not answer the seed")
            yield units_of(giving)

    def _listen(self) -> int:
        """One bare connection gets the resting weights over and over; the port."""
        listener = self._open.enter_context(socket.create_server((LOOPBACK, 0)))
        views = [memoryview(tensor.numpy()) for tensor in self._model.resting]

        def give() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as connected:
                while True:
                    for view in views:
                        connected.sendall(view)

        threading.Thread(target=give, daemon=True).start()
        port: int = listener.getsockname()[1]
        return port


def units_of(giving: Seed) -> Unit:
    """How the engine tells the seed of each of its steps."""
    return giving.serving


@contextlib.contextmanager
def broadcasting(
    model: Model, rank: int, size: int, store: str, counter: Synchronized[int] | None = None
) -> Iterator[None]:
    """Broadcast the model from rank 0 over and over, on a thread of its own, until rank 0 ends the block."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    stopping = threading.Event()

    def run() -> None:
        going = torch.ones(1)
        while True:
            going.fill_(0.0 if stopping.is_set() else 1.0)
            dist.broadcast(going, 0)
            if not going.item():
                return
            for tensor in model.parameters():
                dist.broadcast(tensor.data, 0)
                if counter is not None:
                    with counter.get_lock():
                        counter.value += tensor.nbytes

    thread = threading.Thread(target=run, name="broadcast", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        dist.destroy_process_group()


def main(counter: Synchronized[int], planner: str) -> Callable[[Order], Told | int | None]:
    """The seed process; its counter is not used."""
    return Server(planner).obey
