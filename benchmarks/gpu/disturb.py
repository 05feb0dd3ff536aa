"""Measure what serving its weights costs a seed that decodes on a GPU, and what the governor changes.

A seed process decodes one token after the other (a plain torch decoder of 2.2 GB in bfloat16, static
key-value cache, each step one CUDA graph; on a CPU 10 MB and no graph) and reports each step to its governor.
Meanwhile 1 or 2 targets, processes on the same GPU, fork its weights in a loop: `rfork.fork` against a real
planner, every chunk verified, into zeroed tensors; all bytes of the last fork are compared again at the end
of a slot. The targets do not serve.

- Without MPS the kernels of several processes share a GPU in turns: the targets' verification is in these figures
  too, as it is when a replica starts next to another.
- "governor on" is the product's default; "off" is without the limit on the engine's latency.
- "kernel copies" stands for NCCL, which refuses two ranks on one GPU: a kernel copies as many bytes in a loop,
  ungoverned.
- "idle, slot …": no reader runs. The ratio of a round's two idle slots is this machine's noise.

Quantiles are over the tokens of all rounds, which are interleaved. `gpu_disturb_tokens_per_s` is the worst
governed transport with the most targets, relative to idle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from benchmarks import harness
from benchmarks.disturb.cases import SlotResult, quantile
from benchmarks.disturb.workers import REPLY_TIMEOUT_S, BenchWorker, planner_process
from benchmarks.gpu.common import GpuContenders, GpuOptions, parse
from benchmarks.gpu.disturb_workers import KERNEL_COPIES, GpuDisturbCase, GpuOrder, seed_main, target_main
from benchmarks.harness import GB, Contender, Row
from rfork import logs
from rfork.errors import RforkError

TRANSPORTS = ("cuda_ipc", "shared_memory", "transfer_engine", "http")
MAX_TARGETS = 2
IDLE = (GpuDisturbCase("idle", slot=1), GpuDisturbCase("idle", slot=2))
SeedWorker = BenchWorker[GpuOrder, SlotResult | None]
TargetWorker = BenchWorker[GpuOrder, None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and write the requested files; raises RforkError for wrong bytes."""
    options = parse("disturb", __doc__, arguments)
    logs.configure(json=False, level="error")
    cases = cases_of(options)
    results = {case.name: SlotResult() for case in cases}
    field = GpuContenders()
    slot_s = slot_seconds(options)
    with start_processes(str(options.device)) as (seed, targets):
        for case in cases:
            field.add(case.name, partial(slot, case, slot_s, seed, targets, results))
        field.run(options.common.rounds, warmed=lambda: results.update({case.name: SlotResult() for case in cases}))
        graphed = bool(seed.counter.value)
    harness.publish(
        options.common,
        settings={"device": str(options.device), "slot_s": slot_s, "cuda_graph": graphed},
        rows=rows(results, cases, field.notes),
        figures=figures(results, [case for case in cases if case.name not in field.notes]),
        plot=("contender", "tokens/s"),
    )
    if any("WRONG BYTES" in note for note in field.notes.values()):
        raise RforkError("wrong bytes")


def cases_of(options: GpuOptions) -> list[GpuDisturbCase]:
    """Return all cases; with --quick only those with the most targets."""
    counts = (MAX_TARGETS,) if options.common.quick else (1, MAX_TARGETS)
    read = [
        GpuDisturbCase(transport, count, governed)
        for transport in TRANSPORTS
        for count in counts
        for governed in (False, True)
    ] + [GpuDisturbCase(KERNEL_COPIES, count) for count in counts]
    half_rate = len(read) // 2
    return [IDLE[0], *read[:half_rate], IDLE[1], *read[half_rate:]]


def slot_seconds(options: GpuOptions) -> float:
    """Return the minimum of seconds that the seed decodes in one slot."""
    if options.device.type == "cpu":
        return 0.4 if options.common.quick else 1.0
    return 1.0 if options.common.quick else 2.0


