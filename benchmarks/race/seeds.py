"""Seed process of `benchmarks.race`: one module, served under one name for each row, and what disturbs it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Literal

import torch
from torch import nn

import rfork
from benchmarks import shapes
from benchmarks.disturb.workers import LOOPBACK
from benchmarks.pull.source import READY_TIMEOUT_S
from rfork import settings
from rfork.errors import RforkError
from rfork.settings import InstanceSettings

LINK_BYTES_PER_S = 100_000_000
"""Rate of the seed behind a slow link, and of the one that stalls."""
PYTHON_THREADS = 4
"""Threads of the busy seed that hold the interpreter lock."""

SourceType = Literal["busy seed", "slow link", "stalled"]


@dataclass(frozen=True, slots=True)
class RaceOrder:
    """Command to a seed's process: `pid` returns its process id, `busy` and `idle` start and end its threads."""

    verb: Literal["pid", "busy", "idle"]


def race_module() -> nn.Module:
    """Return the module of all rows: 1.0 GB of a Llama's tensors in bfloat16, the same in every process."""
    return shapes.module_of(shapes.llama(layers=12, hidden=1536, intermediate=6144, key_value=384), seed=3)


def settings_for(planner: str | None, egress: int | None = None) -> InstanceSettings:
    """Return the product's defaults over HTTP."""
    return settings.load(
        InstanceSettings,
        planner=planner,
        transports=("http",),
        bind=LOOPBACK,
        drain_timeout_s=0.0,
        max_egress_bytes_per_s=egress,
    )


class RaceSeeds:
    """Serves the module, and executes commands."""

    def __init__(self, planner: str, version: str) -> None:
        torch.set_num_threads(1)
        self._seeds = contextlib.ExitStack()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        module = race_module()
        rates: dict[SourceType, int | None] = {
            "busy seed": None,
            "slow link": LINK_BYTES_PER_S,
            "stalled": LINK_BYTES_PER_S,
        }
        for name, egress in rates.items():
            options = settings_for(planner, egress)
            seed = self._seeds.enter_context(rfork.seed(module, model=name, version=version, settings=options))
            if not seed.wait_registered(READY_TIMEOUT_S):
                raise RforkError("the planner did not respond to the seed")

    def handle(self, order: RaceOrder) -> int | None:
        """Execute a command; see `RaceOrder`."""
        match order.verb:
            case "pid":
                return os.getpid()
            case "busy":
                self._ended.clear()
                self._threads = [threading.Thread(target=self._spin, daemon=True) for _ in range(PYTHON_THREADS)]
                for thread in self._threads:
                    thread.start()
            case "idle":
                self._ended.set()
                for thread in self._threads:
                    thread.join()
        return None

    def _spin(self) -> None:
        while not self._ended.is_set():
            sum(range(1000))


def main(_counter: Synchronized[int], planner: str, version: str) -> Callable[[RaceOrder], int | None]:
    """Start the seeds; returns the function that executes commands."""
    return RaceSeeds(planner, version).handle


def checkpoint_of(module: nn.Module, folder: Path) -> Path:
    """Write the module's tensors as a checkpoint of one safetensors file, and return the file."""
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    save_file({name: tensor.data for name, tensor in module.named_parameters()}, path, metadata={"format": "pt"})
    return path
