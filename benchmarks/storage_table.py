"""The rows and the figures of `benchmarks.storage`, of what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness import GB, Row, Value
from benchmarks.storage_case import DESTINATIONS, MEDIA, Case, Destination, Medium, Result
from benchmarks.storage_image import DENSE, SMALL

MIB = 1 << 20
VERSUS, VERIFIED_VERSUS = "storage_vs_best_peer", "storage_verified_vs_best_peer"


@dataclass(frozen=True)
class Versus:
    """Our row beside the best of the others' that answer the same question."""

    ours: Case
    other: Case
    ratio: float
    """How many times as long the other takes."""

    @property
    def line(self) -> str:
        """In words."""
        return f"{self.ours.label} / {self.other.contender}: {self.ratio:.3f}"


def row(result: Result) -> Row:
    """One line of the table, of a case that ran."""
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
        "+MiB": None if limit else result.over_bytes // MIB,
        "spread": round((max(seconds) - min(seconds)) / result.seconds, 2),
        "runs": len(seconds),
    }


def against_peers(results: Iterable[Result], *, verified: bool = False) -> list[Versus]:
    """Each of our rows against the fastest peer with the same image, medium and destination, the worst first.

    With `verified`, what checks digests as it loads, on both sides.
    """
    fastest: dict[tuple[str, Medium, Destination], Result] = {}
    ran = [result for result in results if result.runs]
    for result in ran:
        best = fastest.get(result.case.question)
        if (
            result.case.role == "peer"
            and (result.case.verified or not verified)
            and (best is None or result.seconds < best.seconds)
        ):
            fastest[result.case.question] = result
    role = "ours otherwise" if verified else "ours"
    pairs = [
        (ours, fastest[ours.case.question])
        for ours in ran
        if ours.case.role == role and ours.case.verified == verified and ours.case.question in fastest
    ]
    versus = [Versus(ours.case, other.case, other.seconds / ours.seconds) for ours, other in pairs]
    return sorted(versus, key=lambda each: each.ratio)


def figures(results: Sequence[Result]) -> dict[str, float]:
    """The figures that design section 8 names, and beside them those for the other media."""
    ran = [result for result in results if result.runs]
    ours = {result.case.question: result.speed for result in ran if result.case.role == "ours"}
    named: dict[str, float] = {}
    for name, verified in ((VERSUS, False), (VERIFIED_VERSUS, True)):
        if versus := against_peers(ran, verified=verified):
            named[name] = versus[0].ratio
    for medium in MEDIA:
        limits = limits_of(ran, medium)
        shares = [
            ours[DENSE, medium, into] / limit
            for into, limit in limits.items()
            if (DENSE, medium, into) in ours
        ]
        if shares:
            named[f"storage_{medium}_vs_medium"] = min(shares)
    for medium in MEDIA:
        shares = [
            ours[SMALL, medium, into] / ours[DENSE, medium, into]
            for into in DESTINATIONS
            if (SMALL, medium, into) in ours and (DENSE, medium, into) in ours
        ]
        if shares:
            named["storage_small_vs_dense" + ("" if medium == "cold" else f"_{medium}")] = min(shares)
    over = [result.over_bytes for result in ran if result.case.role.startswith("ours")]
    if over:
        named["storage_peak_rss_over"] = max(over) / MIB
    return named


def limits_of(results: Iterable[Result], medium: Medium) -> dict[Destination, float]:
    """What the medium allows of the dense image, bytes a second, for each destination."""
    found: dict[Destination, float] = {}
    for result in results:
        case = result.case
        if case.role == "limit" and result.runs and (case.image, case.medium) == (DENSE, medium):
            # A limit that goes nowhere counts for every destination; of several, what the medium can do.
            for into in DESTINATIONS if case.destination == "none" else (case.destination,):
                found[into] = max(found.get(into, 0.0), result.speed)
    return found


def notes(results: Sequence[Result]) -> dict[str, Value]:
    """Which rows the figures are of, in words; for the settings."""
    told: dict[str, Value] = {}
    for name, verified in ((VERSUS, False), (VERIFIED_VERSUS, True)):
        versus = against_peers(results, verified=verified)
        if versus:
            told[f"{name}_worst_row"] = versus[0].line
            told[f"{name}_rows_behind"] = "; ".join(each.line for each in versus if each.ratio < 1)
    ours = [result for result in results if result.runs and result.case.role.startswith("ours")]
    if ours:
        told["storage_peak_rss_over_row"] = max(ours, key=lambda result: result.over_bytes).case.label
    told |= {f"not run: {result.case.label}": result.note for result in results if result.note}
    return told
