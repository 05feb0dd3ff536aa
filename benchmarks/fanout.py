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
those of all targets together, "repeated" what they read twice, in S. "cpu" is the busy part of the
processors, "own" what the case's processes used: where nearly all is used, processors limit as links do,
and T says little: lower `--rate`. Options of rfork may be set (RFORK_WINDOW, …).

Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import FrameType
from typing import Final

from benchmarks import fanout_draw, harness, netlab
from benchmarks.fanout_crew import Crew
from benchmarks.fanout_run import Case, Outcome, Runner
from benchmarks.harness import Options, Row
from rfork import logs
from rfork.errors import RforkError

SIZES: Final = (1, 3, 7, 15)
IMAGE_MIB, QUICK_IMAGE_MIB = 256, 64
RATE_MBIT: Final = 200.0
ROUNDS, QUICK_ROUNDS = 3, 1
SATURATED: Final = 0.9
"""Busy part of the processors from which on these are what limits."""
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
        raise SystemExit(f"SKIPPED: {missing}")
    logs.configure(json=False, level="error")
    signal.signal(signal.SIGTERM, _leave)  # the lab is taken down on any way out
    outcomes: dict[Case, list[Outcome]] = {case: [] for case in (LIMIT, *cases)}
    hosts = list(dict.fromkeys(host for case in outcomes for host in (*case.seed_hosts, *case.target_hosts)))
    with Crew(hosts, size=lines.size, rate=lines.rate, delay_s=lines.delay_s) as crew:
        runner = Runner(crew)
        harness.interleave(
            {case.name: _contender(runner, case, kept) for case, kept in outcomes.items()}, options.rounds
        )
    unit_s = median(outcome.longest_own(LIMIT.target_hosts) for outcome in outcomes.pop(LIMIT))
    rows = [limit_row(unit_s)]
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


def limit_row(unit_s: float) -> Row:
    """The physical limit."""
    return {"case": LIMIT.name, "T in S/B": 1.0, "seconds": unit_s}


def rows_of(case: Case, runs: Sequence[Outcome], size: int, unit_s: float) -> list[Row]:
    """A case's lines of the table, medians of the rounds."""

    def middle(value: Callable[[Outcome], float]) -> float:
        return median(value(run) for run in runs)

    seconds = middle(lambda run: run.seconds)
    rows: list[Row] = [
        {
            "case": case.name,
            "T in S/B": seconds / unit_s,
            "seconds": seconds,
            "least": min(run.seconds for run in runs) / unit_s,
            "most": max(run.seconds for run in runs) / unit_s,
            "bound": case.bound,
            "eta": unit_s / seconds,
            "sent": middle(lambda run: max(host.sent for host in run.traffic.values())) / size,
            "received": middle(lambda run: max(host.received for host in run.traffic.values())) / size,
            "replans": middle(lambda run: sum(each.replans for each in run.answers.values())),
            "repeated": middle(lambda run: sum(each.repeated for each in run.answers.values())) / size,
            "cpu": middle(lambda run: run.busy),
            "own": middle(lambda run: run.busy_crew),
        }
    ]
    if case.slow:
        rest = middle(lambda run: run.longest(rest_of(case)))
        rows.append({"case": "  the rest", "T in S/B": rest / unit_s, "seconds": rest})
    if case.late:
        own = middle(lambda run: run.longest_own(case.late_hosts))
        rows.append({"case": "  a joiner", "T in S/B": own / unit_s, "seconds": own})
    return rows


def rest_of(case: Case) -> tuple[str, ...]:
    """The targets whose links are whole."""
    return tuple(host for host in case.target_hosts if host not in case.slow_hosts)


def host_rows(outcomes: Mapping[Case, Sequence[Outcome]], size: int, unit_s: float) -> list[Row]:
    """Host by host, for the largest fleet that all came at once: when complete, sent, received."""
    plain = [case for case in outcomes if case.mode == "rfork" and case.undisturbed]
    if not plain:
        return []
    case = max(plain, key=lambda each: each.targets)
    run = sorted(outcomes[case], key=lambda each: each.seconds)[len(outcomes[case]) // 2]
    rows: list[Row] = []
    for host in (*case.seed_hosts, *case.target_hosts):
        seconds = run.longest((host,)) if host in case.target_hosts else None
        rows.append(
            {
                "case": f"  N = {case.targets}: {host}",
                "T in S/B": seconds / unit_s if seconds else None,
                "seconds": seconds,
                "sent": run.traffic[host].sent / size,
                "received": run.traffic[host].received / size,
            }
        )
    return rows


def figures(outcomes: Mapping[Case, Sequence[Outcome]], size: int, unit_s: float) -> dict[str, float]:
    """The figures that DESIGN section 8 names, and what else the cases tell."""
    named: dict[str, float] = {}
    egress: list[float] = []
    stripes: list[float] = []
    for case, runs in outcomes.items():
        total = median(run.seconds for run in runs) / unit_s
        if case.seed_rate != 1:
            stripes.append(total / case.bound)
            named[f"stripe_{case.seeds}_vs_bound"] = stripes[-1]
        elif case.slow:
            named["fanout_slow"] = total
            named["fanout_slow_rest"] = median(run.longest(rest_of(case)) for run in runs) / unit_s
        elif case.late:
            named["fanout_late"] = total
            named["fanout_late_joiner"] = median(run.longest_own(case.late_hosts) for run in runs) / unit_s
        else:
            kind = "" if case.mode == "rfork" else f"{case.mode}_"
            kind += f"seeds{case.seeds}_" if case.seeds > 1 else ""
            named[f"fanout_{kind}n{case.targets}"] = total
            if case.mode == "rfork":
                egress.append(median(max(host.sent for host in run.traffic.values()) for run in runs) / size)
    if egress:
        named["fanout_max_egress"] = max(egress)
    if stripes:
        named["stripe_vs_bound"] = max(stripes)
    return named


def warnings(outcomes: Mapping[Case, Sequence[Outcome]]) -> list[str]:
    """Where the processors, and not the links, were what limits; and whether this run had them to itself."""
    lines: list[str] = []
    for case, runs in outcomes.items():
        busy, own = median(run.busy for run in runs), median(run.busy_crew for run in runs)
        if busy >= SATURATED:
            why = "lower --rate" if own >= busy / 2 else f"other work had most of them (these {own:.0%})"
            lines.append(
                f"{case.name}: the processors were {busy:.0%} busy, and limit as the links do: {why}"
            )
    return lines


def _contender(runner: Runner, case: Case, kept: list[Outcome]) -> harness.Contender:
    def run() -> float:
        kept.append(runner.run(case))
        return kept[-1].seconds

    return run


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
