"""Measure whether a fork is ever slower than the target's own load from disk.

One image of 1 GB with a Llama's shapes, over http from a seed in another process. The target has the same weights as a
safetensors file, whose reads are limited to the rate of a disk, cold. All contenders are what `rfork.fork` does with
that file as `checkpoint`; "own load" has no planner. They run interleaved and fill the same zeroed tensors; after each
run every byte is checked (both untimed). "seconds" is the full call.

- "busy seed": four Python threads of the seed's process hold the interpreter lock.
- "slow link": the seed sends 0.1 GB/s.
- "stalled": the seed sends 0.1 GB/s, and its process is suspended after the first bytes.
- "fast disk": the slow link, and a disk of twice the rate.
- "loader" (full form): the stalled seed, and a loader that reads the complete file, as engines do; the fork is
  abandoned for it. Its disk has a quarter of the rate.
- "peers", "storage": GB of the verified chunks by their origin, in the last round.

The figure is the worst row's median, divided by that of the own load from the same disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from benchmarks import harness
from benchmarks.chaos.disk import rate_limited_reads
from benchmarks.disturb.workers import BenchWorker
from benchmarks.harness import GB, Contender, Row
from benchmarks.pull.source import planner_main, process
from benchmarks.race.seeds import RaceOrder, SourceType, checkpoint_of, race_module, settings_for
from benchmarks.race.seeds import main as run_seeds
from benchmarks.storage.page_cache import make_cold
from rfork import logs, settings
from rfork._api import fork_with_fallbacks
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.receiver.fallback import checkpoint_fallback
from rfork.receiver.report import ForkReport
from rfork.schema import ForkProgress
from rfork.settings import StorageSettings
from rfork.storage.versions.version import version_of_files

DISK_BYTES_PER_S = 400_000_000
"""Rate of the disk of most rows."""
QUICK_ROUNDS = 2
"""Maximum number of rounds of the quick form: each takes a quarter of a minute."""
STALL_BYTES = 16 << 20
"""Bytes after which the seed stalls."""


@dataclass(frozen=True, slots=True)
class RaceCase:
    """One row: the source, None for the own load; the disk's rate; `opaque`: the file is only read by a loader."""

    source: SourceType | None
    bytes_per_s: int = DISK_BYTES_PER_S
    opaque: bool = False

    @property
    def name(self) -> str:
        """Name of the contender."""
        loader = ", loader" if self.opaque else ""
        return f"{self.source or 'own load'}, disk {self.bytes_per_s / GB:g} GB/s{loader}"

    @property
    def own_load(self) -> RaceCase:
        """The contender that it is compared with."""
        return RaceCase(None, self.bytes_per_s, self.opaque)


def cases(*, quick: bool) -> list[RaceCase]:
    """Return all contenders, in the order of the table."""
    fast, loader = 2 * DISK_BYTES_PER_S, DISK_BYTES_PER_S // 4
    cases = [RaceCase(None), RaceCase("busy seed"), RaceCase("slow link"), RaceCase("stalled")]
    cases += [RaceCase(None, fast), RaceCase("slow link", fast)]
    if not quick:
        cases += [RaceCase(None, loader, opaque=True), RaceCase("stalled", loader, opaque=True)]
    return cases


