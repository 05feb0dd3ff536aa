"""How long until N hosts have an image, on links that are the limit, with real processes?

Each host is a network namespace with a shaped, full-duplex link (`benchmarks.netlab`): a planner
(`rfork planner`), seeds, and targets that call `rfork.fork`. T runs from the go of the first target to the
return of the last one's call, and is in multiples of S/B: S the image, B what one plain TCP socket
carries between two of the hosts, measured in the same run (the row "limit"). Each target's bytes are
compared with the seed's after each run, by weights_id and by a SHA-256 that the transfer never used.

- "rfork": all targets at once, as the planner plans them.
- "star": everybody reads from the seed. "doubling": a target gives only once it is complete, to one
  target at a time (waves of 1, 2, 4, 8). Both are rfork too: `benchmarks.fanout_run` says how.
- "late": some come a quarter of S/B after the others; "slow": a link has a quarter of the rate.
- "seeds of 0.5 rate": one target, whose link is as fast as those of its seeds together.

"eta" is (S/B)/T; "bound" what the links allow at least. "the rest" are the targets with whole links, "a
joiner" is the longest that a late one took from its own go. "sent" and "received" are the most of any
host, in S, headers and acknowledgements included; the last lines have them host by host. "replans" are
those of all targets together. "cpu" is the busy part of the
processors, "own" what the case's processes used: where nearly all is used, processors limit as links do,
and T says little: lower `--rate`. Options of rfork may be set (RFORK_WINDOW, …).

Needs root, `ip` and `tc`; without them it says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from benchmarks import fanout_draw, harness, netlab
from benchmarks.fanout_case import Case, Outcome
from benchmarks.fanout_crew import Crew
from benchmarks.fanout_run import Runner
from benchmarks.fanout_table import figures, host_rows, limit_row, rows_of, warnings
from benchmarks.harness import Options
from rfork import logs
from rfork.errors import RforkError

SIZES: Final = (1, 3, 7, 15)
IMAGE_MIB, QUICK_IMAGE_MIB = 256, 64
RATE_MBIT: Final = 200.0
ROUNDS, QUICK_ROUNDS = 5, 1
BASELINE_ROUNDS: Final = 1
"""Rounds, the first ones, in which the baselines run too: they take most of the time, and hardly vary."""
LIMIT: Final = Case("limit", 1)


@dataclass(frozen=True)
class Lines:
    """What the links of this run are: bytes of the image, bits a second, delay each way."""

    size: int
    rate: float
    delay_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for; `arguments` are the command line's unless given."""
    options, lines, cases = parse(arguments)
    if missing := netlab.why_not():
        print(f"SKIPPED: {missing}")
        return
    logs.configure(json=False, level="error")
    harness.heed_sigterm()
    outcomes: dict[Case, list[Outcome]] = {case: [] for case in (LIMIT, *cases)}
    hosts = list(dict.fromkeys(host for case in outcomes for host in (*case.seed_hosts, *case.target_hosts)))
    with Crew(hosts, size=lines.size, rate=lines.rate, delay_s=lines.delay_s) as crew:
        runner = Runner(crew)
        everyone = {case: _contender(runner, case, kept) for case, kept in outcomes.items()}
        with_baselines = min(BASELINE_ROUNDS, options.rounds)
        for baselines, rounds in ((True, with_baselines), (False, options.rounds - with_baselines)):
            harness.interleave(
                {case.name: run for case, run in everyone.items() if baselines or not case.baseline}, rounds
            )
    unit_s = median(outcome.longest_own(LIMIT.target_hosts) for outcome in outcomes.pop(LIMIT))
    rows = [limit_row(LIMIT, unit_s)]
    for case, runs in outcomes.items():
        rows += rows_of(case, runs, lines.size, unit_s)
    harness.publish(
        replace(options, plot=None),
        settings={
            "image_bytes": lines.size,
            "link_bits_per_s": lines.rate,
            "delay_s": lines.delay_s,
            "payload_bytes_per_s": lines.size / unit_s,
        },
        rows=[*rows, *host_rows(outcomes, lines.size, unit_s)],
        figures=figures(outcomes, lines.size, unit_s),
        plot=("case", "T in S/B"),
    )
    for line in warnings(outcomes):
        print(line)
    if options.plot:
        middle = [
            (case, sorted(runs, key=lambda run: run.seconds)[len(runs) // 2])
            for case, runs in outcomes.items()
        ]
        fanout_draw.draw(options.plot, middle, size=lines.size, unit_s=unit_s)


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, Lines, list[Case]]:
    """The options of all benchmarks, the links, and the cases."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fanout", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--image-mib", type=int, help=f"size of the image, in MiB [{IMAGE_MIB}]")
    parser.add_argument(
        "--rate", type=float, default=RATE_MBIT, help=f"links, in Mbit/s each way [{RATE_MBIT:g}]"
    )
    parser.add_argument("--delay", type=float, default=0.0, help="delay of each link, in ms each way [0]")
    parser.add_argument(
        "--targets",
        type=int,
        nargs="+",
        metavar="N",
        help=f"sizes of the fleet [{' '.join(map(str, SIZES))}]",
    )
    parser.add_argument("--only", metavar="PATTERN", help="run the cases alone whose names match")
    parser.add_argument("--rounds", type=int, help=f"rounds [{ROUNDS}, with --quick {QUICK_ROUNDS}]")
    chosen, rest = parser.parse_known_args(arguments)
    quick = "--quick" in rest
    rounds = chosen.rounds or (QUICK_ROUNDS if quick else ROUNDS)
    options = harness.options("fanout", __doc__, [*rest, "--rounds", str(rounds)])
    cases = quick_cases() if quick and not chosen.targets else all_cases(chosen.targets or SIZES)
    size = (chosen.image_mib or (QUICK_IMAGE_MIB if quick else IMAGE_MIB)) << 20
    asked = [case for case in cases if re.search(chosen.only or "", case.name)]
    return options, Lines(size, chosen.rate * 1e6, chosen.delay / 1000), asked


def quick_cases() -> list[Case]:
    """What goes into a minute."""
    return [
        Case("rfork", 3), Case("rfork", 7), Case("star", 3), Case("doubling", 3),
        Case("rfork", 1, seeds=2, seed_rate=0.5),
    ]  # fmt: skip


def all_cases(sizes: Sequence[int]) -> list[Case]:
    """All the questions; those that are about a disturbance are asked of the second largest fleet."""
    several = [size for size in sizes if size > 1]
    cases = [Case("rfork", size) for size in sizes]
    cases += [Case("star", size) for size in several] + [Case("doubling", size) for size in several]
    if several:
        fleet = several[-2] if len(several) > 1 else several[-1]
        cases += [
            Case("rfork", fleet, seeds=2),
            Case("rfork", fleet, late=max(1, fleet // 3)),
            Case("rfork", fleet, slow=1),
        ]
    return [*cases, Case("rfork", 1, seeds=2, seed_rate=0.5), Case("rfork", 1, seeds=4, seed_rate=0.25)]


def _contender(runner: Runner, case: Case, kept: list[Outcome]) -> harness.Contender:
    def run() -> float:
        kept.append(runner.run(case))
        return kept[-1].seconds

    return run


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