def slot(
    case: GpuDisturbCase,
    seconds: float,
    seed: SeedWorker,
    targets: Sequence[TargetWorker],
    pools: Mapping[str, SlotResult],
) -> Contender:
    """Run one slot of a case: pools its results and returns its seconds."""

    def run() -> float:
        readers = targets[: case.targets]
        seed.request(GpuOrder("open", case))
        try:
            try:
                for reader in readers:
                    reader.request(GpuOrder("start", case))
                before = sum(reader.counter.value for reader in readers)
                results = seed.request(GpuOrder("serve", seconds=seconds))
                tokens_read = sum(reader.counter.value for reader in readers) - before
            finally:
                _stop(readers)
        finally:
            seed.request(GpuOrder("close"))
        if results is None:
            raise RforkError("the seed returned no result")
        results.bytes_read = tokens_read
        pools[case.name].add(results)
        return results.seconds

    return run


def _stop(readers: Sequence[TargetWorker]) -> None:
    """Stop all readers, then raise the first error."""
    errors: list[RforkError] = []
    for reader in readers:
        reader.send(GpuOrder("stop"))
    for reader in readers:
        try:
            reader.reply()
        except RforkError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def rows(results: Mapping[str, SlotResult], cases: Sequence[GpuDisturbCase], notes: Mapping[str, str]) -> list[Row]:
    """Return a row per case; ratios are to both idle slots pooled."""
    idle = idle_result(results)
    lines: list[Row] = [result_row("limit: no reader (both idle slots)", idle, idle)]
    for case in cases:
        if case.name in notes:
            lines.append({"contender": case.name, "note": notes[case.name]})
        else:
            lines.append(result_row(case.name, results[case.name], idle))
    return lines


def result_row(name: str, slots: SlotResult, idle: SlotResult) -> Row:
    """Return the row of a case that ran."""
    return {
        "contender": name,
        "tokens/s": slots.tokens_per_s,
        "tokens / idle": slots.tokens_per_s / idle.tokens_per_s,
        "p50 ms": quantile(slots.tokens, 0.5) * 1e3,
        "p99 ms": quantile(slots.tokens, 0.99) * 1e3,
        "p99 / idle": quantile(slots.tokens, 0.99) / quantile(idle.tokens, 0.99),
        "GB/s": slots.bytes_per_s / GB,
        "tokens": len(slots.tokens),
        "note": "",
    }


def idle_result(results: Mapping[str, SlotResult]) -> SlotResult:
    """Return both idle slots pooled."""
    idle = SlotResult()
    for case in IDLE:
        idle.add(results[case.name])
    return idle


def figures(results: Mapping[str, SlotResult], cases: Sequence[GpuDisturbCase]) -> dict[str, float]:
    """Return the figures of the cases that ran; that of DESIGN section 11 is the worst over the governed
    transports.
    """
    idle = idle_result(results)
    found: dict[str, float] = {}
    worst: list[float] = []
    for case in cases:
        slots = results[case.name]
        if case.transport == "idle":
            continue
        word = "" if case.transport == KERNEL_COPIES else "_governed" if case.governed else "_free"
        tail = f"{case.transport.replace(' ', '_')}{word}_{case.targets}"
        share = slots.tokens_per_s / idle.tokens_per_s
        found[f"gpu_disturb_tokens_{tail}"] = share
        found[f"gpu_disturb_p99_{tail}"] = quantile(slots.tokens, 0.99) / quantile(idle.tokens, 0.99)
        if case.transport != KERNEL_COPIES and case.governed and case.targets == MAX_TARGETS:
            worst.append(share)
    first = {"gpu_disturb_tokens_per_s": min(worst)} if worst else {}
    noise = results[IDLE[0].name].tokens_per_s / results[IDLE[1].name].tokens_per_s
    return {**first, "gpu_disturb_idle_vs_idle": noise, **found}


@contextlib.contextmanager
def start_processes(device: str) -> Iterator[tuple[SeedWorker, list[TargetWorker]]]:
    """Run the planner, the seed's process and the targets' processes for the block."""
    cores = os.sched_getaffinity(0)
    context = multiprocessing.get_context("spawn")
    url, there = context.Pipe()
    planner = context.Process(target=planner_process, args=(there, cores), daemon=True)
    planner.start()
    try:
        if not url.poll(REPLY_TIMEOUT_S):
            raise RforkError("the planner did not start")
        at = url.recv()
        with contextlib.ExitStack() as workers:
            seed: SeedWorker = workers.enter_context(BenchWorker("the seed", cores, seed_main, at, device))
            targets = [
                workers.enter_context(BenchWorker(f"target {number + 1}", cores, target_main, at, device))
                for number in range(MAX_TARGETS)
            ]
            yield seed, targets
    finally:
        planner.terminate()
        planner.join()


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}".rstrip()) from None
