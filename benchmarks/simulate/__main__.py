"""Simulate fan-outs planned by the planner's own policy, for fleets too large for one machine.

A discrete-event simulation of N targets, M seeds and k chunks on full-duplex links of rate B that are shared
equally (`benchmarks.simulate.network`), with deaths, stragglers, pauses and late arrivals; `planner.policy.group_plan`
over the planner's own index decides which target reads what from which source. T is in multiples of S/B, from
the first arrival until the last surviving target is complete; a T of 1.0 means reading at the full rate of
the link.

Undisturbed rows also show the exact times of other schedules (`benchmarks.simulate.baselines`): star, doubling,
chain, binomial pipeline, and the floor for complete chunks. In disturbed rows "rfork" is the median and
"worst" the worst of several random draws; "the rest" leaves stragglers out, "a joiner" is the maximum time of
a late joiner from its own arrival, and "the last one" the maximum time of any target from its own arrival.
With "pauses" each link is at a tenth of its rate for 0.05 S/B, on average once in 5 S/B. "one is first": the others
arrive just after the first target has its plan. "on 4 hosts" are targets that share 4 hosts, each with one link to
the network and faster ones within. "max sent" and "max read" are the maximum that any host sent and read over the
network, in S; "plans" is the number of plans, "plan s" the wall time of planning and "watch s" that of finding slow
and delayed targets. Without --quick: more draws of some cases.

`--targets N` simulates one scenario instead: `python -m benchmarks.simulate --targets 1000 --deaths 0.01`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median

from benchmarks import harness
from benchmarks.harness import Options, Row, Value
from benchmarks.simulate import baselines
from benchmarks.simulate.runner import SimOutcome, SimRun, SimScenario
from rfork.errors import MissingExtra, RforkError

SIZES = (1, 3, 7, 15, 31, 100, 1000, 10_000)
LARGE = 1000
DRAWS = 5
"""Random draws of the cases with a goal whose outcome varies between draws."""
SEEDS = (2, 4)
HOSTS, ON_HOSTS = 4, 32
UNDISTURBED, DEATHS, SLOW, KNOWN, PAUSES, LATE, FIRST, SPREAD, SHARED = (
    "undisturbed", "1 % die", "5 % slow", "5 % slow, known", "pauses", "25 % late", "one is first", "over 0.2 S/B",
    "on 4 hosts",
)  # fmt: skip
CONTENDERS = {
    "floor": baselines.floor,
    "binomial": baselines.binomial_pipeline,
    "chain": baselines.chain,
    "doubling": baselines.doubling,
    "star": baselines.star,
}


@dataclass(frozen=True)
class SimulationCase:
    """A scenario and its outcomes, one per random draw."""

    name: str
    scenario: SimScenario
    outcomes: tuple[SimOutcome, ...]

    @property
    def total(self) -> float:
        """T: the median of the draws."""
        return median(outcome.total for outcome in self.outcomes)

    @property
    def max_total(self) -> float:
        """Maximum T."""
        return max(outcome.total for outcome in self.outcomes)

    @property
    def healthy(self) -> float:
        """T without stragglers."""
        return median(outcome.healthy for outcome in self.outcomes)

    @property
    def late(self) -> float | None:
        """Time of the slowest late joiner."""
        times = [outcome.late for outcome in self.outcomes if outcome.late is not None]
        return median(times) if times else None

    @property
    def own(self) -> float:
        """Maximum time of a target from its own arrival."""
        return median(outcome.own for outcome in self.outcomes)

    @property
    def max_egress(self) -> float:
        """Maximum that any host sent, in S."""
        return max(outcome.max_egress for outcome in self.outcomes)

    @property
    def max_ingress(self) -> float:
        """Maximum that any host read over the network, in S."""
        return max(outcome.max_ingress for outcome in self.outcomes)

    def rows(self) -> list[Row]:
        """Return the table rows of the case."""
        scenario = self.scenario
        disturbed = _disturbed(scenario)
        exact = not disturbed and scenario.latency == 0 and not scenario.hosts
        head: dict[str, Value] = {"case": self.name, "N": scenario.targets, "M": scenario.seeds}
        row = head | {"rfork": round(self.total, 3)}
        for name, contender in CONTENDERS.items():
            baseline_time = contender(scenario.targets, scenario.seeds, scenario.chunks)
            row[name] = round(baseline_time, 3) if exact else None
        row |= {
            "worst": round(self.max_total, 3) if disturbed else None,
            "max sent": round(self.max_egress, 3),
            "max read": round(self.max_ingress, 3),
            "plans": round(median(outcome.plans for outcome in self.outcomes)),
            "plan s": median(outcome.plan_seconds for outcome in self.outcomes),
            "watch s": median(outcome.watch_seconds for outcome in self.outcomes),
        }
        rows: list[Row] = [row]
        if scenario.stragglers:
            rows.append(head | {"case": f"{self.name}: the rest", "rfork": round(self.healthy, 3)})
        if self.late is not None:
            rows.append(head | {"case": f"{self.name}: a joiner", "rfork": round(self.late, 3)})
        if scenario.spread:
            rows.append(head | {"case": f"{self.name}: the last one", "rfork": round(self.own, 3)})
        return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the simulation, print the table and write the requested files. `arguments` default to the command
    line.
    """
    options, base, one = parse(arguments)
    if one:
        cases = [simulate("one scenario", base, options.rounds if _disturbed(base) else 1)]
        figures = {"sim_asked": cases[0].total}
    else:
        cases = table(base, options)
        figures = figures_of(cases)
    harness.publish(
        replace(options, plot=None),
        settings={name: value for name, value in asdict(base).items() if name not in ("targets", "seeds")},
        rows=[row for case in cases for row in case.rows()],
        figures=figures,
        plot=("case", "rfork"),
    )
    if options.plot:
        same_scenario = [case for case in cases if case.name == UNDISTURBED and case.scenario.seeds == base.seeds]
        plot(options.plot, base, {case.scenario.targets: case.total for case in same_scenario})


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, SimScenario, bool]:
    """Parse the common benchmark options and the scenario; returns also whether only that scenario is to be
    simulated.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for option in fields(SimScenario):
        flag, meaning = f"--{option.name.replace('_', '-')}", str(option.metadata["help"])
        if isinstance(option.default, bool):
            parser.add_argument(flag, action="store_true", help=meaning)
        elif isinstance(option.default, int | float):
            default = None if option.name == "targets" else option.default
            parser.add_argument(flag, type=type(option.default), default=default, help=f"{meaning} [{option.default}]")
    chosen, rest = parser.parse_known_args(arguments)
    options = harness.options("simulate", __doc__, rest)
    values = {name: value for name, value in vars(chosen).items() if value is not None}
    return options, SimScenario(**values), chosen.targets is not None


def table(base: SimScenario, options: Options) -> list[SimulationCase]:
    """Return all cases of the benchmark; `base` sets the behaviour of the network and the planner in each."""
    few_seeds, many_chunks = (1, options.rounds) if options.quick else (options.rounds, options.rounds)
    large = replace(base, targets=LARGE)
    questions: list[tuple[str, SimScenario, int]] = [
        (UNDISTURBED, replace(base, targets=targets), 1) for targets in SIZES
    ]
    questions += [(UNDISTURBED, replace(large, seeds=seeds), 1) for seeds in SEEDS]
    questions += [
        (DEATHS, replace(large, deaths=0.01), many_chunks),
        (SLOW, replace(large, stragglers=0.05), DRAWS),
        (KNOWN, replace(large, stragglers=0.05, measured=True), few_seeds),
        (PAUSES, replace(large, pauses=0.2), DRAWS),
        (LATE, replace(large, late=0.25), few_seeds),
        (FIRST, replace(large, late=(LARGE - 1) / LARGE, late_at=0.001), 1),
        (SPREAD, replace(large, spread=0.2, batch=max(base.batch, 0.005)), DRAWS),
        (SHARED, replace(base, targets=ON_HOSTS, hosts=HOSTS), 1),
        (f"{SHARED}, 25 % late", replace(base, targets=ON_HOSTS, hosts=HOSTS, late=0.25), few_seeds),
        (f"{SHARED}, 10 % die", replace(base, targets=ON_HOSTS, hosts=HOSTS, deaths=0.1), many_chunks),
    ]
    return [simulate(name, scenario, seed_numbers) for name, scenario, seed_numbers in questions]


def simulate(name: str, scenario: SimScenario, seed_numbers: int) -> SimulationCase:
    """Run a scenario with several random seeds. Raises SimulationStuck if a target is never complete."""
    outcomes: list[SimOutcome] = []
    for seed_number in range(seed_numbers):
        # A run creates millions of values and frees them at its end: the garbage collector would only cost
        # time.
        gc.collect()
        gc.disable()
        try:
            outcomes.append(SimRun(replace(scenario, draw=scenario.draw + seed_number)).run())
        finally:
            gc.enable()
    return SimulationCase(name, scenario, tuple(outcomes))


def figures_of(cases: Sequence[SimulationCase]) -> dict[str, float]:
    """Return the figures of DESIGN section 11, and further ones about the policy."""
    plain = {(each.scenario.targets, each.scenario.seeds): each for each in cases if each.name == UNDISTURBED}
    named = {case.name: case for case in cases if case.name != UNDISTURBED}
    seeds = min(number for _, number in plain)
    undisturbed = plain[LARGE, seeds].total
    figures = {f"sim_n{targets}": plain[targets, seeds].total for targets in SIZES}
    figures |= {f"sim_seeds_{number}": plain[LARGE, number].total for number in SEEDS}
    return figures | {
        "sim_faults": named[DEATHS].total / undisturbed,
        "sim_faults_worst": named[DEATHS].max_total / undisturbed,
        "sim_slow_rest": named[SLOW].healthy / undisturbed,
        "sim_slow_known_rest": named[KNOWN].healthy / undisturbed,
        "sim_pauses": named[PAUSES].total / undisturbed,
        "sim_late_joiner": named[LATE].late or 0.0,
        "sim_one_first": named[FIRST].total,
        "sim_spread": named[SPREAD].total,
        "sim_trickle": named[SPREAD].own,
        "sim_max_egress": max(case.max_egress for case in plain.values()),
        "sim_max_egress_faults": named[DEATHS].max_egress,
    }


def plot(path: Path, base: SimScenario, measured: Mapping[int, float]) -> None:
    """Plot T over N for all contenders."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", extra="dev", reason=str(error)) from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, contender in CONTENDERS.items():
        times = [contender(targets, base.seeds, base.chunks) for targets in SIZES]
        if name == "floor":  # the binomial pipeline lies on it
            axes.plot(SIZES, times, label=name, linestyle=":", color="black", linewidth=2, zorder=3)
        else:
            axes.plot(SIZES, times, label=name, linestyle="--")
    axes.plot(list(measured), list(measured.values()), label="rfork", marker="o", linewidth=2)
    axes.set_xscale("log")
    axes.set_ylim(0.9, 4)
    axes.set_xlabel("targets")
    axes.set_ylabel("T in S/B")
    axes.set_title(f"Fan-out of {base.chunks} chunks from {base.seeds} seed(s), simulated")
    axes.legend()
    figure.savefig(path)


def _disturbed(scenario: SimScenario) -> bool:
    return any((scenario.deaths, scenario.stragglers, scenario.pauses, scenario.late, scenario.spread))


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
