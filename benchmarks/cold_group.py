"""How long until N processes that start at once, with no seed, have their weights from one object store?

Each host is a network namespace with a shaped, full-duplex link (`benchmarks.netlab`): the store (SeaweedFS,
a real S3 server), a planner (`rfork planner`), and those whose processes call `rfork.fork`. All links have
one rate B. The bottleneck is the link of the store, because everybody who starts shares it: N independent
loads of an image of S bytes take N·S/B at least, whatever the hosts do. A group has every byte leave the
store once and pass from host to host, on links of their own, so its bound is S/B for any N.

- "limit": one plain TCP connection from the store's host, which gives S/B.
- "alone": N processes load the snapshot independently of each other, without a planner, at once.
- "group": the same processes with a planner. Of a snapshot each reads a share, and the rest from the others;
  of a checkpoint, which has no digests to check against, one is elected and the others stand behind it.
- "one killed": a process of the group dies by SIGKILL at 0.35 S/B; the time is that of those that live.

T runs from the go to the return of the last one's call. "store sent" is what left the store's host, by the
counter of its interface, headers included; "reported" what the forks say they read from it; "host sent" is
the most of any other host; all in S. Each process's bytes are compared, after each run, with those that were
stored, by a SHA-256 that nothing else used. Options of rfork may be set (RFORK_MAX_INFLIGHT_CHUNKS, …).

Needs root, `ip`, `tc` and `weed`; without them it says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from statistics import median
from typing import Final

from benchmarks import harness, netlab, seaweed
from benchmarks.cold_group_cases import ColdGroupCase, ColdGroupOutcome, hosts_of
from benchmarks.cold_group_cluster import ColdGroupCluster
from benchmarks.cold_group_runner import ColdGroupRunner
from benchmarks.cold_group_table import figures, row_of, warnings
from benchmarks.harness import Options
from rfork import logs
from rfork.errors import RforkError

COUNT: Final = 4
IMAGE_MIB, QUICK_IMAGE_MIB = 64, 24
RATE_MBIT: Final = 200.0
ROUNDS, QUICK_ROUNDS = 5, 1
LIMIT: Final = ColdGroupCase(1, is_limit=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for; `arguments` are the command line's unless given."""
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
    """The options of all benchmarks, the bytes of the image, bits a second of the links, and the cases."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold_group", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--image-mib", type=int, help=f"size of the image, in MiB [{IMAGE_MIB}]")
    parser.add_argument("--rate", type=float, default=RATE_MBIT, help=f"links, in Mbit/s each way [{RATE_MBIT:g}]")
    parser.add_argument("--count", type=int, default=COUNT, metavar="N", help=f"processes [{COUNT}]")
    parser.add_argument("--only", metavar="PATTERN", help="run the cases alone whose names match")
    parser.add_argument("--rounds", type=int, help=f"rounds [{ROUNDS}, with --quick {QUICK_ROUNDS}]")
    parsed, rest = parser.parse_known_args(arguments)
    quick = "--quick" in rest
    rounds = parsed.rounds or (QUICK_ROUNDS if quick else ROUNDS)
    options = harness.options("cold_group", __doc__, [*rest, "--rounds", str(rounds)])
    size = (parsed.image_mib or (QUICK_IMAGE_MIB if quick else IMAGE_MIB)) << 20
    cases = [case for case in all_cases(parsed.count) if re.search(parsed.only or "", case.name)]
    return options, size, parsed.rate * 1e6, cases


def all_cases(count: int) -> list[ColdGroupCase]:
    """All the questions, of groups of this size."""
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
