"""Measure the time from the start of an engine's server to its first token, and where it goes.

Stock vLLM and SGLang servers on the CPU, with the random 2.3 GB model of `benchmarks.engines`. "Another host" is a
network namespace of its own, whose link is shaped to 200 MB/s, or unlimited ("open link", full form only): processes
of two namespaces share no memory. A request for one greedy token is repeated until the server answers; "first token s"
is from the start of the server's process to that answer. Each server is killed after its row. Contenders run
interleaved, every second round in reverse order; all tokens must be equal.

- "start-up alone": the engine without weights (`--load-format dummy`, with memory left as it is and nothing packed).
- "transfer alone": one TCP connection sends as many bytes as the weights have over the same link.
- "default loader": the engine's own, from a local disk. "cold": the files were dropped from the page cache.
- "rfork": `rfork launch`; the model folder has no weights. The seed is the same engine on another host, which has
  loaded the model.
- "with prefetch": `rfork launch` starts a holder that fetches while the engine imports; "fetched" is when.
- "holder has the image": a holder of the engine's host (`rfork hold`) fetched it before. "restart": the same engine
  again, after SIGKILL.

The other columns are the phases of the start: imports (all processes of the engine), its initialisation, the build of
the empty model, and what belongs to the weights: rfork's checks, the fork's own phases, or the engine's loader
("load"); then the engine's warm-up and the first token. "weights s" is the sum of those that belong to the weights.
Until an engine begins to load, memory is kept for it as in `benchmarks.engines`.

"floor" is the larger of "start-up alone" and, if the weights come from another host, "transfer alone". `--plot` draws
all phases as a timeline. The quick form is vLLM, the shaped link and one round; `--engine` selects another.

`ready_vs_floor`: start with prefetch / floor. `ready_restart_weights`: weights of the restart / of the default loader
with a warm cache. Both of the worse engine. Needs root, `ip` and `tc`, and the engines of `make test-engines`. SIGTERM
ends the run early and reports the results so far.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness, netlab
from benchmarks.engines.cases import EngineName
from benchmarks.engines.model import without_weights, write_model
from benchmarks.engines.processes import EngineFailed, python_of
from benchmarks.ready.cases import OPEN, SHAPED, START_UP, Link, ReadyCase, cases_of
from benchmarks.ready.lab import ReadyLab
from benchmarks.ready.phases import Start
from benchmarks.ready.table import figures, floor_s, limit_row, median_start, row
from benchmarks.ready.timeline import draw
from rfork.errors import RforkError

ROUNDS, QUICK_ROUNDS = 3, 1
ENGINES: Sequence[EngineName] = ("vllm", "sglang")


class ReadyBench:
    """The starts measured so far, and why cases did not run."""

    def __init__(self, lab: ReadyLab, engines: Sequence[EngineName], links: Sequence[Link]) -> None:
        self._lab = lab
        self.cases = {engine: cases_of(engine, links) for engine in engines}
        self.starts: dict[ReadyCase, list[Start]] = {case: [] for cases in self.cases.values() for case in cases}
        self.link_seconds: dict[Link, list[float]] = {link: [] for link in links}
        self.failed: dict[str, str] = {}

    def measure(self, engine: EngineName, rounds: int) -> None:
        """Run all cases of one engine, interleaved."""
        if python_of(engine) is None:
            self.failed[engine] = "not installed: make test-engines"
            return
        cases = self.cases[engine]
        alone = [case for case in cases if not case.needs_holder]
        with self._lab.seed(engine):
            for number in range(rounds):
                for case in alone if number % 2 == 0 else alone[::-1]:
                    self._run(case, f"round {number + 1}/{rounds}")
                with self._lab.holder():
                    for case in cases:
                        if case.needs_holder:
                            self._run(case, f"round {number + 1}/{rounds}")
        texts = {start.text for case in cases if case.name != START_UP for start in self.starts[case]}
        if len(texts) > 1:
            raise RforkError(f"{engine} generates different tokens depending on the source of its weights: {texts}")

    def _run(self, case: ReadyCase, progress: str) -> None:
        if case.key in self.failed:
            return
        print(f"{progress}: {case.key}", file=sys.stderr)
        try:
            self.starts[case].append(self._lab.start(case))
        except EngineFailed as error:
            self.failed[case.key] = str(error).strip().splitlines()[-1][:200]
            self.starts[case].clear()


def parse(arguments: Sequence[str] | None = None) -> tuple[harness.Options, Sequence[EngineName]]:
    """Parse the common benchmark options and the engine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ready", add_help=False)
    parser.add_argument("--engine", choices=ENGINES, help="measure only this one")
    chosen, rest = parser.parse_known_args(arguments)
    options = harness.options("ready", __doc__, rest, rounds=ROUNDS, quick_rounds=QUICK_ROUNDS, own=parser)
    engines = [chosen.engine] if chosen.engine else ENGINES[:1] if options.quick else ENGINES
    return options, engines


def main() -> None:
    """Run the benchmark, print the table and write the requested files."""
    options, engines = parse()
    harness.exit_on_sigterm()
    if reason := netlab.unavailable_reason():
        raise RforkError(reason)
    links = [SHAPED] if options.quick else [SHAPED, OPEN]
    with tempfile.TemporaryDirectory(prefix="rfork-ready-") as name:
        folder = Path(name)
        size = write_model(folder / "model", quick=False)
        without_weights(folder / "model", folder / "bare" / "model")
        with ReadyLab(folder) as lab:
            lab.image_bytes = size
            bench = ReadyBench(lab, engines, links)
            try:
                for link in links:
                    bench.link_seconds[link].extend(lab.transfer_seconds(link, size) for _ in range(options.rounds))
                for engine in engines:
                    bench.measure(engine, options.rounds)
            except SystemExit:  # ended early: report the results so far, with their number of runs
                bench.failed["the rest"] = "ended before it finished"
    publish(options, bench, size)


def publish(options: harness.Options, bench: ReadyBench, size: int) -> None:
    """Print the table and the figures, and write the requested files."""
    measured = {case: starts for case, starts in bench.starts.items() if starts}
    limits = {link: seconds for link, seconds in bench.link_seconds.items() if seconds}
    rows = [row(case, starts, floor_s(case, measured, limits)) for case, starts in measured.items()]
    shown = {case.key: median_start(starts) for case, starts in measured.items()}
    limit_rows = [limit_row(link, seconds) for link, seconds in limits.items()]
    harness.publish(
        options,
        settings={"image_bytes": size, **{f"not run: {key}": reason for key, reason in bench.failed.items()}},
        rows=[*rows, *limit_rows],
        figures=figures(measured, limits),
        plot=lambda path: draw(
            path,
            f"exec to first token, {size / harness.GB:.1f} GB of weights",
            shown,
            {str(limit["contender"]): float(limit["first token s"] or 0) for limit in limit_rows},
        ),
    )
    for key, reason in bench.failed.items():
        print(f"did not run: {key}: {reason}")


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(str(error)) from None
