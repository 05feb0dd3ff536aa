"""How one slot of `benchmarks.disturb` goes, and the processes that take part in all of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import disturb_reader, disturb_seed
from benchmarks.disturb_case import Case, Told
from benchmarks.disturb_crew import PATIENCE_S, Worker, other_cores, plan, seed_cores
from benchmarks.disturb_reader import Read
from benchmarks.disturb_seed import Order
from benchmarks.harness import Contender
from rfork.errors import RforkError

MOST_READERS = 3
SeedWorker = Worker[Order, Told | int | None]
ReaderWorker = Worker[Read, None]


@dataclass(frozen=True, slots=True)
class Slot:
    """How much is asked of the seed in one slot: requests of so many tokens, or seconds of idleness."""

    requests: int
    tokens: int
    idle_s: float


class Run:
    """Makes contenders of cases: each runs one slot, pools what it gave, and returns its seconds."""

    def __init__(self, seed: SeedWorker, readers: Sequence[ReaderWorker], slot: Slot) -> None:
        self._seed = seed
        self._readers = readers
        self._slot = slot

    def contender(self, case: Case, pool: Told) -> Contender:
        """One slot of a case."""

        def run() -> float:
            with tempfile.TemporaryDirectory(prefix="rfork-disturb-") as folder:
                store = str(Path(folder) / "store")
                self._seed.tell(Order("open", case, tokens=self._slot.tokens, store=store))
                readers = self._readers[: case.readers]
                if case.way == "gloo":  # nobody is there before all are
                    self._start(readers, case, store)
                self._seed.reply()
                if case.way not in ("gloo", "idle"):
                    self._start(readers, case, "")
                told = self._measured(case.serves, readers)
                if case.way == "gloo":  # its end comes from the seed
                    self._close()
                self._stop(readers)
                if case.way != "gloo":
                    self._close()
            pool.add(told)
            return told.seconds

        return run

    def socket(self, pool: Told) -> Contender:
        """The limit of the speed: one bare connection, the seed idles."""

        def run() -> float:
            port = self._seed.ask(Order("socket"))
            readers = self._readers[:1]
            readers[0].ask(Read("start", "socket", place=str(port)))
            told = self._measured(False, readers)
            self._stop(readers)
            self._close()
            pool.add(told)
            return told.seconds

        return run

    def _measured(self, serves: bool, readers: Sequence[ReaderWorker]) -> Told:
        before = sum(reader.counter.value for reader in readers)
        if serves:
            told = self._seed.ask(Order("serve", requests=self._slot.requests, tokens=self._slot.tokens))
        else:
            told = self._seed.ask(Order("idle", seconds=self._slot.idle_s))
        if not isinstance(told, Told):
            raise RforkError(f"the seed answered {told!r}")
        told.bytes_read = sum(reader.counter.value for reader in readers) - before
        return told

    def _start(self, readers: Sequence[ReaderWorker], case: Case, store: str) -> None:
        for rank, reader in enumerate(readers, start=1):
            reader.ask(Read("start", case.way, case.governed, store, rank, len(readers) + 1))

    def _stop(self, readers: Sequence[ReaderWorker]) -> None:
        for reader in readers:
            reader.tell(Read("stop"))
        for reader in readers:
            reader.reply()

    def _close(self) -> None:
        self._seed.ask(Order("close"))


@contextlib.contextmanager
def crew() -> Iterator[tuple[SeedWorker, list[ReaderWorker]]]:
    """The planner, the seed's process and the readers', each on its cores, until the block ends."""
    here = os.sched_getaffinity(0)
    context = multiprocessing.get_context("spawn")
    url, there = context.Pipe()
    first, others = seed_cores(), other_cores()
    os.sched_setaffinity(0, others)
    planner = context.Process(target=plan, args=(there, others), daemon=True)
    planner.start()
    try:
        if not url.poll(PATIENCE_S):
            raise RforkError("the planner did not start")
        at = url.recv()
        with contextlib.ExitStack() as workers:
            seed: SeedWorker = workers.enter_context(Worker("the seed", first, disturb_seed.main, at))
            readers = [
                workers.enter_context(Worker(f"reader {number + 1}", others, disturb_reader.main, at))
                for number in range(MOST_READERS)
            ]
            yield seed, readers
    finally:
        planner.terminate()
        planner.join()
        os.sched_setaffinity(0, here)
