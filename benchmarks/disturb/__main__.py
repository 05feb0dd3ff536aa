"""Measure what serving its weights costs a busy seed, and what the governor changes.

A seed processes generation requests sequentially (a small Llama on the CPU, greedy, one torch thread) and
reports each step to its governor, as an engine does. Meanwhile one or three readers fork its weights in a
loop: `rfork.fork` against a real planner, every byte verified. The readers do not serve, so all of them read
from the seed.

The complete seed process (inference, exporters, gRPC) is pinned to one core; readers, planner and this
process are pinned to the others. So sending competes with inference for one core, which is the worst case;
memory and the last-level cache are shared by all. With two cores all readers share one, which bounds their
speed.

- "governor on" is the product's default; "off" is without a limit on the latency. Exporter threads have a lower
  priority than inference in both.
- "gloo" is a `torch.distributed` broadcast of the same tensors on a thread of the seed, a stand-in for NCCL.
- "idle, slot …": no reader runs. The ratio of a round's two idle slots is this machine's noise.
- "steps on another core": the seed of a device, whose steps do not compete with sending. A step is one native call
  of a few milliseconds on the seed's core, without the interpreter; all other threads of the seed are pinned to the
  readers' cores. The interpreter's lock is still shared between steps: a sender that is descheduled while it owns the
  lock delays the next step, above all if there are only two cores. Ratios are to the idle slot of this seed.
- "the seed idles": the seed processes no request, so only the transfer speed counts; "limit: bare socket" sends the
  same tensors over one connection without a protocol or verification. Their CPU time for each GB is the limit of
  what a seed with one core can send: if steps may be slower by 5 %, it can send for 5 % of the time at most.

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
from rfork import logs, settings
from rfork.errors import RforkError
from rfork.settings import InstanceSettings
from rfork.transport.mooncake.library import library_state

IDLE = (DisturbCase("idle", slot=1), DisturbCase("idle", slot=2))
IDLE_OTHER_CORE = DisturbCase("idle", slot=3, is_other_core=True)
SOCKET = "limit: bare socket, the seed idles"


def main() -> None:
    """Measure, print, and write the requested output."""
    options = harness.options("disturb", __doc__)
    logs.configure(json=False, level="error")
    cases = cases_of(options)
    results = {case.name: SlotResult() for case in cases}
    slot = SlotSize(300, 8, idle_s=1.0 if options.quick else 2.0)
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
    """Return all cases; with --quick without gloo, and those without the governor only for one HTTP reader."""
    transports: tuple[ReaderTransport, ...] = ("http",) if library_state().error else ("http", "transfer_engine")
    counts = (1, MAX_READERS)
    read = [
        DisturbCase(transport, count, governed)
        for transport in transports
        for count in counts
        for governed in (False, True)
        if not options.quick or (transport, count) == ("http", 1) or (governed and count == MAX_READERS)
    ]
    gloo = [] if options.quick else [DisturbCase("gloo", count) for count in counts]
    other_core = [IDLE_OTHER_CORE] + [
        DisturbCase("http", 1, governed, is_other_core=True) for governed in (False, True)
    ]
    speed = [
        DisturbCase(transport, 1, governed, serves=False)
        for transport in (transports[:1] if options.quick else transports)
        for governed in (False, True)
    ]
    half_rate = len(read) // 2
    return [IDLE[0], *read[:half_rate], IDLE[1], *read[half_rate:], *gloo, *other_core, *speed]


def idle_of(case: DisturbCase, results: Mapping[str, SlotResult]) -> SlotResult:
    """Return the pooled idle slots of the seed of a case."""
    idle = SlotResult()
    for other in (IDLE_OTHER_CORE,) if case.is_other_core else IDLE:
        idle.add(results[other.name])
    return idle


def rows(results: Mapping[str, SlotResult], cases: Sequence[DisturbCase]) -> list[Row]:
    """Return one row per case: milliseconds, and ratios to the idle slots pooled."""
    idle = idle_of(IDLE[0], results)
    lines: list[Row] = [result_row("limit: no reader (both idle slots)", idle, idle)]
    lines += [result_row(case.name, results[case.name], idle_of(case, results)) for case in cases]
    for name, slots in results.items():
        if not slots.requests:
            lines.append(
                {
                    "contender": name,
                    "requests": 0,
                    "GB/s": slots.bytes_per_s / GB,
                    "core s/GB": slots.core_s_per_byte * GB,
                }
            )
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
    first, second = (results[case.name] for case in IDLE)
    found = {"disturb_p99_idle_vs_idle": ratio(first, second, 0.99)}
    worst_p99 = 0.0
    for case in cases:
        if not case.serves or case.transport == "idle":
            continue
        slots, idle = results[case.name], idle_of(case, results)
        word = "" if case.transport == "gloo" else "_governed" if case.governed else "_free"
        readers = "" if case.readers == MAX_READERS else f"_{case.readers}_reader"
        other_core = "_other_core" if case.is_other_core else ""
        name = f"{case.transport}{word}{readers}{other_core}"
        found[f"disturb_p99_{name}"] = ratio(slots, idle, 0.99)
        found[f"disturb_tokens_{name}"] = slots.tokens_per_s / idle.tokens_per_s
        if case.governed and case.transport != "gloo" and not case.is_other_core:
            worst_p99 = max(worst_p99, found[f"disturb_p99_{name}"])
    speeds = governed_speeds(results, [case for case in cases if not case.serves])
    found |= {f"disturb_speed_{transport}_governed": speed for transport, speed in speeds.items()}
    single = [case for case in cases if case.serves and case.readers == 1]
    shared = governed_speeds(results, [case for case in single if not case.is_other_core])
    other = governed_speeds(results, [case for case in single if case.is_other_core])
    return {
        "disturb_p99_governed": worst_p99,
        "disturb_one_reader_speed": min(shared.values()),
        "disturb_other_core_speed": min(other.values()),
        "disturb_speed_governed": min(speeds.values()),
        "disturb_one_reader_limit": min(one_reader_limit(results).values()),
        **found,
    }


def governed_speeds(results: Mapping[str, SlotResult], cases: Sequence[DisturbCase]) -> dict[str, float]:
    """Return the readers' speed with the governor relative to that without it, for each transport with both."""
    speeds = {(case.transport, case.governed): results[case.name].bytes_per_s for case in cases}
    return {
        transport: speed / speeds[transport, False]
        for (transport, governed), speed in speeds.items()
        if governed and (transport, False) in speeds
    }


def one_reader_limit(results: Mapping[str, SlotResult]) -> dict[str, float]:
    """Return the speed that a busy seed can have at most with the governor relative to that without it, by transport.

    The allowed slowdown is the share of the seed's only core that sending may use; a bare socket uses the least.
    """
    allowed = settings.load(InstanceSettings).max_latency_ratio - 1
    bytes_per_s = allowed / results[SOCKET].core_s_per_byte
    cases = [DisturbCase(transport, 1, governed=False) for transport in ("http", "transfer_engine")]
    return {case.transport: bytes_per_s / results[case.name].bytes_per_s for case in cases if case.name in results}


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
