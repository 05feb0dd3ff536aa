"""Rows, figures, warnings and plot of `benchmarks.fanout`, computed from the outcomes of its cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.fanout.cases import FanoutCase, FanoutOutcome
from benchmarks.harness import Row
from rfork.errors import MissingExtra

COLUMNS = 3


def plot(path: Path, runs: Sequence[tuple[FanoutCase, FanoutOutcome]], *, size: int, unit_s: float) -> None:
    """Plot a panel per case; time in S/B (`unit_s` seconds), a line per target, from 0 to `size` bytes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", extra="dev", reason=str(error)) from None
    rows = -(-len(runs) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for panel, (case, outcome) in zip(panels, runs, strict=False):
        for host in case.target_hosts:
            points = outcome.responses[host].points
            panel.plot(
                [(when - outcome.started) / unit_s for when, _ in points],
                [verified / size for _, verified in points],
                label=host,
                linewidth=1,
                linestyle=":" if host in (*case.late_hosts, *case.slow_hosts) else "-",
            )
        panel.axvline(case.min_time, color="grey", linewidth=0.8)
        panel.set_title(f"{case.name}: {outcome.seconds / unit_s:.2f} S/B", fontsize=9)
        panel.set_xlim(left=0)
        panel.set_ylim(0, 1)
        panel.set_xlabel("time in S/B", fontsize=8)
        panel.set_ylabel("verified", fontsize=8)
    for panel in list(figure.axes)[len(runs) :]:
        panel.remove()
    figure.savefig(path)


SATURATED: Final = 0.9
"""Busy share of the CPUs from which they are the bottleneck."""


def limit_row(case: FanoutCase, unit_s: float) -> Row:
    """Return the row of the physical limit."""
    return {"case": f"{case.name}, {unit_s:.3g} s", "T in S/B": 1.0}


def rows_of(case: FanoutCase, runs: Sequence[FanoutOutcome], size: int, unit_s: float) -> list[Row]:
    """Return a case's table rows: medians of the rounds."""

    def middle(value: Callable[[FanoutOutcome], float]) -> float:
        return median(value(run) for run in runs)

    seconds = middle(lambda run: run.seconds)
    rows: list[Row] = [
        {
            "case": case.name,
            "T in S/B": seconds / unit_s,
            "runs": len(runs),
            "min": min(run.seconds for run in runs) / unit_s,
            "max": max(run.seconds for run in runs) / unit_s,
            "bound": case.min_time,
            "eta": unit_s / seconds,
            "sent": middle(lambda run: max(host.sent for host in run.traffic.values())) / size,
            "received": middle(lambda run: max(host.received for host in run.traffic.values())) / size,
            "replans": middle(lambda run: sum(each.replans for each in run.responses.values())),
            "cpu": middle(lambda run: run.cpu_busy),
            "own": middle(lambda run: run.cpu_busy_processes),
        }
    ]
    if case.slow:
        rest = middle(lambda run: run.max_seconds(rest_of(case)))
        rows.append({"case": f"{case.name}: the rest", "T in S/B": rest / unit_s})
    if case.late:
        own_seconds = middle(lambda run: run.max_own_seconds(case.late_hosts))
        rows.append({"case": f"{case.name}: a joiner", "T in S/B": own_seconds / unit_s})
    return rows


def rest_of(case: FanoutCase) -> tuple[str, ...]:
    """Return the targets with undisturbed links."""
    return tuple(host for host in case.target_hosts if host not in case.slow_hosts)


def host_rows(outcomes: Mapping[FanoutCase, Sequence[FanoutOutcome]], size: int, unit_s: float) -> list[Row]:
    """Return a row per host for the largest undisturbed fleet: time of completion, sent, received."""
    plain = [case for case in outcomes if case.mode == "rfork" and case.undisturbed]
    if not plain:
        return []
    case = max(plain, key=lambda each: each.targets)
    run = sorted(outcomes[case], key=lambda each: each.seconds)[len(outcomes[case]) // 2]
    rows: list[Row] = []
    for host in (*case.seed_hosts, *case.target_hosts):
        seconds = run.max_seconds((host,)) if host in case.target_hosts else None
        rows.append(
            {
                "case": f"{case.name}: {host}",
                "T in S/B": seconds / unit_s if seconds else None,
                "sent": run.traffic[host].sent / size,
                "received": run.traffic[host].received / size,
            }
        )
    return rows


def figures(outcomes: Mapping[FanoutCase, Sequence[FanoutOutcome]], size: int, unit_s: float) -> dict[str, float]:
    """Return the figures of DESIGN section 11, and further ones."""
    named: dict[str, float] = {}
    egress: list[float] = []
    stripes: list[float] = []
    for case, runs in outcomes.items():
        total = median(run.seconds for run in runs) / unit_s
        if case.seed_rate != 1:
            stripes.append(total / case.min_time)
            named[f"stripe_{case.seeds}_vs_bound"] = stripes[-1]
        elif case.slow:
            named["fanout_slow"] = total
            named["fanout_slow_rest"] = median(run.max_seconds(rest_of(case)) for run in runs) / unit_s
        elif case.late:
            named["fanout_late"] = total
            named["fanout_late_joiner"] = median(run.max_own_seconds(case.late_hosts) for run in runs) / unit_s
        else:
            prefix = "" if case.mode == "rfork" else f"{case.mode}_"
            prefix += f"seeds{case.seeds}_" if case.seeds > 1 else ""
            named[f"fanout_{prefix}n{case.targets}"] = total
            if case.mode == "rfork":
                egress.append(median(max(host.sent for host in run.traffic.values()) for run in runs) / size)
    if egress:
        named["fanout_max_egress"] = max(egress)
    if stripes:
        named["stripe_vs_bound"] = max(stripes)
    return named


def warnings(outcomes: Mapping[FanoutCase, Sequence[FanoutOutcome]]) -> list[str]:
    """Warn of cases that were limited by the CPU and not by the links, and of CPU load from other processes."""
    lines: list[str] = []
    for case, runs in outcomes.items():
        cpu_busy, own_seconds = (
            median(run.cpu_busy for run in runs),
            median(run.cpu_busy_processes for run in runs),
        )
        if cpu_busy >= SATURATED:
            why = (
                "lower --rate"
                if own_seconds >= cpu_busy / 2
                else f"other processes used most of them (these {own_seconds:.0%})"
            )
            lines.append(
                f"{case.name}: the CPUs were {cpu_busy:.0%} busy and limit the case as much as the links do: {why}"
            )
    return lines
