"""What does a process that dies in mid-fork and comes back have to fetch, and what does keeping cost?

One image of a Llama's shapes, over http from another process, on an open loopback and from a seed that gives
at most LINK_BYTES a second. Contenders run interleaved and fill the same zeroed tensors; after each run
every byte is checked (both untimed). "seconds" is the whole call of `rfork.fork`.

- "fresh": the setting `resume` is off. "fresh, kept on …": it is on, and nothing was there before.
- "50 % on …", "90 % on …": so much of the image is there, as a process leaves it that is killed after
  so many chunks, each written and recorded. "cold": on disk, and no longer in the page cache.
- "fetched / missing": bytes that came over the network, over those that were not there.
- "kept": share of the chunks that were on the folder's side when the fork ended. What the cores leave is
  what the writer has: where seed, planner and target fill them, it falls behind instead of slowing them.
- "limit: memcpy" copies the whole image on one core; "limit: disk read" reads the file's whole image, cold.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import rfork
from benchmarks import harness, shapes
from benchmarks.harness import Contender, Row
from benchmarks.pull_source import PATIENCE_S, giving, settings_for
from benchmarks.pull_target import Target
from rfork import logs
from rfork.errors import RforkError
from rfork.fork.keeper import name_of
from rfork.fork.report import ForkReport
from rfork.image.capture import capture
from rfork.seed.seed import Identity
from rfork.settings import Settings
from rfork.storage.claim import claim
from rfork.storage.spool import Spool

MODEL, LINKED = "dense", "dense behind a link"
LINK_BYTES = 256 << 20
"""Bytes a second of the slow seed: 2 Gbit/s."""
SHARED_MEMORY = Path("/dev/shm")
BLOCK_BYTES = 8 << 20
OPEN, LINK = "loopback", "link"


@dataclass
class Case:
    """One way to fork: over which road, with which folder, and what lies there before."""

    road: str
    place: str | None = None
    percent: int = 0
    cold: bool = False
    fetched: list[float] = field(default_factory=list)
    """Of each run, bytes fetched over bytes missing."""
    kept: list[float] = field(default_factory=list)
    """Of each run, the share of the chunks that were in the spool at its end."""

    @property
    def name(self) -> str:
        """Its name in the table."""
        if self.place is None:
            return f"{self.road}: fresh"
        if not self.percent:
            return f"{self.road}: fresh, kept on {self.place}"
        return f"{self.road}: {self.percent} % on {self.place}" + (", cold" if self.cold else "")


def cases() -> list[Case]:
    """Everybody, in the order of the table."""
    made: list[Case] = []
    for road in (OPEN, LINK):
        made += [Case(road), Case(road, "disk"), Case(road, "shm")]
        made += [Case(road, place, percent) for percent in (50, 90) for place in ("disk", "shm")]
    return [*made, *(Case(LINK, "disk", percent, cold=True) for percent in (50, 90))]


class Bench:
    """The target, what it must hold, and the folders."""

    def __init__(self, target: Target, planner: str, folders: dict[str, Path]) -> None:
        self.target = target
        self.folders = folders
        self.options = settings_for(planner, ("http",))
        self.original = capture(target.original)
        self.chunks = self.original.layout.chunks

    def contender(self, case: Case) -> Contender:
        """Lay out what is there before (untimed), then fork, and check every byte (untimed)."""
        checked = self.target.checked(partial(self._fork, case))

        def run() -> float:
            if case.place is not None and case.percent:
                self._leave(case.place, case, cold=case.cold)
            return checked()

        return run

    def _fork(self, case: Case) -> float:
        folder = self.folders[case.place] if case.place is not None else None
        options: Settings = self.options.model_copy(update={"resume": folder})
        with counted() as kept:
            began = time.perf_counter()
            report = rfork.fork(self.target.module, model=model_of(case.road), settings=options)
            seconds = time.perf_counter() - began
        if report.seed is not None:
            report.seed.close()
        if report.outcome != "forked":
            raise RforkError(f"not a fork: {report.line()}")
        self._note(case, report, len(kept))
        return seconds

    def _note(self, case: Case, report: ForkReport, kept: int) -> None:
        before = len(self.chunks) * case.percent // 100
        missing = sum(end - begin for begin, end in list(self.chunks)[before:])
        case.fetched.append(report.bytes_read / missing)
        case.kept.append((before + kept) / len(self.chunks))

    def _leave(self, place: str, case: Case, *, cold: bool) -> Path:
        """What a process leaves that dies with the first so many chunks."""
        spool = claim(self.folders[place], name_of(Identity(model_of(case.road))), self.original.layout)
        for chunk in range(len(self.chunks) * case.percent // 100):
            begin, end = self.chunks[chunk]
            with self.original.readable(begin, end) as views:
                spool.write(begin, views)
            spool.record(chunk, self.target.right[chunk])
        spool.close()
        if cold:
            evict(spool.path)
        return spool.path

    def disk_read(self) -> Contender:
        """The limit of a cold start: the whole file, from the disk, in order."""
        path = self._leave("disk", Case("limit", "disk", 100), cold=False)
        scratch = memoryview(bytearray(BLOCK_BYTES))

        def run() -> float:
            evict(path)
            began = time.perf_counter()
            with path.open("rb", buffering=0) as file:
                while file.readinto(scratch):
                    pass
            return time.perf_counter() - began

        return run


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The chunks that are kept while the block runs."""
    record, kept = Spool.record, list[int]()

    def recording(self: Spool, chunk: int, digest: bytes) -> None:
        record(self, chunk, digest)
        kept.append(chunk)

    with unittest.mock.patch.object(Spool, "record", recording):
        yield kept


