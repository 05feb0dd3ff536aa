"""Source process of `benchmarks.reshard`: seeds of one model in several layouts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from benchmarks.pull.source import READY_TIMEOUT_S, planner_main, process, settings_for
from benchmarks.reshard.sharded_model import Shape, ShardedEngine, ShardedModel, random_weights
from rfork import logs
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.image.memory import compute_manifest
from rfork.schema import Rank
from rfork.source.box_images import BoxImages
from rfork.source.seed import Connections, InstanceIdentity, Seed

VERSION: Final = "v1"
FORGET: Final = "forget"
"""Command: close all box images."""
SERVE: Final = "serve"
"""Command: run steps, as an engine does."""
STEPS: Final = "steps"
"""Command: send the seconds of the steps since the last such command."""
STEP_SIZE: Final = 512
STEP_PRODUCTS: Final = 4
LAYOUTS: Final = {"sharded": (2, (0, 1)), "complete": (1, (0,))}
"""Model name of each layout: the number of its ranks, and the ranks that the source process has."""
BOX_BYTES: Final = 16 << 30


def rank_of(index: int, size: int) -> Rank:
    """Return a tensor-parallel rank."""
    return Rank(tp=index, tp_size=size)


@contextlib.contextmanager
def source_process(shape: Shape) -> Iterator[tuple[str, Any]]:
    """Run a planner and a source process for the block; yields the planner's URL and a pipe.

    The source process handles the commands `FORGET`, `SERVE` and `STEPS`, and sends a reply to each.
    """
    with contextlib.ExitStack() as processes:
        url: str = processes.enter_context(process(planner_main))
        pipe = processes.enter_context(_piped(url, shape))
        yield url, pipe


@contextlib.contextmanager
def _piped(url: str, shape: Shape) -> Iterator[Any]:
    import multiprocessing

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with process(_source_main, theirs, url, shape):
        yield ours


def _source_main(ready: Connection, commands: Connection, planner: str, shape: Shape) -> None:
    logs.configure(json=False, level="warning")
    torch.set_num_threads(1)
    settings = settings_for(planner, ("http",))
    with contextlib.ExitStack() as stack:
        seeds: list[tuple[Seed, ShardedEngine, ShardedModel]] = []
        for model, (size, ranks) in LAYOUTS.items():
            for index in ranks:
                engine = ShardedEngine(shape, index, size)
                module = engine.load_from(lambda _: random_weights(shape))
                image = capture(module)
                identity = InstanceIdentity.of(model, rank_of(index, size), None, version=VERSION)
                seed = Seed(image, identity, settings, Connections.of(settings), manifest=compute_manifest(image))
                stack.enter_context(seed)
                seeds.append((seed, engine, module))
                if not seed.wait_registered(READY_TIMEOUT_S):
                    raise RforkError("the planner did not respond to the seed")
        for seed, engine, module in seeds:
            _serve_boxes(seed, engine, module)
        ready.send(True)
        steps = Steps([seed for seed, _, _ in seeds])
        while True:
            command = commands.recv()
            if command == SERVE:
                steps.start()
            if command == FORGET:
                for seed, engine, module in seeds:
                    if seed.boxes is not None:
                        seed.boxes.close()
                    _serve_boxes(seed, engine, module)
            commands.send(steps.pop())


class Steps:
    """Steps of an engine: matrix products on one thread, reported to the seeds."""

    def __init__(self, seeds: Sequence[Seed]) -> None:
        self._seeds = seeds
        self._durations: list[float] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Run steps from now on."""
        threading.Thread(target=self._run, daemon=True).start()

    def pop(self) -> list[float]:
        """Return the seconds of the steps since the last call."""
        with self._lock:
            durations, self._durations = self._durations, []
        return durations

    def _run(self) -> None:
        values = torch.rand(STEP_SIZE, STEP_SIZE)
        while True:
            began = time.perf_counter()
            for _ in range(STEP_PRODUCTS):
                values @ values
            seconds = time.perf_counter() - began
            with self._lock:
                self._durations.append(seconds)
            for seed in self._seeds:
                seed.record_step_latency(seconds)


def _serve_boxes(seed: Seed, engine: ShardedEngine, module: torch.nn.Module) -> None:
    placement_map = engine.record(engine.checkpoint_tensors())
    tensors, _ = engine.live_tensors(module, placement_map)
    seed.boxes = BoxImages(seed, placement_map, tensors, seed.settings, memory_bytes=BOX_BYTES)
