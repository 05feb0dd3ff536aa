"""Measure what serving its weights costs a busy seed, and what the governor changes.

A seed processes generation requests sequentially (a small Llama on the CPU, greedy, one torch thread) and
reports each step to its governor, as an engine does. Meanwhile one or three readers fork its weights in a
loop: `rfork.fork` against a real planner, every byte verified. The readers do not serve, so all of them read
from the seed.

The complete seed process (inference, exporters, gRPC) is pinned to one core; readers, planner and this
process are pinned to the others. So sending competes with inference for one core, which is the worst case;
memory and the last-level cache are shared by all. With two cores all readers share one, which bounds their
speed.

- "governor on" is the product's default; "off" is without a latency setpoint and with exporter threads of the same
  niceness as the inference threads.
- "gloo" is a `torch.distributed` broadcast of the same tensors on a thread of the seed, a stand-in for NCCL.
- "idle, slot …": no reader runs. The ratio of a round's two idle slots is this machine's noise.
- "the seed idles": the seed processes no request, so only the transfer speed counts; "limit: bare socket" sends the
  same tensors over one connection without a protocol or verification.

Times are per request unless labelled as per token; quantiles are over the pooled rounds, which are
interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks import harness
from benchmarks.disturb.cases import DisturbCase, ReaderTransport, SlotResult, quantile
from benchmarks.disturb.runner import MAX_READERS, DisturbRunner, SlotSize, start_processes
from benchmarks.disturb.workers import other_cores, seed_cores
from benchmarks.harness import GB, Options, Row
from rfork import logs
from rfork.errors import RforkError
from rfork.transport.mooncake.library import library_state

IDLE = (DisturbCase("idle", slot=1), DisturbCase("idle", slot=2))
SOCKET = "limit: bare socket, the seed idles"


def main() -> None:
    """Measure, print, and write the requested output."""
    options = harness.options("disturb", __doc__)
    logs.configure(json=False, level="error")
    cases = cases_of(options)
    results = {case.name: SlotResult() for case in cases}
    slot = SlotSize(120, 8, idle_s=0.7) if options.quick else SlotSize(250, 8, idle_s=2.0)
    with start_processes() as (seed, readers):
        run = DisturbRunner(seed, readers, slot)
        results[SOCKET] = SlotResult()
        contenders = {case.name: run.contender(case, results[case.name]) for case in cases}
        contenders[SOCKET] = run.socket(results[SOCKET])
        harness.interleave(contenders, options.rounds)
    serving = [case for case in cases if case.serves]
    harness.publish(
        options,
        settings={
            "requests_a_slot": slot.requests,
            "tokens_a_request": slot.tokens,
            "seed_cores": ",".join(map(str, sorted(seed_cores()))),
            "other_cores": ",".join(map(str, sorted(other_cores()))),
        },
        rows=rows(results, serving),
        figures=figures(results, cases),
        plot=("contender", "p99 / idle"),
    )


def cases_of(options: Options) -> list[DisturbCase]:
    """Return all cases; with --quick only those with three readers and the governor, without gloo."""
    transports: tuple[ReaderTransport, ...] = ("http",) if library_state().error else ("http", "transfer_engine")
    counts = (MAX_READERS,) if options.quick else (1, MAX_READERS)
    read = [
        DisturbCase(transport, count, governed)
        for transport in transports
        for count in counts
        for governed in (False, True)
        if governed or not options.quick
    ]
    gloo = [] if options.quick else [DisturbCase("gloo", count) for count in counts]
    speed = [
        DisturbCase(transport, 1, governed, serves=False)
        for transport in (transports[:1] if options.quick else transports)
        for governed in (False, True)
    ]
    half_rate = len(read) // 2
    return [IDLE[0], *read[:half_rate], IDLE[1], *read[half_rate:], *gloo, *speed]


def rows(results: Mapping[str, SlotResult], cases: Sequence[DisturbCase]) -> list[Row]:
    """Return one row per case: milliseconds, and ratios to both idle slots pooled."""
    idle = SlotResult()
    for case in IDLE:
        idle.add(results[case.name])
    lines: list[Row] = [result_row("limit: no reader (both idle slots)", idle, idle)]
    lines += [result_row(case.name, results[case.name], idle) for case in cases]
    for name, slots in results.items():
        if not slots.requests:
            lines.append({"contender": name, "requests": 0, "GB/s": slots.bytes_per_s / GB})
    return lines


def result_row(name: str, slots: SlotResult, idle: SlotResult) -> Row:
    """Return the row of a case in which the seed serves requests."""
    return {
        "contender": name,
        "requests": len(slots.requests),
        "p50 ms": quantile(slots.requests, 0.5) * 1e3,
        "p99 ms": quantile(slots.requests, 0.99) * 1e3,
        "p99.9 ms": quantile(slots.requests, 0.999) * 1e3,
        "token p50 ms": quantile(slots.tokens, 0.5) * 1e3,
        "token p99 ms": quantile(slots.tokens, 0.99) * 1e3,
        "tokens/s": slots.tokens_per_s,
        "p50 / idle": ratio(slots, idle, 0.5),
        "p99 / idle": ratio(slots, idle, 0.99),
        "GB/s": slots.bytes_per_s / GB,
    }


def ratio(slots: SlotResult, idle: SlotResult, share: float) -> float:
    """Return the ratio of a request-time quantile to the same quantile without readers."""
    return quantile(slots.requests, share) / quantile(idle.requests, share)


def figures(results: Mapping[str, SlotResult], cases: Sequence[DisturbCase]) -> dict[str, float]:
    """Return the figures. Those of DESIGN section 11 are the worst over the transports; the others name it."""
    idle = SlotResult()
    for case in IDLE:
        idle.add(results[case.name])
    found = {"disturb_p99_idle_vs_idle": ratio(results[IDLE[0].name], results[IDLE[1].name], 0.99)}
    speeds = {(case.transport, case.governed): results[case.name] for case in cases if not case.serves}
    worst_p99, worst_speed = 0.0, float("inf")
    for case in cases:
        slots = results[case.name]
        if not case.serves or case.transport == "idle":
            continue
        word = "" if case.transport == "gloo" else "_governed" if case.governed else "_free"
        readers = "" if case.readers == MAX_READERS else f"_{case.readers}_reader"
        value = ratio(slots, idle, 0.99)
        found[f"disturb_p99_{case.transport}{word}{readers}"] = value
        found[f"disturb_tokens_{case.transport}{word}{readers}"] = slots.tokens_per_s / idle.tokens_per_s
        if case.governed and case.transport != "gloo" and case.readers == MAX_READERS:
            worst_p99 = max(worst_p99, value)
    for transport, governed in speeds:
        if governed:
            value = speeds[transport, True].bytes_per_s / speeds[transport, False].bytes_per_s
            found[f"disturb_speed_{transport}_governed"] = value
            worst_speed = min(worst_speed, value)
    single = {
        (case.transport, case.governed): results[case.name].bytes_per_s
        for case in cases
        if case.serves and case.readers == 1 and case.transport not in ("idle", "gloo")
    }
    ratios = [single[transport, True] / single[transport, False] for transport, governed in single if governed]
    if ratios:
        found["disturb_one_reader_speed"] = min(ratios)
    return {"disturb_p99_governed": worst_p99, "disturb_speed_governed": worst_speed, **found}


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
