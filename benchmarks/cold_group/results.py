"""Rows, figures and warnings of `benchmarks.cold_group`, computed from the outcomes of its cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from benchmarks.cold_group.cases import ColdGroupCase, ColdGroupOutcome
from benchmarks.fanout.results import SATURATED
from benchmarks.harness import Row


def row_of(case: ColdGroupCase, runs: Sequence[ColdGroupOutcome], size: int, unit_s: float) -> Row:
    """Return a case's table row: medians of the rounds."""

    def middle(value: Callable[[ColdGroupOutcome], float]) -> float:
        return median(value(run) for run in runs)

    seconds = middle(lambda run: run.seconds)
    return {
        "case": case.name,
        "seconds": seconds,
        "T in S/B": seconds / unit_s,
        "min": min(run.seconds for run in runs) / unit_s,
        "max": max(run.seconds for run in runs) / unit_s,
        "bound": case.min_time,
        "store sent": middle(lambda run: run.sent) / size,
        "reported": None if case.is_limit else middle(lambda run: run.reported) / size,
        "host sent": middle(lambda run: max(run.traffic[host].sent for host in case.hosts)) / size,
        "replans": middle(lambda run: sum(response.replans for response in run.responses.values())),
        "cpu": middle(lambda run: run.cpu_busy),
        "runs": len(runs),
    }


def figures(outcomes: Mapping[ColdGroupCase, Sequence[ColdGroupOutcome]], size: int, unit_s: float) -> dict[str, float]:
    """Return the figures of DESIGN section 11, and further ones."""

    def seconds(case: ColdGroupCase) -> float:
        return median(run.seconds for run in outcomes[case])

    named: dict[str, float] = {}
    groups = [
        case for case in outcomes if not (case.is_limit or case.independent or case.kills_member) and case.count > 1
    ]
    for case in groups:
        end = "" if case.stored_form == "snapshot" else f"_{case.stored_form}"
        independent = ColdGroupCase(case.count, independent=True)
        named[f"cold_group_egress{end}"] = median(run.sent for run in outcomes[case]) / size
        named[f"cold_group_reported{end}"] = median(run.reported for run in outcomes[case]) / size
        if independent in outcomes:
            named[f"cold_group_time{end}"] = seconds(case) / seconds(independent)
        named[f"cold_group_vs_bound{end}"] = seconds(case) / (case.min_time * unit_s)
    for case in outcomes:
        if case.count == 1 and not case.is_limit:
            named["cold_one_vs_bound"] = seconds(case) / unit_s
        if case.kills_member:
            named["cold_group_killed_egress"] = median(run.sent for run in outcomes[case]) / size
            named["cold_group_killed_time"] = seconds(case) / unit_s
    return named


def warnings(outcomes: Mapping[ColdGroupCase, Sequence[ColdGroupOutcome]]) -> list[str]:
    """Warn of cases that were limited by the CPU and not by the links."""
    cpu_busy = {case: median(run.cpu_busy for run in runs) for case, runs in outcomes.items()}
    return [
        f"{case.name}: the CPUs were {part:.0%} busy and limit the case as much as the links do: lower --rate"
        for case, part in cpu_busy.items()
        if part >= SATURATED
    ]
