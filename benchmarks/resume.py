"""Measure what a process that dies in mid-fork and restarts has to fetch, and the cost of keeping chunks.

One image of a Llama's shapes, over http from another process, on an unlimited loopback and from a seed
limited to LINK_BYTES per second. Contenders run interleaved and fill the same zeroed tensors; after each run
every byte is checked (both untimed). "seconds" is the full call of `rfork.fork`.

- "fresh": the setting `resume` is off. "fresh, kept on …": it is on, with an empty folder.
- "50 % on …", "90 % on …": that share of the image exists, as left by a process that was killed after
  as many chunks, each written and recorded. "cold": on disk, and not in the page cache.
- "fetched / missing": bytes that came over the network, divided by those that were missing.
- "kept": share of the chunks that were in the spool when the fork ended. The writer uses idle cores: if seed,
  planner and target use them all, it falls behind instead of slowing them down.
- "limit: memcpy" copies the complete image on one core; "limit: disk read" reads the complete file, cold.
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
from benchmarks.pull.source import READY_TIMEOUT_S, settings_for, source_process
from benchmarks.pull.target import PullTarget
from rfork import logs
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.receiver.report import ForkReport
from rfork.receiver.spool import spool_name
from rfork.settings import InstanceSettings
from rfork.source.seed import InstanceIdentity
from rfork.storage.spool import Spool, acquire_spool

MODEL, LINKED = "dense", "dense over a slow link"
LINK_BYTES = 256 << 20
"""Bytes per second of the slow seed: 2 Gbit/s."""
SHARED_MEMORY = Path("/dev/shm")
BLOCK_BYTES = 8 << 20
OPEN, LINK = "loopback", "link"


@dataclass
class ResumeCase:
    """A case: the network path, the spool folder, and the chunks in it before the fork."""

    network_path: str
    spool_location: str | None = None
    percent: int = 0
    cold: bool = False
    fetched: list[float] = field(default_factory=list)
    """Bytes fetched divided by bytes missing, of each run."""
    spool_cost: list[float] = field(default_factory=list)
    """Share of the chunks that were in the spool at the end of each run."""

    @property
    def name(self) -> str:
        """Name of the case in the table."""
        if self.spool_location is None:
            return f"{self.network_path}: fresh"
        if not self.percent:
            return f"{self.network_path}: fresh, kept on {self.spool_location}"
        return f"{self.network_path}: {self.percent} % on {self.spool_location}" + (", cold" if self.cold else "")


def cases() -> list[ResumeCase]:
    """Return all cases, in the order of the table."""
    cases: list[ResumeCase] = []
    for network_path in (OPEN, LINK):
        cases += [ResumeCase(network_path), ResumeCase(network_path, "disk"), ResumeCase(network_path, "shm")]
        cases += [
            ResumeCase(network_path, spool_location, percent)
            for percent in (50, 90)
            for spool_location in ("disk", "shm")
        ]
    return [*cases, *(ResumeCase(LINK, "disk", percent, cold=True) for percent in (50, 90))]


class ResumeBench:
    """The target, its expected bytes, and the folders."""

    def __init__(self, target: PullTarget, planner: str, folders: dict[str, Path]) -> None:
        self.target = target
        self.folders = folders
        self.options = settings_for(planner, ("http",))
        self.original = capture(target.original)
        self.chunks = self.original.layout.chunks

    def contender(self, case: ResumeCase) -> Contender:
        """Prepare the spool (untimed), then fork, and check every byte (untimed)."""
        checked = self.target.run_checked(partial(self._fork, case))

        def run() -> float:
            if case.spool_location is not None and case.percent:
                self._leave_spool(case.spool_location, case, cold=case.cold)
            return checked()

        return run

    def _fork(self, case: ResumeCase) -> float:
        folder = self.folders[case.spool_location] if case.spool_location is not None else None
        options: InstanceSettings = self.options.model_copy(update={"resume_dir": folder})
        with measured_cases() as spool_cost:
            began = time.perf_counter()
            report = rfork.fork(self.target.module, model=model_of(case.network_path), settings=options)
            seconds = time.perf_counter() - began
        if report.seed is not None:
            report.seed.close()
        if report.outcome != "forked":
            raise RforkError(f"not a fork: {report.line()}")
        self._record(case, report, len(spool_cost))
        return seconds

    def _record(self, case: ResumeCase, report: ForkReport, spool_cost: int) -> None:
        before = len(self.chunks) * case.percent // 100
        missing = sum(end - begin for begin, end in list(self.chunks)[before:])
        case.fetched.append(report.bytes_read / missing)
        case.spool_cost.append((before + spool_cost) / len(self.chunks))

    def _leave_spool(self, spool_location: str, case: ResumeCase, *, cold: bool) -> Path:
        """Leave the spool of a process that was killed after the first chunks of the case."""
        spool = acquire_spool(
            self.folders[spool_location],
            spool_name(InstanceIdentity(model_of(case.network_path))),
            self.original.layout,
        )
        for chunk in range(len(self.chunks) * case.percent // 100):
            begin, end = self.chunks[chunk]
            with self.original.readable(begin, end) as views:
                spool.write(begin, views)
            spool.record(chunk, self.target.expected[chunk])
        spool.close()
        if cold:
            evict(spool.path)
        return spool.path

    def disk_read(self) -> Contender:
        """Read the complete file from disk, sequentially: the limit of a cold start."""
        path = self._leave_spool("disk", ResumeCase("limit", "disk", 100), cold=False)
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
def measured_cases() -> Iterator[list[int]]:
    """Record the chunks that are kept during the block."""
    record, spool_cost = Spool.record, list[int]()

    def recording(self: Spool, chunk: int, digest: bytes) -> None:
        record(self, chunk, digest)
        spool_cost.append(chunk)

    with unittest.mock.patch.object(Spool, "record", recording):
        yield spool_cost


def model_of(network_path: str) -> str:
    """Return the model name that the seed of a network path serves."""
    return MODEL if network_path == OPEN else f"{LINKED} ({network_path})"


def evict(path: Path) -> None:
    """Write a file to disk and drop it from the page cache."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folders() -> Iterator[dict[str, Path]]:
    """Yield an empty folder on disk and one in shared memory, for the block."""
    folders = {"disk": Path(tempfile.mkdtemp()), "shm": Path(tempfile.mkdtemp(dir=SHARED_MEMORY))}
    try:
        yield folders
    finally:
        for folder in folders.values():
            shutil.rmtree(folder)


