"""Measure the cost of a plan with 10,000 registered ranks, relative to a bare FastAPI route.

Every planner is ``rfork planner`` in a separate process (one uvicorn worker, default settings, no token), as
is the server with the bare routes. A planner knows R ranks, one per host: seeds, and up to 300 targets that
all have a running fork. The client is this process, on one thread, with persistent sockets and pre-encoded
requests. "core" and "client" are the shares of one core that the server and the client used.

- "R ranks: plan" and so on: one call at a time over one connection, without concurrent calls, in slices
  of 20 calls of each type that alternate with those of the other contenders. "plan" is the first plan of a
  fork, "plan again" a replan half way through. The batch window is 0; the rows that name a window show what
  the default adds to a single arrival.
- "x bare" is relative to "bare: POST", an ``async def`` that returns a constant dict and does not read the
  body, which is that of a plan. "bare: POST, models" parses the planner's request and returns a constant plan:
  no route with these models is faster.
- "in process": the same plans by the plan service, and by the policy alone, without HTTP.
- "maximum rate": heartbeats, or complete forks, over 16 connections that never pause. "calls/s" is the rate of
  responses.
- "R ranks, N heartbeats/s": forks start at 5 per second while seeds send heartbeats at the default rate of R
  ranks, or at half of it. p50 and p99 are those of "plan", calls/s is the rate of heartbeat responses: below N,
  the planner is saturated.

p50 is the median of all slices' medians, p99 is over all calls; ratios are medians of each slice's ratio.
"bytes/rank" is the planner's resident memory at the end, with the running forks and the 1,000 finished ones
that it keeps, minus that of the same process before the first rank, divided by R. Growth is p50 at 10,000
ranks divided by p50 at 100; log N would allow 2.

`--ranks N` measures one planner with N ranks instead: `python -m benchmarks.planner_load --quick --ranks 40000`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
from collections.abc import Mapping, Sequence
from statistics import median, quantiles

from benchmarks import harness
from benchmarks.harness import Options, Row
from benchmarks.planner_load import servers
from benchmarks.planner_load.client import drive
from benchmarks.planner_load.contenders import (
    BARE,
    BARE_MODELS,
    BARE_POST,
    CONNECTIONS,
    FORKS_A_SECOND,
    LoadBench,
    LoadRow,
    median_seconds,
    medians,
)
from benchmarks.planner_load.fleet import FORK_CALLS, HEARTBEAT, PLAN, REPLAN, CallerPool, LoadFleet
from benchmarks.planner_load.servers import ServerProcess
from rfork import logs
from rfork.errors import RforkError
from rfork.settings import PlannerSettings, load

SIZES = (100, 1_000, 10_000)
KEYS = 8


def main() -> None:
    """Run the benchmark, print the table and write the requested files."""
    options, ranks = parse()
    logs.configure(json=False, level="error")
    bench = LoadBench(quick=options.quick)
    sizes = (ranks,) if ranks else SIZES
    loaded_stack = [LoadFleet(size) for size in (sizes[-1:] if options.quick or ranks else sizes[1:])]
    with contextlib.ExitStack() as processes:
        bench.serve_bare(processes.enter_context(servers.bare()))
        planners: list[tuple[LoadFleet, ServerProcess, int]] = []
        for fleet in [LoadFleet(ranks)] if ranks else fleets(options.quick):
            server, caller_pool = (
                processes.enter_context(servers.planner(fleet.batch_s)),
                CallerPool(fleet),
            )
            planners.append((fleet, server, server.resident_bytes))
            drive(server.port, caller_pool.register(CONNECTIONS))
            drive(server.port, [caller_pool.request_all()])
            bench.one_at_a_time(server, caller_pool)
            if fleet in loaded_stack:
                bench.under_load(server, caller_pool)
        for size in () if ranks else sizes:
            bench.inside(LoadFleet(size))
        # Freeze existing objects: otherwise our garbage collection pauses would count as the planner's.
        gc.collect()
        gc.freeze()
        bench.measure(options.rounds)
        memory = {fleet.name: (server.resident_bytes - empty) / fleet.ranks for fleet, server, empty in planners}
    harness.publish(
        options,
        settings={"connections": CONNECTIONS, "forks_a_second": FORKS_A_SECOND, "calls_a_slice": bench.calls},
        rows=[row(line, bench, memory) for line in bench.rows],
        figures=figures(bench, memory, LoadFleet(sizes[-1])),
        plot=("contender", "p50 ms"),
    )


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, int]:
    """Parse the common benchmark options and the number of ranks; 0: the sizes of the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_load", add_help=False)
    parser.add_argument("--ranks", type=int, default=0, help="measure one planner with this many ranks instead")
    chosen, rest = parser.parse_known_args(arguments)
    return harness.options("planner_load", __doc__, rest, own=parser), chosen.ranks


