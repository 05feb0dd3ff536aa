"""What is made of the runs: rows and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.engines.cases import Case, Run
from benchmarks.harness import Row

FORK = "rfork from a seed, http"
DISK = "default loader, cold cache"


def row(case: Case, runs: Sequence[Run], size: int) -> Row:
    """One line of the table; medians."""
    weights_s = median(run.weights_s for run in runs)
    return {
        "contender": case.key,
        "weights s": round(weights_s, 2),
        "GB/s": round(size / weights_s / 1e9, 2),
        "first token s": round(median(run.first_token_s for run in runs), 1),
        "read MB": round(median(run.read_bytes for run in runs) / 1e6),
        "spread": round(
            (max(run.weights_s for run in runs) - min(run.weights_s for run in runs)) / weights_s, 2
        ),
        "runs": len(runs),
    }


def socket_row(seconds: Sequence[float], size: int) -> Row:
    """The line of the physical limit."""
    middle = median(seconds)
    return {
        "contender": "limit: one loopback socket",
        "weights s": round(middle, 2),
        "GB/s": round(size / middle / 1e9, 2),
        "first token s": None,
        "read MB": 0,
        "spread": round((max(seconds) - min(seconds)) / middle, 2),
        "runs": len(seconds),
    }


def figures(runs: Mapping[Case, Sequence[Run]]) -> dict[str, float]:
    """The figure of the design page, the worse engine's; and each engine's own."""
    seconds = {
        (case.engine, case.name): median(run.weights_s for run in made) for case, made in runs.items() if made
    }
    shares = {
        f"engine_fork_vs_disk_cold_{engine}": seconds[engine, FORK] / seconds[engine, DISK]
        for engine in ("vllm", "sglang")
        if (engine, FORK) in seconds and (engine, DISK) in seconds
    }
    return {**({"engine_fork_vs_disk_cold": max(shares.values())} if shares else {}), **shares}
