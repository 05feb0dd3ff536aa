"""Plot of `benchmarks.storage`: a panel per image, medium and destination, with all its contenders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import GB
from benchmarks.storage_cases import DESTINATIONS, MEDIA, Role, StorageResult
from benchmarks.storage_images import SHARDS
from rfork.errors import MissingExtra

COLOURS: dict[Role, str] = {
    "ours": "tab:blue",
    "ours otherwise": "lightsteelblue",
    "peer": "tab:gray",
    "limit": "tab:orange",
    "shown": "navajowhite",
}
MEANING = {"cold": "disk, cold", "warm": "page cache", "s3": "S3"}


def plot(path: Path, results: Sequence[StorageResult]) -> None:
    """Write the plot to a file. Raises MissingExtra without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", extra="dev", reason=str(error)) from None
    questions = [(image, into) for image in SHARDS for into in DESTINATIONS]
    figure = Figure(figsize=(7 * len(MEDIA), 3.6 * len(questions)), layout="constrained")
    panels = figure.subplots(len(questions), len(MEDIA), squeeze=False)
    for line, (image, into) in zip(panels, questions, strict=True):
        for axes, medium in zip(line, MEDIA, strict=True):
            plotted = [
                result
                for result in results
                if result.runs
                and (result.case.image, result.case.medium) == (image, medium)
                and result.case.destination in (into, "none")
            ]
            plotted.sort(key=lambda result: result.speed)
            bars = axes.barh(
                [result.case.contender for result in plotted],
                [result.speed / GB for result in plotted],
                color=[COLOURS[result.case.role] for result in plotted],
            )
            axes.bar_label(bars, fmt="%.3g", padding=3)
            axes.set_title(f"{image}, {MEANING[medium]}, into {into} tensors")
            axes.set_xlabel("GB/s")
    figure.savefig(path)