def fleets(quick: bool) -> list[LoadFleet]:
    """Return the fleets; the quick form has only those that figures need."""
    one_group, max_size = [LoadFleet(size) for size in SIZES], SIZES[-1]
    if quick:
        return one_group
    return [
        *one_group,
        LoadFleet(max_size, keys=KEYS),
        LoadFleet(max_size, batch_s=load(PlannerSettings).batch_window_s),
    ]


def row(line: LoadRow, bench: LoadBench, memory: Mapping[str, float]) -> Row:
    """Return a table row."""
    runs = bench.runs[line.contender]
    every = [seconds for run in runs for seconds in run.samples.seconds[line.call_type]]
    wall_s = sum(run.samples.wall_s for run in runs)
    core_s = sum(run.core_s for run in runs)
    alone = line.contender in bench.sequential
    bytes_a_rank = memory.get(line.contender) if line.call_type == PLAN else None
    return {
        "contender": line.name,
        "p50 ms": median_seconds(runs, line.call_type) * 1e3,
        "p99 ms": quantiles(every, n=100, method="inclusive")[98] * 1e3,
        "x bare": ratio(bench, (line.contender, line.call_type), (BARE, BARE_POST)) if alone else None,
        "calls/s": round(median(run.samples.rate(*line.counted) for run in runs)) if line.counted else None,
        "core": core_s / wall_s if core_s else None,
        "client": sum(run.samples.client_s for run in runs) / wall_s if core_s else None,
        "bytes/rank": None if bytes_a_rank is None else round(bytes_a_rank),
    }


def ratio(bench: LoadBench, numerator: tuple[str, str], denominator: tuple[str, str]) -> float:
    """Return the ratio of the p50 of `numerator` to `denominator` (contender and call type): the median over
    all slices.
    """
    upper, lower = (medians(bench.runs[name], call_type) for name, call_type in (numerator, denominator))
    return median(above / below for above, below in zip(upper, lower, strict=True))


def figures(bench: LoadBench, memory: Mapping[str, float], large_fleet: LoadFleet) -> dict[str, float]:
    """Return the figures of DESIGN section 11, and their components."""
    small_fleet = LoadFleet(SIZES[0])
    plan, bare = (large_fleet.name, PLAN), (BARE, BARE_POST)
    beats = bench.runs[f"{large_fleet.name}, heartbeats"]
    forks = bench.runs[f"{large_fleet.name}, forks"]
    found = {
        "plan_cost_vs_bare_route": ratio(bench, plan, bare),
        "plan_again_cost_vs_bare_route": ratio(bench, (large_fleet.name, REPLAN), bare),
        "plan_cost_vs_bare_models": ratio(bench, plan, (BARE, BARE_MODELS)),
        "plan_bytes_per_rank": memory[large_fleet.name],
        "heartbeats_per_s": median(run.samples.rate(HEARTBEAT) for run in beats),
        "fork_requests_per_s": median(run.samples.rate(*FORK_CALLS) for run in forks),
    }
    if small_fleet.name in bench.runs:
        growth = ratio(bench, plan, (small_fleet.name, PLAN))
        allowed = math.log(large_fleet.ranks) / math.log(small_fleet.ranks)
        found |= {"plan_growth_10000_vs_100": growth, "plan_growth_vs_log": growth / allowed}
    return found


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
