"""A reader of `benchmarks.disturb`: forks the seed's model again and again until it is told to stop."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Literal

import torch

import rfork
from benchmarks.disturb_crew import LOOPBACK, MODEL, settings_for
from benchmarks.disturb_model import Model
from benchmarks.disturb_seed import broadcasting
from rfork.errors import RforkError
from rfork.wire import ForkProgress

BUFFER = 8 << 20


@dataclass(frozen=True, slots=True)
class Read:
    """`start` to read over `way`, or `stop`. `place`: the bare socket's port, or gloo's store."""

    verb: Literal["start", "stop"]
    way: str = ""
    governed: bool = True
    place: str = ""
    rank: int = 0
    size: int = 0


class Reader:
    """Obeys in a reader's process; reads on a thread of its own. `counter`: bytes that came so far."""

    def __init__(self, counter: Synchronized[int], planner: str) -> None:
        torch.set_num_threads(1)
        self._counter = counter
        self._planner = planner
        self._model = Model()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error = ""

    def obey(self, order: Read) -> None:
        """See `Read`."""
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

    def _run(self, order: Read) -> None:
        try:
            match order.way:
                case "socket":
                    self._receive(int(order.place))
                case "gloo":
                    with broadcasting(self._model, order.rank, order.size, order.place, self._counter):
                        pass
                case _:
                    while not self._stopping.is_set():
                        self._fork(order)
        except (RforkError, OSError, RuntimeError) as error:
            self._error = f"{type(error).__name__}: {error}"

    def _fork(self, order: Read) -> None:
        got = 0

        def count(total: int) -> None:
            nonlocal got
            with self._counter.get_lock():
                self._counter.value += max(0, total - got)
            got = max(got, total)

        def on_progress(progress: ForkProgress, _: int) -> None:
            count(progress.bytes_read)

        options = settings_for(self._planner, order.way, governed=order.governed, reads=True)
        report = rfork.fork(self._model, model=MODEL, settings=options, on_progress=on_progress)
        if report.seed is not None:
            report.seed.close()
        if report.outcome != "forked" or {share.transport for share in report.sources} != {order.way}:
            raise RforkError(f"not a fork over {order.way}: {report.line()}")
        count(report.image_bytes)

    def _receive(self, port: int) -> None:
        block = bytearray(BUFFER)
        with socket.create_connection((LOOPBACK, port)) as connection:
            while not self._stopping.is_set():
                came = connection.recv_into(block)
                with self._counter.get_lock():
                    self._counter.value += came


def main(counter: Synchronized[int], planner: str) -> Callable[[Read], None]:
    """A reader's process."""
    return Reader(counter, planner).obey
