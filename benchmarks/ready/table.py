"""Rows and figures, computed from the starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.engines.cases import EngineName
from benchmarks.harness import Row
from benchmarks.ready.cases import PREFETCH, RESTART, START_UP, WARM, Link, ReadyCase
from benchmarks.ready.phases import PHASES, Start

Starts = Mapping[ReadyCase, Sequence[Start]]
LinkSeconds = Mapping[Link, Sequence[float]]


def row(case: ReadyCase, starts: Sequence[Start], floor_s: float) -> Row:
    """Return a table row: medians of the times, and the phases of the median start."""
    shown = median_start(starts)
    first_tokens = [start.first_token_s for start in starts]
    return {
        "contender": case.key,
        "first token s": round(median(first_tokens), 2),
        "/ floor": round(median(first_tokens) / floor_s, 3),
        "weights s": round(median(start.weights_s for start in starts), 3),
        **{name: _rounded(shown.seconds(name)) for name in PHASES},
        "fetched": f"{shown.fetched.began:.1f} to {shown.fetched.ended:.1f}" if shown.fetched is not None else None,
        "sources": shown.sources or None,
        "spread": round((max(first_tokens) - min(first_tokens)) / median(first_tokens), 2),
        "runs": len(starts),
    }


def limit_row(link: Link, seconds: Sequence[float]) -> Row:
    """Return the row of a transfer without an engine."""
    middle = median(seconds)
    return {
        "contender": f"transfer alone, {link.name}",
        "first token s": round(middle, 2),
        "spread": round((max(seconds) - min(seconds)) / middle, 2),
        "runs": len(seconds),
    }


def median_start(starts: Sequence[Start]) -> Start:
    """Return the start with the median time; of an even number, the lower one of the two in the middle."""
    return sorted(starts, key=lambda start: start.first_token_s)[(len(starts) - 1) // 2]


def floor_s(case: ReadyCase, starts: Starts, links: LinkSeconds) -> float:
    """Return the larger of the engine's start-up alone and, for rows that read over a link, the transfer alone."""
    alone = [
        start.first_token_s
        for other, found in starts.items()
        if (other.engine, other.name) == (case.engine, START_UP)
        for start in found
    ]
    limits = [median(alone)] if alone else []
    if case.link is not None and links.get(case.link):
        limits.append(median(links[case.link]))
    return max(limits, default=float("nan"))


def figures(starts: Starts, links: LinkSeconds) -> dict[str, float]:
    """Return the figures of each engine, and the worst as the one with a goal."""
    by_engine: dict[str, dict[EngineName, float]] = {"ready_vs_floor": {}, "ready_restart_weights": {}}
    for engine in sorted({case.engine for case, found in starts.items() if found}):
        shares = [
            median(start.first_token_s for start in found) / floor_s(case, starts, links)
            for case, found in starts.items()
            if found and case.engine == engine and case.name == PREFETCH and floor_s(case, starts, links) > 0
        ]
        if shares:
            by_engine["ready_vs_floor"][engine] = max(shares)
        weights = {
            case.name: median(start.weights_s for start in found)
            for case, found in starts.items()
            if found and case.engine == engine
        }
        if RESTART in weights and WARM in weights:
            by_engine["ready_restart_weights"][engine] = weights[RESTART] / weights[WARM]
    found_figures: dict[str, float] = {}
    for name, values in by_engine.items():
        if values:
            found_figures |= {name: max(values.values())} | {
                f"{name}_{engine}": value for engine, value in values.items()
            }
    return found_figures


def _rounded(seconds: float) -> float | None:
    return round(seconds, 3) if seconds else None
