"""Rows, figures and plot of `benchmarks.storage`, computed from the measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import GB, Row, Value
from benchmarks.storage.cases import DESTINATIONS, MEDIA, Destination, Medium, Role, StorageCase, StorageResult
from benchmarks.storage.images import DENSE, SHARDS, SMALL
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


MIB = 1 << 20
VERSUS, VERIFIED_VERSUS = "storage_vs_best_peer", "storage_verified_vs_best_peer"


@dataclass(frozen=True)
class Comparison:
    """Our row and the best comparable row of another loader."""

    rfork_case: StorageCase
    other: StorageCase
    ratio: float
    """The other loader's time divided by ours."""

    @property
    def line(self) -> str:
        """The comparison in words."""
        return f"{self.rfork_case.label} / {self.other.contender}: {self.ratio:.3f}"


def row(result: StorageResult) -> Row:
    """Return the table row of a case that ran."""
    case = result.case
    seconds = [run.seconds for run in result.runs]
    limit = case.destination == "none"
    return {
        "image": case.image,
        "medium": case.medium,
        "into": "" if limit else case.destination,
        "contender": case.contender,
        "GB/s": result.speed / GB,
        "s": result.seconds,
        "CPU s": None if limit else result.cpu_seconds,
        "+MiB": None if limit else result.extra_bytes // MIB,
        "spread": round((max(seconds) - min(seconds)) / result.seconds, 2),
        "runs": len(seconds),
    }


def against_peers(results: Iterable[StorageResult], *, verified: bool = False) -> list[Comparison]:
    """Compare each of our rows with the fastest peer of the same image, medium and destination, the worst
    first.

    With `verified`, compare only loaders that check digests as they load, on both sides.
    """
    fastest: dict[tuple[str, Medium, Destination], StorageResult] = {}
    completed = [result for result in results if result.runs]
    for result in completed:
        best = fastest.get(result.case.comparison_key)
        if (
            result.case.role == "peer"
            and (result.case.verified or not verified)
            and (best is None or result.seconds < best.seconds)
        ):
            fastest[result.case.comparison_key] = result
    role = "ours otherwise" if verified else "ours"
    pairs = [
        (rfork_result, fastest[rfork_result.case.comparison_key])
        for rfork_result in completed
        if rfork_result.case.role == role
        and rfork_result.case.verified == verified
        and rfork_result.case.comparison_key in fastest
    ]
    comparison = [
        Comparison(rfork_result.case, other.case, other.seconds / rfork_result.seconds) for rfork_result, other in pairs
    ]
    return sorted(comparison, key=lambda each: each.ratio)


def figures(results: Sequence[StorageResult]) -> dict[str, float]:
    """Return the figures of DESIGN section 11, and those for the other media."""
    completed = [result for result in results if result.runs]
    rfork_speeds = {result.case.comparison_key: result.speed for result in completed if result.case.role == "ours"}
    named: dict[str, float] = {}
    for name, verified in ((VERSUS, False), (VERIFIED_VERSUS, True)):
        if comparison := against_peers(completed, verified=verified):
            named[name] = comparison[0].ratio
    for medium in MEDIA:
        limits = limits_of(completed, medium)
        shares = [
            rfork_speeds[DENSE, medium, destination] / limit
            for destination, limit in limits.items()
            if (DENSE, medium, destination) in rfork_speeds
        ]
        if shares:
            named[f"storage_{medium}_vs_medium"] = min(shares)
    for medium in MEDIA:
        shares = [
            rfork_speeds[SMALL, medium, destination] / rfork_speeds[DENSE, medium, destination]
            for destination in DESTINATIONS
            if (SMALL, medium, destination) in rfork_speeds and (DENSE, medium, destination) in rfork_speeds
        ]
        if shares:
            named["storage_small_vs_dense" + ("" if medium == "cold" else f"_{medium}")] = min(shares)
    extra_bytes = [result.extra_bytes for result in completed if result.case.role.startswith("ours")]
    if extra_bytes:
        named["storage_peak_rss_over"] = max(extra_bytes) / MIB
    return named


def limits_of(results: Iterable[StorageResult], medium: Medium) -> dict[Destination, float]:
    """Return the limit of the medium for the dense image, in bytes per second, for each destination."""
    found: dict[Destination, float] = {}
    for result in results:
        case = result.case
        if case.role == "limit" and result.runs and (case.image, case.medium) == (DENSE, medium):
            # A limit without a destination counts for every destination; of several, the fastest counts.
            for destination in DESTINATIONS if case.destination == "none" else (case.destination,):
                found[destination] = max(found.get(destination, 0.0), result.speed)
    return found


def notes(results: Sequence[StorageResult]) -> dict[str, Value]:
    """Return in words the rows that the figures come from; for the settings."""
    note_rows: dict[str, Value] = {}
    for name, verified in ((VERSUS, False), (VERIFIED_VERSUS, True)):
        comparison = against_peers(results, verified=verified)
        if comparison:
            note_rows[f"{name}_worst_row"] = comparison[0].line
            note_rows[f"{name}_slower_rows"] = "; ".join(each.line for each in comparison if each.ratio < 1)
    rfork_results = [result for result in results if result.runs and result.case.role.startswith("ours")]
    if rfork_results:
        note_rows["storage_peak_rss_over_row"] = max(rfork_results, key=lambda result: result.extra_bytes).case.label
    note_rows |= {f"not run: {result.case.label}": result.note for result in results if result.note}
    return note_rows
