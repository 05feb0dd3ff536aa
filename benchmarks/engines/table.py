"""Rows and figures, computed from the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.engines.cases import EngineCase, EngineRun
from benchmarks.harness import Row

FORK = "rfork from a seed, http"
SAME_HOST = "rfork from a seed of this host"
DISK = "default loader, cold cache"


def row(case: EngineCase, runs: Sequence[EngineRun], size: int) -> Row:
    """Return a table row with medians."""
    weights_s = median(run.weights_s for run in runs)
    return {
        "contender": case.key,
        "weights s": round(weights_s, 2),
        "GB/s": round(size / weights_s / 1e9, 2),
        "first token s": round(median(run.first_token_s for run in runs), 1),
        "read MB": round(median(run.read_bytes for run in runs) / 1e6),
        "spread": round((max(run.weights_s for run in runs) - min(run.weights_s for run in runs)) / weights_s, 2),
        "runs": len(runs),
    }


def limit_row(name: str, seconds: Sequence[float], size: int) -> Row:
    """Return the row of a physical limit."""
    middle = median(seconds)
    return {
        "contender": f"limit: {name}",
        "weights s": round(middle, 2),
        "GB/s": round(size / middle / 1e9, 2),
        "first token s": None,
        "read MB": 0,
        "spread": round((max(seconds) - min(seconds)) / middle, 2),
        "runs": len(seconds),
    }


def figures(runs: Mapping[EngineCase, Sequence[EngineRun]]) -> dict[str, float]:
    """Return the figures of DESIGN section 11 for the worse engine and for each, and those of forks within a
    host.
    """
    seconds = {
        (case.engine, case.name): median(run.weights_s for run in first_tokens)
        for case, first_tokens in runs.items()
        if first_tokens
    }
    found: dict[str, float] = {}
    for name, fork in (("engine_fork_vs_disk_cold", FORK), ("engine_fork_vs_disk_cold_same_host", SAME_HOST)):
        shares = {
            f"{name}_{engine}": seconds[engine, fork] / seconds[engine, DISK]
            for engine in ("vllm", "sglang")
            if (engine, fork) in seconds and (engine, DISK) in seconds
        }
        found |= {name: max(shares.values()), **shares} if shares else {}
    return found
