"""Time lines of `benchmarks.fanout`: the progress of each target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.fanout_cases import FanoutCase, FanoutOutcome
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