def main() -> None:
    """Run the benchmark, print the table and write the requested files."""
    options = harness.options("resume", __doc__)
    logs.configure(json=False, level="warning")
    # The image of about 256 MiB is the quick one of `benchmarks.pull`.
    with contextlib.ExitStack() as stack:
        planner, offer = stack.enter_context(source_process(True))
        target = PullTarget(MODEL, shapes.dense, True, offer)
        bench = ResumeBench(target, planner, stack.enter_context(folders()))
        # In this process: a rate that leaves the cores idle disturbs nothing.
        slow = bench.options.model_copy(update={"max_egress_bytes_per_s": LINK_BYTES})
        seed = stack.enter_context(rfork.seed(target.original, model=model_of(LINK), settings=slow))
        if not seed.wait_registered(READY_TIMEOUT_S):
            raise RforkError("the planner did not respond to the seed")
        all_cases = cases()
        contenders: dict[str, Contender] = {case.name: bench.contender(case) for case in all_cases}
        contenders["limit: memcpy"] = target.run_checked(target.memcpy())
        contenders["limit: disk read"] = bench.disk_read()
        for warm_up in (all_cases[0], all_cases[1], all_cases[2]):
            contenders[warm_up.name]()
            warm_up.fetched.clear()
            warm_up.spool_cost.clear()
        seconds = harness.interleave(contenders, options.rounds)
    harness.publish(
        options,
        settings={
            "image_bytes": target.bytes,
            "chunks": len(bench.chunks),
            "link_bytes_per_s": LINK_BYTES,
        },
        rows=[row(name, values, target.bytes, all_cases) for name, values in seconds.items()],
        figures=figures(harness.medians(seconds), all_cases),
        plot=("contender", "seconds"),
    )


def row(name: str, seconds: Sequence[float], size: int, all_cases: Sequence[ResumeCase]) -> Row:
    """Return a table row."""
    case = next((case for case in all_cases if case.name == name), None)
    values: dict[str, harness.Value] = {
        "contender": name,
        "seconds": median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "GB/s": size / harness.GB / median(seconds),
        "fetched / missing": None,
        "kept": None,
    }
    if case is not None:
        values["fetched / missing"] = max(case.fetched)
        values["kept"] = median(case.spool_cost) if case.spool_location is not None else None
    return values


def figures(seconds: dict[str, float], all_cases: Sequence[ResumeCase]) -> dict[str, float]:
    """Return the figures: the worse of disk and shared memory; costs are relative to a fork that keeps
    nothing.
    """

    def worst(chosen: Callable[[ResumeCase], bool]) -> float:
        return max(
            seconds[case.name] / seconds[ResumeCase(case.network_path).name] for case in all_cases if chosen(case)
        )

    def fetched(percent: int) -> float:
        return max(max(case.fetched) for case in all_cases if case.percent == percent)

    return {
        "resume_fetched_share_50": fetched(50),
        "resume_fetched_share_90": fetched(90),
        "resume_spool_cost": worst(lambda case: case.network_path == LINK and _keeps(case)) - 1,
        "resume_spool_cost_loopback": worst(lambda case: case.network_path == OPEN and _keeps(case)) - 1,
        "resume_time_50": worst(lambda case: case.network_path == LINK and case.percent == 50),
        "resume_time_90": worst(lambda case: case.network_path == LINK and case.percent == 90),
        "resume_time_50_loopback": worst(lambda case: case.network_path == OPEN and case.percent == 50),
    }


def _keeps(case: ResumeCase) -> bool:
    return case.spool_location is not None and not case.percent


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
