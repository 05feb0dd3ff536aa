"""Measure how fast one instance pulls an image from another, and the limit that bare sockets set.

Two images on one machine: a dense one of a Llama's shapes, and 20,000 small tensors. Contenders run
interleaved, each with four connections or reads in flight, and fill the same tensors of this process with the
same bytes from one other process. Before each run the tensors are zeroed and after it every byte is checked
against the digests (both untimed), so wrong bytes are never timed.

- "rfork": `rfork.fork` as a user calls it, with its own planner process; "seconds" is the report's
  transfer phase (plan, channel, bytes, verification), "full call" includes the capture and everything else.
  "shared_memory, map" replaces the target's pages with the source's, copy on write, and reads them
  once to verify them; "copy" copies them. gloo is `torch.distributed`'s, over loopback TCP. Both
  for the dense image only.
- "rfork nixl", if NIXL is installed: UCX within one host (`cma`), which copies from the other process's memory.
- "bare sockets": sendmsg from the tensors' memory, recvmsg into it, one quarter of the image for each
  of four open connections. Plain Python, no protocol, no verification.
- "Mooncake, a batch": one `batch_transfer_sync_read` with one entry per tensor, as engines use it today: what
  `pull_te_vs_mooncake` compares with. "Mooncake, merged": adjacent tensors merged, reads of at most
  64 MiB, four in flight. It opens connections as it needs.
- `pull_first_call_s` is what the first fork of a process takes longer than its later ones, in seconds: imports and
  set-up.
- "limit: memcpy": the same bytes copied on one core, from tensors of this process.

The quick form has the same images, so that set-up has the same share of a pull, but two rounds, and only the
contenders that the figures of DESIGN section 11 need.

GB/s are 1e9 image bytes per second, for the median of the rounds.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from benchmarks import harness
from benchmarks.harness import GB, Contender, Row
from benchmarks.pull.first_call import first_call_seconds
from benchmarks.pull.source import (
    IN_FLIGHT,
    LOOPBACK,
    MODULES,
    PullOffer,
    plain_engine,
    same_host_transports,
    source_process,
    transports,
)
from benchmarks.pull.target import PullTarget
from rfork import logs
from rfork.errors import RforkError
from rfork.receiver.report import ForkReport

SOCKETS, BATCH, MERGED, MEMCPY = (
    "bare sockets", "Mooncake, a batch", "Mooncake, merged", "limit: memcpy"
)  # fmt: skip
QUICK_ROUNDS = 2


def main() -> None:
    """Run the benchmark, print the table and write the requested files."""
    options = harness.options("pull", __doc__, quick_rounds=QUICK_ROUNDS)
    logs.configure(json=False, level="warning")
    reports: dict[str, list[ForkReport]] = {}
    with source_process(quick=False) as (planner, offer), contextlib.ExitStack() as open_sockets:
        connections = [
            open_sockets.enter_context(socket.create_connection((LOOPBACK, offer.port))) for _ in range(IN_FLIGHT)
        ]
        targets = [PullTarget(name, make, False, offer) for name, make in MODULES.items()]
        contenders: dict[str, Contender] = {}
        for target in targets:
            contenders |= contenders_of(target, planner, offer, connections, reports)
        if options.quick:
            contenders = {name: contenders[name] for name in contenders if name not in QUICK_OMITS}
        for warm_up in contenders.values():
            warm_up()
        for kept_image in reports.values():
            kept_image.clear()
        seconds = harness.interleave(contenders, options.rounds)
        first_call_s = first_call_seconds(planner)
    sizes = {name: target.bytes for target in targets for name in contenders if name.startswith(target.name)}
    harness.publish(
        options,
        settings={
            "in_flight": IN_FLIGHT,
            **{f"{target.name}_bytes": target.bytes for target in targets},
            **{f"{target.name}_tensors": len(target.pieces) for target in targets},
            **{f"{target.name}_chunk_bytes": target.image.layout.chunks.chunk_size for target in targets},
        },
        rows=[row(name, sizes[name], values, reports.get(name, ())) for name, values in seconds.items()],
        figures=figures({name: sizes[name] / GB / value for name, value in harness.medians(seconds).items()})
        | {"pull_first_call_s": first_call_s},
        plot=("contender", "GB/s"),
    )


def rfork_name(transport: str, *, verify: bool) -> str:
    """Return the name of rfork's contender over a transport."""
    return f"rfork {transport}" + ("" if verify else ", unverified")