class RaceBench:
    """The target's modules, its checkpoint, and the seeds."""

    def __init__(
        self, module: nn.Module, checkpoint: Path, planner: str, seeds: BenchWorker[RaceOrder, int | None]
    ) -> None:
        self._checkpoint = checkpoint
        self._planner = planner
        self._seeds = seeds
        self._pid = seeds.request(RaceOrder("pid")) or 0
        self._module = module
        self._image = capture(self._module)
        self._expected = self._image.manifest().digests
        self.bytes = self._image.layout.image_bytes
        self.reports: dict[str, ForkReport] = {}

    def contender(self, case: RaceCase) -> Contender:
        """Fill zeroed tensors, and check every byte; returns the seconds of the call."""

        def run() -> float:
            for region in self._image.regions:
                region.zero_()
            make_cold([self._checkpoint])
            with rate_limited_reads(case.bytes_per_s), self._disturbed(case) as on_progress:
                began = time.perf_counter()
                report = self._fork(case, on_progress)
                seconds = time.perf_counter() - began
            if report.seed is not None:
                report.seed.close()
            if self._image.manifest().digests != self._expected:
                raise RforkError(f"wrong bytes in {case.name}")
            self.reports[case.name] = report
            return seconds

        return run

    def _fork(self, case: RaceCase, on_progress: Progress) -> ForkReport:
        storage = settings.load(StorageSettings)
        fallback = checkpoint_fallback(self._checkpoint, storage)
        if case.opaque:
            # Of another type than a loader, whose tensors must not contain random NaNs.
            fallback = replace(fallback, name="loader", open=None)
        return fork_with_fallbacks(
            self._module,
            model=case.source or "own load",
            rank=None,
            snapshot=None,
            later_fallbacks=[fallback],
            files=partial(version_of_files, self._checkpoint, settings=storage),
            exclude=(),
            settings=settings_for(self._planner if case.source is not None else None),
            on_progress=on_progress,
        )

    @contextlib.contextmanager
    def _disturbed(self, case: RaceCase) -> Iterator[Progress]:
        """Disturb the seed for the block; yields the callback for the fork's progress."""
        stalled = False

        def stall(progress: ForkProgress, _image_bytes: int) -> None:
            nonlocal stalled
            if case.source == "stalled" and not stalled and progress.bytes_read >= STALL_BYTES:
                stalled = True
                os.kill(self._pid, signal.SIGSTOP)

        if case.source == "busy seed":
            self._seeds.request(RaceOrder("busy"))
        try:
            yield stall
        finally:
            if stalled:
                os.kill(self._pid, signal.SIGCONT)
            if case.source == "busy seed":
                self._seeds.request(RaceOrder("idle"))


Progress = Callable[[ForkProgress, int], None]


@contextlib.contextmanager
def benchmark() -> Iterator[RaceBench]:
    """Write the checkpoint, and run planner and seeds, for the block."""
    folder = Path(tempfile.mkdtemp(prefix="rfork-race-"))
    try:
        module = race_module()
        checkpoint = checkpoint_of(module, folder)
        version = version_of_files(checkpoint) or ""
        with (
            process(planner_main) as planner,
            BenchWorker("the seeds", os.sched_getaffinity(0), run_seeds, planner, version) as seeds,
        ):
            yield RaceBench(module, checkpoint, planner, seeds)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Run the benchmark, print the table and write the requested files."""
    options = harness.options("race", __doc__)
    if options.quick:
        options = replace(options, rounds=min(options.rounds, QUICK_ROUNDS))
    logs.configure(json=False, level="error")
    all_cases = cases(quick=options.quick)
    with benchmark() as bench:
        contenders = {case.name: bench.contender(case) for case in all_cases}
        seconds = harness.interleave(contenders, options.rounds)
        medians = harness.medians(seconds)
        harness.publish(
            options,
            settings={"image_bytes": bench.bytes, "disk_bytes_per_s": DISK_BYTES_PER_S},
            rows=[row(case, seconds[case.name], medians, bench.reports[case.name]) for case in all_cases],
            figures=figures(medians, all_cases),
            plot=("contender", "seconds"),
        )


def row(case: RaceCase, seconds: Sequence[float], medians: Mapping[str, float], report: ForkReport) -> Row:
    """Return a table row."""
    peers = sum(share.verified_bytes for share in report.sources) - report.storage_bytes
    return {
        "contender": case.name,
        "seconds": medians[case.name],
        "min": min(seconds),
        "max": max(seconds),
        "/ own load": medians[case.name] / medians[case.own_load.name] if case.source is not None else None,
        "peers": peers / GB,
        "storage": report.storage_bytes / GB,
        "outcome": report.outcome,
    }


def figures(medians: Mapping[str, float], all_cases: Sequence[RaceCase]) -> dict[str, float]:
    """Return the figures: each row's fork divided by its own load, and the worst."""
    ratios = {
        case.name: medians[case.name] / medians[case.own_load.name] for case in all_cases if case.source is not None
    }
    return {"fork_vs_own_load_worst": max(ratios.values())}


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
