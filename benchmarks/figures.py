"""Goals of the benchmarks' figures, and a summary of results.

``python -m benchmarks.figures FOLDER`` prints each figure with its goal and a verdict, from the JSON files that the
benchmarks wrote into FOLDER. ``make bench`` ends with it, and docs/benchmarks.md contains it for the recorded results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

RECORDED: Final = tuple(Path(__file__).parent / "results" / name for name in ("epyc-2core", "xeon-2core"))
"""Folders of recorded results: each figure is that of the first folder with its benchmark."""
Verdict = Literal["met", "missed", "not measured"]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure is at least `minimum`, or at most `maximum`."""

    benchmark: str
    minimum: float | None = None
    maximum: float | None = None
    meaning: str = ""

    def __str__(self) -> str:
        """The goal as text, such as ``≥ 0.93``."""
        return f"≥ {_number(self.minimum)}" if self.minimum is not None else f"≤ {_number(self.maximum or 0.0)}"

    def verdict(self, value: float | None) -> Verdict:
        """Return whether a value meets the goal, to two decimal places."""
        if value is None:
            return "not measured"
        rounded = round(value, 2)
        is_low = self.minimum is not None and rounded < self.minimum
        is_high = self.maximum is not None and rounded > self.maximum
        return "missed" if is_low or is_high else "met"


