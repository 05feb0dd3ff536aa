"""Timeline of the starts: a bar for each row, divided into phases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.ready.phases import PHASES, Start
from rfork.errors import MissingExtra

COLOURS: Final = (
    *("#c7cdd6", "#9aa5b4", "#6f7d90", "#8e6fc9", "#b497e0", "#e6a23c", "#d1495b", "#8c2f39", "#f0b8bf"),
    *("#8fc79a", "#4b9460"),
)
"""Of the phases, in order: what belongs to the weights is violet, orange and red."""
FETCH: Final = "#2f6fb2"


def draw(path: Path, title: str, starts: Mapping[str, Start], limits: Mapping[str, float]) -> None:
    """Write the timeline. `starts` by row name; `limits` are seconds of rows without phases.

    A fetch by another process is a thin bar below the engine's. Raises MissingExtra without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", extra="dev", reason=str(error)) from None
    names = [*limits, *starts]
    figure = Figure(figsize=(11, 0.5 * len(names) + 1.8), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(PHASES, COLOURS, strict=True))
    for position, seconds in enumerate(limits.values()):
        axes.barh(
            position, seconds, color=FETCH, height=0.6, label="transfer by a holder or alone" if not position else None
        )
        axes.annotate(f" {seconds:.1f} s", (seconds, position), va="center", fontsize=8)
    labelled: set[str] = set()
    for position, start in enumerate(starts.values(), start=len(limits)):
        for phase in start.phases:
            if phase.seconds > 0:
                axes.barh(
                    position,
                    phase.seconds,
                    left=phase.began,
                    color=colours[phase.name],
                    height=0.6,
                    label=phase.name if phase.name not in labelled else None,
                )
                labelled.add(phase.name)
        if start.fetched is not None:
            axes.barh(position + 0.4, start.fetched.seconds, left=start.fetched.began, color=FETCH, height=0.16)
        axes.annotate(f" {start.first_token_s:.1f} s", (start.first_token_s, position), va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the start of the server's process")
    axes.set_title(title)
    axes.margins(x=0.08)
    figure.legend(loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    figure.savefig(path)
