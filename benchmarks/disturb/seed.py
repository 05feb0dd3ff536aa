"""Seed of `benchmarks.disturb`: processes requests sequentially while it serves its weights."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Literal

import torch
import torch.distributed as dist

import rfork
from benchmarks.disturb.cases import DisturbCase, SlotResult
from benchmarks.disturb.model import BenchModel, DeviceSteps
from benchmarks.disturb.workers import LOOPBACK, MODEL, REPLY_TIMEOUT_S, settings_for
from rfork.errors import RforkError
from rfork.source.seed import Seed

WARM_REQUESTS = 30

StepMeter = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class SeedOrder:
    """Command to `open` a case, `serve` requests of a number of tokens (or idle for seconds), or `close` the
    case. `other_cores`: cores of the exporters if the steps run on another core.
    """

    verb: Literal["open", "serve", "idle", "close", "socket", "gloo"]
    case: DisturbCase | None = None
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    store: str = ""
    other_cores: frozenset[int] = frozenset()


class SeedServer:
    """Executes commands in the seed's process. One case is open at a time."""

    def __init__(self, planner: str) -> None:
        torch.set_num_threads(1)
        self._planner = planner
        self._model = BenchModel()
        self._device = DeviceSteps()
        self._open = contextlib.ExitStack()
        self._step_meter: StepMeter = contextlib.nullcontext
        self._generate: Callable[[int, StepMeter], list[float]] = self._model.generate

    def handle(self, order: SeedOrder) -> SlotResult | int | None:
        """Execute a command; see `SeedOrder`."""
        match order.verb:
            case "open" if order.case is not None:
                self._generate = self._device.run if order.case.is_other_core else self._model.generate
                with self._exporters_on(order.other_cores) if order.case.is_other_core else contextlib.nullcontext():
                    self._step_meter = self._open.enter_context(self._seeded(order.case, order.store))
                if order.case.serves:
                    self._serve(WARM_REQUESTS, order.tokens)
                return None
            case "serve":
                return self._serve(order.requests, order.tokens)
            case "idle":
                cpu_s = time.process_time()
                time.sleep(order.seconds)
                return SlotResult(seconds=order.seconds, cpu_s=time.process_time() - cpu_s)
            case "socket":
                return self._listen()
            case _:
                self._open.close()
                self._step_meter = contextlib.nullcontext
                return None

    def _serve(self, requests: int, tokens: int) -> SlotResult:
        result = SlotResult()
        began = time.perf_counter()
        for _ in range(requests):
            requested_at = time.perf_counter()
            result.tokens += self._generate(tokens, self._step_meter)
            result.requests.append(time.perf_counter() - requested_at)
        result.seconds = time.perf_counter() - began
        return result

    @contextlib.contextmanager
    def _seeded(self, case: DisturbCase, store: str) -> Iterator[StepMeter]:
        if case.transport == "gloo":
            with broadcasting(self._model, 0, case.readers + 1, store):
                yield contextlib.nullcontext
            return
        transport = "http" if case.transport == "idle" else case.transport
        options = settings_for(self._planner, transport, governed=case.governed)
        with rfork.seed(self._model, model=MODEL, settings=options) as seed_handle:
            if not seed_handle.wait_registered(REPLY_TIMEOUT_S):
                raise RforkError("the planner did not respond to the seed")
            yield step_meter(seed_handle)

    @contextlib.contextmanager
    def _exporters_on(self, cores: frozenset[int]) -> Iterator[None]:
        """Pin all other threads, and those that are started within the block, to `cores` until the case is closed."""
        own_cores = os.sched_getaffinity(0)
        pin_threads(cores)
        self._open.callback(pin_threads, own_cores)
        yield
        os.sched_setaffinity(0, own_cores)

    def _listen(self) -> int:
        """Send the unused weights to one bare connection in a loop; returns the port."""
        listener = self._open.enter_context(socket.create_server((LOOPBACK, 0)))
        views = [memoryview(tensor.numpy()) for tensor in self._model.idle_weights]

        def broadcast_loop() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as connected:
                while True:
                    for view in views:
                        connected.sendall(view)

        threading.Thread(target=broadcast_loop, daemon=True).start()
        port: int = listener.getsockname()[1]
        return port


def pin_threads(cores: Collection[int]) -> None:
    """Pin all threads of this process to `cores`."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def step_meter(seed_handle: Seed) -> StepMeter:
    """Return the context manager by which the engine reports each of its steps to the seed."""
    return seed_handle.measure_step


@contextlib.contextmanager
def broadcasting(
    model: BenchModel, rank: int, size: int, store: str, counter: Synchronized[int] | None = None
) -> Iterator[None]:
    """Broadcast the model from rank 0 in a loop, on a separate thread, until rank 0 ends the block."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    stopping = threading.Event()

    def run() -> None:
        group_transport = torch.ones(1)
        while True:
            group_transport.fill_(0.0 if stopping.is_set() else 1.0)
            dist.broadcast(group_transport, 0)
            if not group_transport.item():
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


def main(counter: Synchronized[int], planner: str) -> Callable[[SeedOrder], SlotResult | int | None]:
    """Entry point of the seed's process; its counter is not used."""
    return SeedServer(planner).handle
