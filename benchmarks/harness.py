"""Shared parts of all benchmarks: options, interleaved rounds, medians, machine, table, JSON and plot.

A benchmark is a module with a `main` of this form::

    options = harness.options("digest", __doc__)
    seconds = harness.interleave({"ours": timed(ours), "limit": timed(limit)}, options.rounds)
    harness.publish(options, settings={...}, rows=[...], figures={...}, plot=("contender", "GB/s"))
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rfork.errors import MissingExtra, SettingsError

Value = str | int | float | bool | None
Row = Mapping[str, Value]
CaseT = TypeVar("CaseT")
Contender = Callable[[], float]
"""One measured run; returns its seconds."""

ROUNDS, QUICK_ROUNDS = 5, 3
PIPED_WIDTH = 250
"""Characters per line of a table in a file or pipe."""
GB = 1e9


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    benchmark: str
    quick: bool
    rounds: int
    json: Path | None
    plot: Path | None
    only: str = ""
    """Regular expression of the cases to run; only benchmarks with many long ones have the option."""


def options(
    benchmark: str,
    description: str | None,
    arguments: Sequence[str] | None = None,
    *,
    rounds: int = ROUNDS,
    quick_rounds: int = QUICK_ROUNDS,
    has_only: bool = False,
    own: argparse.ArgumentParser | None = None,
) -> Options:
    """Parse the options common to all benchmarks; `arguments` default to the command line.

    `rounds` and `quick_rounds` are the defaults without and with --quick. `has_only`: offer --only.
    `own`: the parser of the benchmark's own options, without help, for those in the help.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[own] if own is not None else [],
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller or fewer contenders, and fewer rounds: within a minute or two"
    )
    parser.add_argument("--rounds", type=int, help=f"rounds (default {rounds}, with --quick {quick_rounds})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table (needs matplotlib)")
    if has_only:
        parser.add_argument(
            "--only", metavar="PATTERN", type=_pattern, default="", help="run only the cases whose names match"
        )
    parsed = parser.parse_args(arguments)
    chosen_rounds = parsed.rounds or (quick_rounds if parsed.quick else rounds)
    return Options(benchmark, parsed.quick, chosen_rounds, parsed.json, parsed.plot, parsed.only if has_only else "")


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def selected(cases: Iterable[CaseT], options: Options, name: Callable[[CaseT], str]) -> list[CaseT]:
    """Return the cases whose names match `--only`. Raises SettingsError if there is none."""
    found = [case for case in cases if re.search(options.only, name(case))]
    if not found:
        raise SettingsError(f"no case matches --only {options.only}", hint="without it, the table shows all names")
    return found


def timed(call: Callable[[], None]) -> Contender:
    """Return a contender that runs `call` and measures its wall time."""

    def contender() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return contender


def interleave(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round.

    All contenders run once per round, so other load on the machine affects all alike; every second round runs
    in reverse order, so no contender always follows the same one.
    """
    exit_on_sigterm()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=rounds * len(contenders))
        for number in range(rounds):
            names = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
            for name in names:
                progress.update(task, description=f"round {number + 1}/{rounds}: {name}")
                seconds[name].append(contenders[name]())
                progress.advance(task)
    return seconds


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that all started processes are ended too."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` signals twice; the second must not interrupt the cleanup
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each contender's rounds."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> dict[str, Value]:
    """Describe the machine; no host or user names."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": ", ".join(gpus) or None,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def commit() -> str:
    """Return the git commit of this tree, with ``+`` if files differ from it; ``unknown`` outside of git."""
    repository = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=repository,
            capture_output=True,
            text=True,
            check=True,
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=repository, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def publish(
    options: Options,
    *,
    settings: Mapping[str, Value],
    rows: Sequence[Row],
    figures: Mapping[str, float],
    plot: tuple[str, str] | Callable[[Path], None],
) -> None:
    """Print the table and the figures; write the JSON file and the plot if requested.

    `plot` names the columns of a bar chart, labels and values, or draws the plot itself.
    """
    hardware = machine()
    # Output into a file or pipe has no terminal width: the columns must not be wrapped at rich's default of 80.
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    table = Table(title=f"{options.benchmark}: {hardware['cpu']}, {hardware['cores']} cores, {hardware['kernel']}")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        numeric = all(not isinstance(row.get(column), str) for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(_format_value(row.get(column)) for column in columns))
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name} = {_format_value(value)}", highlight=False)
    if options.json:
        document = {
            "benchmark": options.benchmark,
            "machine": hardware,
            "commit": commit(),
            "settings": {"quick": options.quick, "rounds": options.rounds, **settings},
            "rows": [dict(row) for row in rows],
            "figures": dict(figures),
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.plot:
        if isinstance(plot, tuple):
            _plot(options.plot, options.benchmark, rows, *plot)
        else:
            plot(options.plot)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _format_value(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value}"


def _plot(path: Path, title: str, rows: Sequence[Row], labels: str, values: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", extra="dev", reason=str(error)) from None
    bars = [(str(row[labels]), float(row.get(values) or 0)) for row in rows]
    figure = Figure(figsize=(8, 0.4 * len(bars) + 1.2), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh([label for label, _ in bars][::-1], [value for _, value in bars][::-1])
    axes.bar_label(drawn, fmt="%.3g", padding=3)
    axes.set_title(title)
    axes.set_xlabel(values)
    figure.savefig(path)
