"""Measure how fast N processes that start together, with no seed, load weights from one object store.

Each host is a network namespace with a shaped, full-duplex link (`benchmarks.netlab`): the store (SeaweedFS,
a real S3 server), a planner (`rfork planner`), and the hosts whose processes call `rfork.fork`. All links
have the same rate B. The bottleneck is the store's link, which all starting processes share: N independent
loads of an image of S bytes take at least N·S/B, whatever the hosts do. In a group every byte leaves the
store once and is passed from host to host over their own links, so the bound is S/B for any N.

- "limit": one plain TCP connection from the store's host, which takes S/B.
- "alone": N processes load the snapshot independently and concurrently, without a planner.
- "group": the same processes with a planner. Each reads a share of a snapshot and the rest from the others; of a
  checkpoint, which has no digests, one elected process reads everything and the others fork from it.
- "one killed": a process of the group is killed by SIGKILL at 0.35 S/B; the time is that of the others.

T runs from the start signal to the return of the last call. "store sent" is the traffic that left the store's
host, from its interface counter, headers included; "reported" is what the forks report as read from the
store; "host sent" is the maximum of the other hosts; all in S. After each run each process's bytes are
compared with the stored ones by a SHA-256 that the transfer does not use. Options of rfork may be set
(RFORK_MAX_INFLIGHT_CHUNKS, …).

Needs root, `ip`, `tc` and `weed`; without them it prints the reason and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Final

from benchmarks import harness, netlab, seaweed
from benchmarks.cold_group.cases import ColdGroupCase, ColdGroupOutcome, hosts_of
from benchmarks.cold_group.results import figures, row_of, warnings
from benchmarks.cold_group.runner import ColdGroupCluster, ColdGroupRunner
from benchmarks.harness import Options
from rfork import logs
from rfork.errors import RforkError

COUNT: Final = 4
IMAGE_MIB, QUICK_IMAGE_MIB = 64, 24
RATE_MBIT: Final = 200.0
ROUNDS, QUICK_ROUNDS = 5, 1
LIMIT: Final = ColdGroupCase(1, is_limit=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and write the requested files. `arguments` default to the command
    line.
    """
    options, size, rate, cases = parse(arguments)
    if missing := netlab.unavailable_reason() or seaweed.unavailable_reason():
        print(f"SKIPPED: {missing}")
        return
    logs.configure(json=False, level="error")
    harness.exit_on_sigterm()
    outcomes: dict[ColdGroupCase, list[ColdGroupOutcome]] = {case: [] for case in (LIMIT, *cases)}
    with ColdGroupCluster(hosts_of(max(case.count for case in outcomes)), size=size, rate=rate) as cluster:
        runner = ColdGroupRunner(cluster)
        harness.interleave(
            {case.name: _contender(runner, case, runs_by_case) for case, runs_by_case in outcomes.items()},
            options.rounds,
        )
    unit_s = median(run.seconds for run in outcomes[LIMIT])
    harness.publish(
        options,
        settings={
            "image_bytes": size,
            "link_bits_per_s": rate,
            "payload_bytes_per_s": size / unit_s,
        },
        rows=[row_of(case, runs, size, unit_s) for case, runs in outcomes.items()],
        figures=figures(outcomes, size, unit_s),
        plot=("case", "T in S/B"),
    )
    for line in warnings(outcomes):
        print(line)


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, int, float, list[ColdGroupCase]]:
    """Parse the common benchmark options, the image size, the link rate and the cases."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_group", add_help=False)
    parser.add_argument("--image-mib", type=int, help=f"image size in MiB [{IMAGE_MIB}]")
    parser.add_argument(
        "--rate", type=float, default=RATE_MBIT, help=f"link rate in Mbit/s in each direction [{RATE_MBIT:g}]"
    )
    parser.add_argument("--count", type=int, default=COUNT, metavar="N", help=f"processes [{COUNT}]")
    parsed, rest = parser.parse_known_args(arguments)
    options = harness.options(
        "cold_group", __doc__, rest, rounds=ROUNDS, quick_rounds=QUICK_ROUNDS, has_only=True, own=parser
    )
    size = (parsed.image_mib or (QUICK_IMAGE_MIB if options.quick else IMAGE_MIB)) << 20
    cases = harness.selected(all_cases(parsed.count), options, lambda case: case.name)
    return options, size, parsed.rate * 1e6, cases


def all_cases(count: int) -> list[ColdGroupCase]:
    """Return all cases for groups of this size."""
    return [
        ColdGroupCase(1),
        ColdGroupCase(count, independent=True),
        ColdGroupCase(count),
        ColdGroupCase(count, kills_member=True),
        ColdGroupCase(count, "checkpoint"),
    ]


def _contender(runner: ColdGroupRunner, case: ColdGroupCase, runs_by_case: list[ColdGroupOutcome]) -> harness.Contender:
    def run() -> float:
        runs_by_case.append(runner.run(case))
        return runs_by_case[-1].seconds

    return run


if __name__ == "__main__":
    try:
        main()
    except (RforkError, seaweed.SeaweedError) as error:
        raise SystemExit(str(error)) from None
