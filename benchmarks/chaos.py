"""Does every fork end right, whatever dies, hangs, loses its link or its disk while it runs?

Each round is drawn from its number (`benchmarks.chaos_scenarios`): 3 to 5 targets, on links of 160 Mbit/s
between network namespaces (`benchmarks.netlab`), fork an image of 32 to 64 MiB from one or two seeds, or
start cold from a checkpoint or a snapshot; the planner keeps its books in memory or in Redis. Once a
target has a drawn share of the image, one or two of these are done:

- kill: SIGKILL to a seed, a relay (a target that others read from), a target, the planner or Redis; the
  last two come back, empty, up to 3 s later. stop: SIGSTOP, and SIGCONT after a source that is silent
  counts as stalled (2 s).
- cut: a link carries nothing, either way, for 1 to 6 s or to the end of the round. loss: it loses one
  packet in twenty, either way, to the end of the round.
- full: no byte is left on the disk that a target keeps what it has on (`RFORK_RESUME_DIR`), or that a seed
  writes a snapshot to. Reading a snapshot writes nothing. torn: the checkpoint or snapshot that a target
  reads, for all that wait, is cut in half under it.

After each round (`benchmarks.chaos_checks`) every target that was not killed has the seed's bytes, by a
SHA-256 that the transfer never used, or says why it has none; each was done by its deadline (30 s, and
10 s to fall back); no process has a thread or a file more than at its birth, nor grows; what was asked
for again is, for each fault, no more than was in flight and one chunk; nobody failed ("lost") who had files
of its own, or a seed that nothing was done to; no process died or logged a traceback; and the planners
forgot what is gone ("books") and leaked nothing. The table has a row for each fault and role: "rounds"; of
the targets how many "forked", "fell back", "failed" (said so, with every reason) and were "killed"; what is
wrong; and "recovery s", the longest from the last fault to the end of the last fork. A round with two
faults counts in both their rows, and once in "all".

`--only SEED` runs one round again, and shows what its processes logged. Needs root, `ip` and `tc`; without
them it says so, and measures nothing. Rounds with Redis need `redis-server`.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console

from benchmarks import harness, netlab
from benchmarks.chaos_checks import Finding, RoundObservation, check_round
from benchmarks.chaos_cluster import DEADLINE_S, RATE, WINDOW, ChaosCluster
from benchmarks.chaos_runner import ChaosRunner
from benchmarks.chaos_scenarios import SHORT_STOP_S, generate_round
from benchmarks.chaos_summary import ChaosSummary
from benchmarks.harness import Options
from rfork import logs
from rfork.errors import RforkError

ROUNDS: Final = 100
QUICK: Final = SHORT_STOP_S[:4]


@dataclass(frozen=True)
class ChaosOptions:
    """What the command line asked for: numbers of rounds, and whether to show what was logged."""

    options: Options
    numbers: Sequence[int]
    verbose: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the rounds, print, write what was asked for; `arguments` are the command line's unless given."""
    chaos_options = parse(arguments)
    if missing := unavailable_reason():
        print(f"SKIPPED: {missing}")
        return
    logs.configure(json=False, level="error")
    harness.exit_on_sigterm()
    console, tally = Console(stderr=True, highlight=False, soft_wrap=True), ChaosSummary()
    with ChaosCluster("info" if chaos_options.verbose else "warning") as cluster:
        runner = ChaosRunner(cluster)
        for number in chaos_options.numbers:
            round_ = generate_round(number)
            console.print(f"{number}: {round_.description}")
            observation = runner.run(round_)
            findings = check_round(observation)
            tally.add(observation, findings)
            _print_round(console, observation, findings)
        late_findings = runner.final_findings()
        tally.add_findings(late_findings)
        for finding in late_findings:
            console.print(f"    [red]{finding.finding_type}: {finding.text}")
        if chaos_options.verbose:
            for log in sorted(cluster.folder.glob("*.log")):
                console.print(f"--- {log.stem}\n{log.read_text(errors='replace')}", markup=False)
    harness.publish(
        replace(chaos_options.options, plot=None),
        settings={
            "first": chaos_options.numbers[0],
            "link_bits_per_s": RATE,
            "deadline_s": DEADLINE_S,
            "window": WINDOW,
        },
        rows=tally.rows,
        figures=tally.figures,
        plot=("fault", "recovery s"),
    )


def unavailable_reason() -> str:
    """Why no round can be run on this machine, in one line; empty where one can."""
    if shutil.which("redis-server") is None:
        return "chaos rounds need `redis-server` (Debian and Ubuntu: apt-get install redis-server)"
    return netlab.unavailable_reason()


def parse(arguments: Sequence[str] | None = None) -> ChaosOptions:
    """The options of all benchmarks, and the numbers of the rounds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help=f"rounds [{ROUNDS}; --quick: {len(QUICK)} chosen ones]")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="number of the first [0]")
    parser.add_argument("--only", type=int, metavar="SEED", help="run the round of this number alone")
    parsed, rest = parser.parse_known_args(arguments)
    numbers: Sequence[int] = range(parsed.first, parsed.first + (parsed.rounds or ROUNDS))
    if parsed.only is not None:
        numbers = (parsed.only,)
    elif "--quick" in rest and parsed.rounds is None:
        numbers = QUICK
    options = harness.options("chaos", __doc__, [*rest, "--rounds", str(len(numbers))])
    return ChaosOptions(options, numbers, parsed.only is not None)


def _print_round(console: Console, observation: RoundObservation, findings: Sequence[Finding]) -> None:
    """What was done, how each target ended, and what is wrong."""
    struck = ", ".join(f"{struck.fault_type} {struck.host} ({struck.role})" for struck in observation.injected)
    ends = ", ".join(f"{ending.host} {ending.ending_type}" for ending in observation.endings)
    console.print(f"    {struck}: {ends}; {observation.recovery_s:.1f} s")
    for ending in observation.endings:
        if ending.ending_type in ("failed", "fallback"):
            console.print(f"    {ending.host}: {'; '.join(ending.reasons)}", style="dim", markup=False)
    for finding in findings:
        console.print(f"    {finding.finding_type}: {finding.text}", style="red", markup=False)


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