QUICK_OMITS = {
    "dense: rfork shared_memory, copy",
    "dense: rfork gloo",
    f"dense: {MERGED}",
    f"small: {rfork_name('transfer_engine', verify=True)}",
    f"small: {MERGED}",
    f"small: {MEMCPY}",
}
"""Contenders that only the full form has."""


def contenders_of(
    target: PullTarget,
    planner: str,
    offer: PullOffer,
    connections: list[socket.socket],
    reports: dict[str, list[ForkReport]],
) -> dict[str, Contender]:
    """Return the contenders that fill this target, by name; rfork's reports are stored under the same names."""
    pulls: dict[str, Callable[[], float | None]] = {}
    for transport in transports():
        for verify in (True, False):
            name = rfork_name(transport, verify=verify)
            kept_image = reports.setdefault(f"{target.name}: {name}", [])
            pulls[name] = target.rfork(planner, transport, verify=verify, keep=kept_image.append)
    for transport in same_host_transports() if target.name == "dense" else ():
        for shm_mode in ("map", "copy") if transport == "shared_memory" else (None,):
            name = f"rfork {transport}" + (f", {shm_mode}" if shm_mode else "")
            kept_image = reports.setdefault(f"{target.name}: {name}", [])
            pulls[name] = target.rfork(planner, transport, verify=True, keep=kept_image.append, shared_memory=shm_mode)
    pulls[SOCKETS] = target.sockets(connections)
    if offer.session:
        engine = plain_engine()
        pulls[BATCH] = target.mooncake_batch(engine, offer.session)
        pulls[MERGED] = target.mooncake_merged(engine, offer.session)
    pulls[MEMCPY] = target.memcpy()
    return {f"{target.name}: {name}": target.run_checked(pull) for name, pull in pulls.items()}


def row(name: str, size: int, seconds: Sequence[float], reports: Sequence[ForkReport]) -> Row:
    """Return a table row; "full call" and "capture" exist for rfork only, in seconds."""
    speeds = [size / GB / value for value in seconds]
    values: dict[str, harness.Value] = {
        "contender": name,
        "GB/s": size / GB / median(seconds),
        "min": min(speeds),
        "max": max(speeds),
        "seconds": median(seconds),
        "full call": None,
        "capture": None,
    }
    if reports:
        values["full call"] = median(report.seconds for report in reports)
        values["capture"] = median(report.phases["capture"] for report in reports)
    return values


def figures(speed: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of DESIGN section 11, and those for the other image and form."""

    def ratio(one: str, other: str) -> float:
        return speed[one] / speed[other]

    http, transfer_engine = rfork_name("http", verify=False), rfork_name("transfer_engine", verify=False)
    named = {"pull_http_vs_socket": ratio(f"dense: {http}", f"dense: {SOCKETS}")}
    if f"dense: {transfer_engine}" in speed:
        named["pull_te_vs_mooncake"] = ratio(f"dense: {transfer_engine}", f"dense: {BATCH}")
    cost = {
        transport: ratio(
            f"dense: {rfork_name(transport, verify=False)}", f"dense: {rfork_name(transport, verify=True)}"
        )
        - 1
        for transport in transports()
    }
    nixl = rfork_name("nixl", verify=False)
    if f"dense: {nixl}" in speed:
        named["pull_nixl_vs_socket"] = ratio(f"dense: {nixl}", f"dense: {SOCKETS}")
        named["pull_small_nixl_vs_socket"] = ratio(f"small: {nixl}", f"small: {SOCKETS}")
    named["pull_verify_cost"] = max(cost.values())
    mapped = "dense: rfork shared_memory, map"
    if mapped in speed:
        named["pull_same_host_vs_memcpy"] = ratio(mapped, f"dense: {MEMCPY}")
    verified = rfork_name("http", verify=True)
    named["pull_small_vs_large"] = ratio(f"small: {verified}", f"dense: {verified}")
    named["pull_small_http_vs_socket"] = ratio(f"small: {http}", f"small: {SOCKETS}")
    if f"dense: {transfer_engine}" in speed:
        if f"dense: {MERGED}" in speed:
            named["pull_te_vs_mooncake_merged"] = ratio(f"dense: {transfer_engine}", f"dense: {MERGED}")
        named["pull_small_te_vs_mooncake"] = ratio(f"small: {transfer_engine}", f"small: {BATCH}")
    return named | {f"pull_verify_cost_{transport}": value for transport, value in cost.items()}


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
