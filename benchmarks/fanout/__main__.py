"""Measure how fast N hosts obtain an image over links that are the bottleneck, with real processes.

Each host is a network namespace with a shaped, full-duplex link (`benchmarks.netlab`): a planner (`rfork
planner`), seeds, and targets that call `rfork.fork`. T runs from the start of the first target to the return
of the last call, in multiples of S/B: S is the image size, B the rate of one plain TCP socket between two of
the hosts, measured in the same run (the row "limit"). After each run each target's bytes are compared with
the seed's, by weights_id and by a SHA-256 that the transfer does not use.

- "rfork": all targets start together and follow the planner's plans.
- "star": all read from the seed. "doubling": a target serves only once it is complete, to one target at a time
  (waves of 1, 2, 4, 8). Both use rfork too; see `benchmarks.fanout.runner`.
- "late": some targets start a quarter of S/B after the others; "slow": a link has a quarter of the rate.
- "seeds of 0.5 rate": one target, whose link is as fast as those of its seeds together.

"eta" is (S/B)/T; "bound" is the minimum that the links allow. "the rest" are the targets with undisturbed
links, "a joiner" is the maximum time of a late target from its own start. "sent" and "received" are the
maximum of any host, in S, headers and acknowledgements included; the last lines list each host. "replans" are
those of all targets together. "cpu" is the busy share of the CPUs, "own" the share used by the case's
processes: if nearly all is used, CPUs limit the run as much as links, and T means little: lower `--rate`.
Options of rfork may be set (RFORK_MAX_INFLIGHT_CHUNKS, …).

Needs root, `ip` and `tc`; without them it prints the reason and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from benchmarks import harness, netlab
from benchmarks.fanout.cases import FanoutCase, FanoutOutcome
from benchmarks.fanout.cluster import FanoutCluster
from benchmarks.fanout.results import figures, host_rows, limit_row, rows_of, warnings
from benchmarks.fanout.results import plot as plot_time_lines
from benchmarks.fanout.runner import FanoutRunner
from benchmarks.harness import Options
from rfork import logs
from rfork.errors import RforkError

SIZES: Final = (1, 3, 7, 15)
IMAGE_MIB, QUICK_IMAGE_MIB = 256, 64
RATE_MBIT: Final = 200.0
ROUNDS, QUICK_ROUNDS = 5, 1
BASELINE_ROUNDS: Final = 1
"""Number of first rounds that include the baselines: they take the longest and hardly vary."""
LIMIT: Final = FanoutCase("limit", 1)


@dataclass(frozen=True)
class LinkSettings:
    """Image size in bytes, link rate in bits per second, and delay in each direction."""

    size: int
    rate: float
    delay_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and write the requested files. `arguments` default to the command
    line.
    """
    options, links, cases = parse(arguments)
    if missing := netlab.unavailable_reason():
        print(f"SKIPPED: {missing}")
        return
    logs.configure(json=False, level="error")
    harness.exit_on_sigterm()
    outcomes: dict[FanoutCase, list[FanoutOutcome]] = {case: [] for case in (LIMIT, *cases)}
    hosts = list(dict.fromkeys(host for case in outcomes for host in (*case.seed_hosts, *case.target_hosts)))
    with FanoutCluster(hosts, size=links.size, rate=links.rate, delay_s=links.delay_s) as cluster:
        runner = FanoutRunner(cluster)
        all_hosts = {case: _contender(runner, case, runs_by_case) for case, runs_by_case in outcomes.items()}
        with_baselines = min(BASELINE_ROUNDS, options.rounds)
        for baselines, rounds in ((True, with_baselines), (False, options.rounds - with_baselines)):
            harness.interleave(
                {case.name: run for case, run in all_hosts.items() if baselines or not case.baseline}, rounds
            )
    unit_s = median(outcome.max_own_seconds(LIMIT.target_hosts) for outcome in outcomes.pop(LIMIT))
    rows = [limit_row(LIMIT, unit_s)]
    for case, runs in outcomes.items():
        rows += rows_of(case, runs, links.size, unit_s)
    harness.publish(
        replace(options, plot=None),
        settings={
            "image_bytes": links.size,
            "link_bits_per_s": links.rate,
            "delay_s": links.delay_s,
            "payload_bytes_per_s": links.size / unit_s,
        },
        rows=[*rows, *host_rows(outcomes, links.size, unit_s)],
        figures=figures(outcomes, links.size, unit_s),
        plot=("case", "T in S/B"),
    )
    for link_bytes_per_s in warnings(outcomes):
        print(link_bytes_per_s)
    if options.plot:
        median_run = [
            (case, sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]) for case, runs in outcomes.items()
        ]
        plot_time_lines(options.plot, median_run, size=links.size, unit_s=unit_s)


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, LinkSettings, list[FanoutCase]]:
    """Parse the common benchmark options, the link settings and the cases."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fanout", add_help=False)
    parser.add_argument("--image-mib", type=int, help=f"image size in MiB [{IMAGE_MIB}]")
    parser.add_argument(
        "--rate", type=float, default=RATE_MBIT, help=f"link rate in Mbit/s in each direction [{RATE_MBIT:g}]"
    )
    parser.add_argument("--delay", type=float, default=0.0, help="link delay in ms in each direction [0]")
    parser.add_argument(
        "--targets",
        type=int,
        nargs="+",
        metavar="N",
        help=f"fleet sizes [{' '.join(map(str, SIZES))}]",
    )
    parsed, rest = parser.parse_known_args(arguments)
    options = harness.options(
        "fanout", __doc__, rest, rounds=ROUNDS, quick_rounds=QUICK_ROUNDS, has_only=True, own=parser
    )
    cases = quick_cases() if options.quick and not parsed.targets else all_cases(parsed.targets or SIZES)
    size = (parsed.image_mib or (QUICK_IMAGE_MIB if options.quick else IMAGE_MIB)) << 20
    selected = harness.selected(cases, options, lambda case: case.name)
    return options, LinkSettings(size, parsed.rate * 1e6, parsed.delay / 1000), selected


def quick_cases() -> list[FanoutCase]:
    """Return the cases that fit into a minute."""
    return [
        FanoutCase("rfork", 3), FanoutCase("rfork", 7), FanoutCase("star", 3), FanoutCase("doubling", 3),
        FanoutCase("rfork", 1, seeds=2, seed_rate=0.5),
    ]  # fmt: skip


def all_cases(sizes: Sequence[int]) -> list[FanoutCase]:
    """Return all cases; those with a disturbance use the second-largest fleet."""
    several = [size for size in sizes if size > 1]
    cases = [FanoutCase("rfork", size) for size in sizes]
    cases += [FanoutCase("star", size) for size in several] + [FanoutCase("doubling", size) for size in several]
    if several:
        fleet = several[-2] if len(several) > 1 else several[-1]
        cases += [
            FanoutCase("rfork", fleet, seeds=2),
            FanoutCase("rfork", fleet, late=max(1, fleet // 3)),
            FanoutCase("rfork", fleet, slow=1),
        ]
    return [
        *cases,
        FanoutCase("rfork", 1, seeds=2, seed_rate=0.5),
        FanoutCase("rfork", 1, seeds=4, seed_rate=0.25),
    ]


def _contender(runner: FanoutRunner, case: FanoutCase, runs_by_case: list[FanoutOutcome]) -> harness.Contender:
    def run() -> float:
        runs_by_case.append(runner.run(case))
        return runs_by_case[-1].seconds

    return run


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
