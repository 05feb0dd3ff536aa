"""Reader of `benchmarks.disturb`: forks the seed's model in a loop until it is stopped."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Literal

import torch

from benchmarks.disturb.model import BenchModel
from benchmarks.disturb.seed import broadcasting
from benchmarks.disturb.workers import LOOPBACK, fork_without_serving, settings_for
from rfork.errors import RforkError
from rfork.schema import ForkProgress

BUFFER = 8 << 20


@dataclass(frozen=True, slots=True)
class ReaderOrder:
    """Command to `start` reading over `transport`, or to `stop`. `store`: the bare socket's port, or gloo's
    store.
    """

    verb: Literal["start", "stop"]
    transport: str = ""
    governed: bool = True
    store: str = ""
    rank: int = 0
    size: int = 0


class BenchReader:
    """Executes commands in a reader's process; reads on a separate thread. `counter`: bytes received so far."""

    def __init__(self, counter: Synchronized[int], planner: str) -> None:
        torch.set_num_threads(1)
        self._counter = counter
        self._planner = planner
        self._model = BenchModel()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error = ""

    def handle(self, order: ReaderOrder) -> None:
        """Execute a command; see `ReaderOrder`."""
        if order.verb == "start":
            self._stopping.clear()
            self._error = ""
            self._thread = threading.Thread(target=self._run, args=(order,), daemon=True)
            self._thread.start()
            return
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._error:
            raise RforkError(self._error)

    def _run(self, order: ReaderOrder) -> None:
        try:
            match order.transport:
                case "socket":
                    self._receive(int(order.store))
                case "gloo":
                    with broadcasting(self._model, order.rank, order.size, order.store, self._counter):
                        pass
                case _:
                    while not self._stopping.is_set():
                        self._fork(order)
        except (RforkError, OSError, RuntimeError) as error:
            self._error = f"{type(error).__name__}: {error}"

    def _fork(self, order: ReaderOrder) -> None:
        received_bytes = 0

        def count(total: int) -> None:
            nonlocal received_bytes
            with self._counter.get_lock():
                self._counter.value += max(0, total - received_bytes)
            received_bytes = max(received_bytes, total)

        def on_progress(progress: ForkProgress, _: int) -> None:
            count(progress.bytes_read)

        options = settings_for(self._planner, order.transport, governed=order.governed)
        report = fork_without_serving(self._model, options, on_progress)
        if report.seed is not None:
            report.seed.close()
        if report.outcome != "forked" or {share.transport for share in report.sources} != {order.transport}:
            raise RforkError(f"not a fork over {order.transport}: {report.line()}")
        count(report.image_bytes)

    def _receive(self, port: int) -> None:
        block = bytearray(BUFFER)
        with socket.create_connection((LOOPBACK, port)) as connection:
            while not self._stopping.is_set():
                received = connection.recv_into(block)
                with self._counter.get_lock():
                    self._counter.value += received


def main(counter: Synchronized[int], planner: str) -> Callable[[ReaderOrder], None]:
    """Entry point of a reader's process."""
    return BenchReader(counter, planner).handle
