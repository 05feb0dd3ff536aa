"""Runs one slot of `benchmarks.disturb`, and owns the processes that all slots share."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.disturb.cases import DisturbCase, SlotResult
from benchmarks.disturb.reader import ReaderOrder
from benchmarks.disturb.reader import main as run_reader
from benchmarks.disturb.seed import SeedOrder
from benchmarks.disturb.seed import main as run_seed
from benchmarks.disturb.workers import REPLY_TIMEOUT_S, BenchWorker, other_cores, planner_process, seed_cores
from benchmarks.harness import Contender
from rfork.errors import RforkError

MAX_READERS = 3
SeedWorker = BenchWorker[SeedOrder, SlotResult | int | None]
ReaderWorker = BenchWorker[ReaderOrder, None]


@dataclass(frozen=True, slots=True)
class SlotSize:
    """Load of one slot: requests of a number of tokens, or seconds of idleness."""

    requests: int
    tokens: int
    idle_s: float


class DisturbRunner:
    """Makes contenders of cases: each runs one slot, pools its results, and returns its seconds."""

    def __init__(self, seed: SeedWorker, readers: Sequence[ReaderWorker], slot: SlotSize) -> None:
        self._seed = seed
        self._readers = readers
        self._slot = slot

    def contender(self, case: DisturbCase, pool: SlotResult) -> Contender:
        """Run one slot of a case."""

        def run() -> float:
            with tempfile.TemporaryDirectory(prefix="rfork-disturb-") as folder:
                store = str(Path(folder) / "store")
                cores = frozenset(os.sched_getaffinity(0))  # this process is pinned to those of the readers
                order = SeedOrder("open", case, tokens=self._slot.tokens, store=store, other_cores=cores)
                self._seed.send(order)
                readers = self._readers[: case.readers]
                if case.transport == "gloo":  # the group forms only once all ranks have joined
                    self._start(readers, case, store)
                self._seed.reply()
                if case.transport not in ("gloo", "idle"):
                    self._start(readers, case, "")
                result = self._measure(case.serves, readers)
                if case.transport == "gloo":  # the seed ends the broadcast
                    self._close()
                self._stop(readers)
                if case.transport != "gloo":
                    self._close()
            pool.add(result)
            return result.seconds

        return run

    def socket(self, pool: SlotResult) -> Contender:
        """Measure the limit of the speed: one bare connection while the seed idles."""

        def run() -> float:
            port = self._seed.request(SeedOrder("socket"))
            readers = self._readers[:1]
            readers[0].request(ReaderOrder("start", "socket", store=str(port)))
            result = self._measure(False, readers)
            self._stop(readers)
            self._close()
            pool.add(result)
            return result.seconds

        return run

    def _measure(self, serves: bool, readers: Sequence[ReaderWorker]) -> SlotResult:
        before = sum(reader.counter.value for reader in readers)
        if serves:
            result = self._seed.request(SeedOrder("serve", requests=self._slot.requests, tokens=self._slot.tokens))
        else:
            result = self._seed.request(SeedOrder("idle", seconds=self._slot.idle_s))
        if not isinstance(result, SlotResult):
            raise RforkError(f"unexpected response of the seed: {result!r}")
        result.bytes_read = sum(reader.counter.value for reader in readers) - before
        return result

    def _start(self, readers: Sequence[ReaderWorker], case: DisturbCase, store: str) -> None:
        for rank, reader in enumerate(readers, start=1):
            reader.request(ReaderOrder("start", case.transport, case.governed, store, rank, len(readers) + 1))

    def _stop(self, readers: Sequence[ReaderWorker]) -> None:
        for reader in readers:
            reader.send(ReaderOrder("stop"))
        for reader in readers:
            reader.reply()

    def _close(self) -> None:
        self._seed.request(SeedOrder("close"))


@contextlib.contextmanager
def start_processes() -> Iterator[tuple[SeedWorker, list[ReaderWorker]]]:
    """Run the planner, the seed's process and the readers' processes, each pinned to its cores, for the
    block.
    """
    here = os.sched_getaffinity(0)
    context = multiprocessing.get_context("spawn")
    url, there = context.Pipe()
    first, others = seed_cores(), other_cores()
    os.sched_setaffinity(0, others)
    planner = context.Process(target=planner_process, args=(there, others), daemon=True)
    planner.start()
    try:
        if not url.poll(REPLY_TIMEOUT_S):
            raise RforkError("the planner did not start")
        at = url.recv()
        with contextlib.ExitStack() as workers:
            seed: SeedWorker = workers.enter_context(BenchWorker("the seed", first, run_seed, at))
            readers = [
                workers.enter_context(BenchWorker(f"reader {number + 1}", others, run_reader, at))
                for number in range(MAX_READERS)
            ]
            yield seed, readers
    finally:
        planner.terminate()
        planner.join()
        os.sched_setaffinity(0, here)