GOALS: Final[Mapping[str, Goal]] = {
    "pull_http_vs_socket": Goal("pull", minimum=0.93, meaning="HTTP, unverified / four plain sockets"),
    "pull_small_vs_large": Goal("pull", minimum=0.95, meaning="20,000 tensors / a Llama's tensors"),
    "pull_te_vs_mooncake": Goal("pull", minimum=1.0, meaning="TransferEngine, unverified / Mooncake's own batch"),
    "pull_small_te_vs_mooncake": Goal("pull", minimum=1.0, meaning="the same with 20,000 tensors"),
    "pull_verify_cost": Goal("pull", maximum=0.15, meaning="share of the speed that verification costs"),
    "pull_first_call_s": Goal("pull", maximum=0.2, meaning="first fork of a process, beyond its second, in s"),
    "pull_same_host_vs_memcpy": Goal("pull", minimum=1.0, meaning="shared memory, mapped and verified / memcpy"),
    "digest_cpu_gb_per_s": Goal("digest", minimum=10, meaning="one core"),
    "sim_n7": Goal("simulate", maximum=1.08, meaning="7 targets, in S/B"),
    "sim_n31": Goal("simulate", maximum=1.19, meaning="31 targets"),
    "sim_n1000": Goal("simulate", maximum=1.30, meaning="1,000 targets"),
    "sim_n10000": Goal("simulate", maximum=1.40, meaning="10,000 targets"),
    "sim_faults": Goal("simulate", maximum=1.2, meaning="1 % of the targets die / undisturbed"),
    "sim_slow_rest": Goal("simulate", maximum=1.3, meaning="5 % unknown slow links: the others / undisturbed"),
    "sim_pauses": Goal("simulate", maximum=1.2, meaning="links that pause for a moment / undisturbed"),
    "sim_trickle": Goal("simulate", maximum=1.4, meaning="arrivals over 0.2 S/B: the last one's own time"),
    "sim_one_first": Goal("simulate", maximum=1.4, meaning="999 targets that arrive just after the first"),
    "fanout_n7": Goal("fanout", maximum=1.15, meaning="7 targets, real processes"),
    "fanout_n15": Goal("fanout", maximum=1.30, meaning="15 targets"),
    "fanout_max_egress": Goal("fanout", maximum=1.1, meaning="the most that a host sends, in images"),
    "stripe_vs_bound": Goal("fanout", maximum=1.05, meaning="one target from two seeds / the bound"),
    "chaos_wrong_bytes": Goal("chaos", maximum=0, meaning="100 rounds of faults"),
    "chaos_hangs": Goal("chaos", maximum=0),
    "chaos_leaks": Goal("chaos", maximum=0),
    "disturb_p99_governed": Goal("disturb", maximum=1.10, meaning="a busy seed's p99 with readers / idle"),
    "disturb_one_reader_speed": Goal("disturb", minimum=0.3, meaning="one reader of a busy seed / ungoverned"),
    "disturb_other_core_speed": Goal("disturb", minimum=0.9, meaning="the same, if egress does not slow the seed"),
    "fork_vs_own_load_worst": Goal("race", maximum=1.15, meaning="fork from a slow source / own load from disk"),
    "storage_vs_best_peer": Goal("storage", minimum=1.0, meaning="the worst row / the best other loader"),
    "storage_cold_vs_medium": Goal("storage", minimum=0.95, meaning="cold disk / plain read"),
    "storage_s3_vs_medium": Goal("storage", minimum=0.90, meaning="S3 / bare ranged GETs"),
    "storage_small_vs_dense": Goal("storage", minimum=0.85, meaning="20,000 tensors / dense, cold"),
    "storage_small_vs_dense_warm": Goal("storage", minimum=0.85, meaning="the same, warm"),
    "cold_group_egress": Goal("cold_group", maximum=1.02, meaning="bytes from storage for a group, in images"),
    "cold_group_time": Goal("cold_group", maximum=0.40, meaning="a group together / each by itself"),
    "plan_cost_vs_bare_route": Goal("planner_load", maximum=4, meaning="CPU of a plan request / an empty route"),
    "plan_bytes_per_rank": Goal("planner_load", maximum=10_000, meaning="memory of the planner"),
    "engine_fork_vs_disk_cold": Goal("engines", maximum=0.5, meaning="fork over HTTP / the engine's cold load"),
    "ready_vs_floor": Goal("ready", maximum=1.10, meaning="first token with prefetch / start-up or transfer alone"),
    "reshard_bytes": Goal("reshard", maximum=1.02, meaning="fork across layouts: bytes received / needed"),
    "reshard_vs_same_layout": Goal("reshard", maximum=1.3, meaning="fork across layouts / within one layout"),
    "ready_restart_weights": Goal("ready", maximum=0.15, meaning="weights after kill -9, holder / own warm load"),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run, or None if it was not measured."""

    name: str
    goal: Goal
    value: float | None
    is_quick: bool = False

    @property
    def verdict(self) -> Verdict:
        """The comparison of the value with the goal."""
        return self.goal.verdict(self.value)


def summary(*folders: Path) -> Sequence[Figure]:
    """Return all figures that have a goal, each with its value in the first folder that has its benchmark."""
    paths = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.json")}
    documents = {name: json.loads(path.read_text()) for name, path in paths.items()}
    return [_figure(name, goal, documents.get(goal.benchmark)) for name, goal in GOALS.items()]


def _figure(name: str, goal: Goal, document: Mapping[str, Any] | None) -> Figure:
    if document is None:
        return Figure(name, goal, None)
    return Figure(name, goal, document["figures"].get(name), bool(document["settings"].get("quick")))


def markdown(*folders: Path) -> str:
    """Return the summary as a table for the documentation: figures that miss their goal are bold."""
    return "\n".join(
        ("| figure | what it is | goal | measured |", "|---|---|---|---|", *map(_row, summary(*(folders or RECORDED))))
    )


def _row(figure: Figure) -> str:
    value = "not measured" if figure.value is None else _number(figure.value)
    shown = f"**{value}**" if figure.verdict == "missed" else value
    form = ", quick form" if figure.is_quick and figure.value is not None else ""
    return f"| `{figure.name}` | {figure.goal.meaning} | {figure.goal} | {shown}{form} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> int:
    """Print the summary of a folder."""
    arguments = sys.argv[1:]
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m benchmarks.figures FOLDER, with the JSON files of benchmarks", file=sys.stderr)
        return 2
    figures = [figure for figure in summary(Path(arguments[0])) if figure.value is not None]
    table = Table(*("figure", "what it is", "goal", "measured", "verdict"))
    for row in _cells(figures):
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    missed = sum(figure.verdict == "missed" for figure in figures)
    console.print(f"{len(figures)} figures, {missed} missed", highlight=False)
    return 0


def _cells(figures: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    for figure in figures:
        yield figure.name, figure.goal.meaning, str(figure.goal), _number(figure.value or 0.0), figure.verdict


if __name__ == "__main__":
    sys.exit(main())
