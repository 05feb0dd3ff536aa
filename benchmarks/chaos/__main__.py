"""Check that every fork ends correctly while processes die or hang, links fail and disks fill up.

Each round is generated from its number (`benchmarks.chaos.scenarios`): 3 to 5 targets, on links of 160 Mbit/s
between network namespaces (`benchmarks.netlab`), fork an image of 32 to 64 MiB from one or two seeds, or
start cold from a checkpoint or a snapshot. The planner keeps its state in memory or in Redis. Once a target
has a given share of the image, one or two faults are injected:

- kill: SIGKILL to a seed, a relay (a target that others read from), a target, the planner or Redis; the planner
  and Redis restart, empty, up to 3 s later.
- stop: SIGSTOP, and SIGCONT after a silent source counts as stalled (2 s).
- cut: a link carries nothing in either direction for 1 to 6 s, or to the end of the round.
- loss: a link loses one packet in twenty in both directions, to the end of the round.
- full: the disk that a target keeps its chunks on (`RFORK_RESUME_DIR`), or that a seed writes a snapshot to, has
  no byte left. Reading a snapshot writes nothing.
- torn: the checkpoint or snapshot that one target reads for all others is truncated to half its size.

After each round `benchmarks.chaos.checks` verifies the following. Every target that was not killed has the
seed's bytes, by a SHA-256 that the transfer never used, or reports why it has none. Each finished by its
deadline (30 s, and 10 s to fall back). No process has more threads or files than when it started, nor has its
memory grown. The bytes requested twice are at most, for each fault, those in flight and one chunk. No target
failed ("lost") that had its own files or an unaffected seed. No process died or logged a traceback. The
planners removed all expired records ("stale") and leaked nothing.

The table has a row for each fault and role: "rounds"; how many targets "forked", "fell back", "failed" (and
reported every reason) or were "killed"; the findings; and "recovery s", the longest time from the last fault
to the end of the last fork. A round with two faults counts in both rows, and once in "all".

`--only SEED` repeats one round and shows the logs of its processes. Needs root, `ip` and `tc`; without them
it prints the reason and measures nothing. Rounds with Redis need `redis-server`.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console

from benchmarks import harness, netlab
from benchmarks.chaos.checks import Finding, RoundObservation, check_round
from benchmarks.chaos.cluster import DEADLINE_S, RATE, WINDOW, ChaosCluster
from benchmarks.chaos.results import ChaosSummary
from benchmarks.chaos.runner import ChaosRunner
from benchmarks.chaos.scenarios import SHORT_ROUNDS, generate_round
from benchmarks.harness import Options
from rfork import logs
from rfork.errors import RforkError

ROUNDS: Final = 100
QUICK: Final = SHORT_ROUNDS[:4]


@dataclass(frozen=True)
class ChaosOptions:
    """Options of the command line: the numbers of the rounds, and whether to show logs."""

    options: Options
    numbers: Sequence[int]
    verbose: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the rounds, print the table and write the requested files. `arguments` default to the command line."""
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
    """Return in one line why this machine cannot run rounds; empty if it can."""
    if shutil.which("redis-server") is None:
        return "chaos rounds need `redis-server` (Debian and Ubuntu: apt-get install redis-server)"
    return netlab.unavailable_reason()


def parse(arguments: Sequence[str] | None = None) -> ChaosOptions:
    """Parse the common benchmark options and the numbers of the rounds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help=f"number of rounds [{ROUNDS}; --quick: {len(QUICK)} chosen ones]")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="number of the first round [0]")
    parser.add_argument("--only", type=int, metavar="SEED", help="run only the round with this number")
    parsed, rest = parser.parse_known_args(arguments)
    numbers: Sequence[int] = range(parsed.first, parsed.first + (parsed.rounds or ROUNDS))
    if parsed.only is not None:
        numbers = (parsed.only,)
    elif "--quick" in rest and parsed.rounds is None:
        numbers = QUICK
    options = harness.options("chaos", __doc__, [*rest, "--rounds", str(len(numbers))])
    return ChaosOptions(options, numbers, parsed.only is not None)


def _print_round(console: Console, observation: RoundObservation, findings: Sequence[Finding]) -> None:
    """Print the injected faults, how each target ended, and the findings."""
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