def model_of(road: str) -> str:
    """The name under which a road's seed gives."""
    return MODEL if road == OPEN else f"{LINKED} ({road})"


def evict(path: Path) -> None:
    """Have a file on disk, and not in the page cache."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folders() -> Iterator[dict[str, Path]]:
    """An empty folder on disk and one in shared memory, for the time of the block."""
    made = {"disk": Path(tempfile.mkdtemp()), "shm": Path(tempfile.mkdtemp(dir=SHARED_MEMORY))}
    try:
        yield made
    finally:
        for folder in made.values():
            shutil.rmtree(folder)


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = harness.options("resume", __doc__)
    logs.configure(json=False, level="warning")
    # The image of about 256 MiB is the quick one of `benchmarks.pull`.
    with contextlib.ExitStack() as stack:
        planner, offer = stack.enter_context(giving(True))
        target = Target(MODEL, shapes.dense, True, offer)
        bench = Bench(target, planner, stack.enter_context(folders()))
        # In this process, where a rate that leaves the cores idle disturbs nobody.
        slow = bench.options.model_copy(update={"egress_rate": LINK_BYTES})
        seed = stack.enter_context(rfork.seed(target.original, model=model_of(LINK), settings=slow))
        if not seed.wait_acknowledged(PATIENCE_S):
            raise RforkError("the planner did not answer the seed")
        everyone = cases()
        contenders: dict[str, Contender] = {case.name: bench.contender(case) for case in everyone}
        contenders["limit: memcpy"] = target.checked(target.memcpy())
        contenders["limit: disk read"] = bench.disk_read()
        for warm_up in (everyone[0], everyone[1], everyone[2]):
            contenders[warm_up.name]()
            warm_up.fetched.clear()
            warm_up.kept.clear()
        seconds = harness.interleave(contenders, options.rounds)
    harness.publish(
        options,
        settings={
            "image_bytes": target.bytes,
            "chunks": len(bench.chunks),
            "link_bytes_per_s": LINK_BYTES,
        },
        rows=[row(name, values, target.bytes, everyone) for name, values in seconds.items()],
        figures=figures(harness.medians(seconds), everyone),
        plot=("contender", "seconds"),
    )


def row(name: str, seconds: Sequence[float], size: int, everyone: Sequence[Case]) -> Row:
    """One line of the table."""
    case = next((case for case in everyone if case.name == name), None)
    values: dict[str, harness.Value] = {
        "contender": name,
        "seconds": median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "GB/s": size / harness.GB / median(seconds),
        "fetched / missing": None,
        "kept": None,
    }
    if case is not None:
        values["fetched / missing"] = max(case.fetched)
        values["kept"] = median(case.kept) if case.place is not None else None
    return values


def figures(seconds: dict[str, float], everyone: Sequence[Case]) -> dict[str, float]:
    """The worst of disk and shared memory; costs are shares of the time of a fork that keeps nothing."""

    def worst(chosen: Callable[[Case], bool]) -> float:
        return max(seconds[case.name] / seconds[Case(case.road).name] for case in everyone if chosen(case))

    def fetched(percent: int) -> float:
        return max(max(case.fetched) for case in everyone if case.percent == percent)

    return {
        "resume_fetched_share_50": fetched(50),
        "resume_fetched_share_90": fetched(90),
        "resume_spool_cost": worst(lambda case: case.road == LINK and _keeps(case)) - 1,
        "resume_spool_cost_loopback": worst(lambda case: case.road == OPEN and _keeps(case)) - 1,
        "resume_time_50": worst(lambda case: case.road == LINK and case.percent == 50),
        "resume_time_90": worst(lambda case: case.road == LINK and case.percent == 90),
        "resume_time_50_loopback": worst(lambda case: case.road == OPEN and case.percent == 50),
    }


def _keeps(case: Case) -> bool:
    return case.place is not None and not case.percent


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
