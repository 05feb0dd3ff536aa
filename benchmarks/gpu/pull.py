"""Measure how fast weights reach a GPU from another process's GPU memory, host memory, or a cached file.

Source and target are two processes on one GPU, and also on two GPUs if there are two. Two images: a dense one
of a Llama's shapes (16 GiB if the memory allows, quick 2 GiB, on the CPU 256 MiB), and 20,000 small tensors
(at most 1 GiB). Contenders run interleaved after one warm-up round; before each run the tensors are zeroed,
after it every byte is checked by its digest in place (both untimed), and the clock stops when the device has
finished. A contender that cannot run here has a row with the reason.

- "rfork NAME": `rfork.fork` over that transport with a planner process; its report's transfer phase (plan,
  channel, bytes, verification). "reads": the transport's reader alone, already connected, all chunks, four
  in flight, unverified: what `gpu_ipc_vs_device_copy` compares.
- "limit: device copy": the same bytes from tensors of this process, on one GPU or from the other one.
- "limit: pinned copy": cudaMemcpyAsync of the same bytes from page-locked memory, which
  `gpu_h2d_vs_pinned` compares with rfork.load, verification included, of a snapshot in the page cache.
- Other loaders make new tensors in each round, from the same file; the slow ones run in 3 rounds.
- "digest" is the manifest of the image, next to one read of all bytes by torch.sum.

GB/s are 1e9 image bytes per second, for the median of the rounds. With `--device cpu` the same code runs on
host memory at a small size: that shows that it works, and is no result.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

import rfork
from benchmarks import harness
from benchmarks.gpu import pull_local
from benchmarks.gpu.common import (
    GpuContenders,
    GpuOptions,
    dense_bytes,
    error_text,
    parse,
    rows_of,
    shapes_of,
)
from benchmarks.gpu.pull_local import FILE, SHM, temporary_folder_in
from benchmarks.gpu.pull_source import BARE_TRANSPORTS, GpuOffer, source_process
from benchmarks.gpu.pull_target import GpuPullTarget
from benchmarks.harness import GB
from benchmarks.pull.source import IN_FLIGHT, planner_main, process
from rfork import logs
from rfork.errors import RforkError
from rfork.image.memory import Image

FORKS: Sequence[tuple[str, bool]] = (
    ("cuda_ipc", True), ("cuda_ipc", False), ("shared_memory", True), ("transfer_engine", True),
    ("http", True), ("nccl", True), ("gloo", True),
)  # fmt: skip
"""Transports, and whether their bytes are verified."""
SLOW = frozenset({"transfer_engine", "http", "gloo"})
COPY, PINNED, DIGEST, READ = (
    "limit: device copy", "limit: pinned copy", "digest", "limit: memory read"
)  # fmt: skip
LOAD = "rfork.load, page cache"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and write the requested files; raises RforkError for wrong bytes."""
    options = parse("pull", __doc__, arguments)
    logs.configure(json=False, level="error")
    shapes = shapes_of(dense_bytes(options))
    contenders = GpuContenders()
    sizes: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        url: str = stack.enter_context(process(planner_main))
        targets = [GpuPullTarget(shape, tensors, options.device) for shape, tensors in shapes.items()]
        for source in filter(None, (options.device, options.peer)):
            offer = stack.enter_context(source_process(url, shapes, source))
            for target in targets:
                original = target.original(shapes[target.shape], source)
                before = placement_name(target.shape, source, options)
                measure_peers(contenders, before, target, url, source, offer, original)
                if source == options.device:
                    measure_local(contenders, target, original, stack)
                sizes |= {
                    name: target.bytes
                    for name in (*contenders.names, *contenders.notes)
                    if name.startswith(f"{before}: ")
                }
        seconds = contenders.run(options.common.rounds)
    harness.publish(
        options.common,
        settings={
            "device": str(options.device),
            "in_flight": IN_FLIGHT,
            **{f"{target.shape}_bytes": target.bytes for target in targets},
            **{f"{target.shape}_tensors": len(target.image.layout.tensors) for target in targets},
            **{f"{target.shape}_chunks": len(target.image.layout.chunks) for target in targets},
        },
        rows=rows_of(seconds, sizes, contenders),
        figures=figures(seconds, sizes) | {"gpu_wrong_bytes": contenders.wrong},
        plot=("contender", "GB/s"),
    )
    if contenders.wrong:
        raise RforkError(f"{contenders.wrong} contenders produced wrong bytes")


def placement_name(shape: str, source: torch.device, options: GpuOptions) -> str:
    """Return the prefix of contender names: the shape, and the other GPU if the bytes are on one."""
    return shape if source == options.device else f"{shape} from {source}"


def measure_peers(
    contenders: GpuContenders,
    before: str,
    target: GpuPullTarget,
    planner: str,
    source: torch.device,
    offer: GpuOffer,
    original: Image,
) -> None:
    """Add the contenders that read from a process on the source device, and the plain copy from there."""
    for transport, verify in FORKS:
        name = f"{before}: rfork {transport}" + ("" if verify else ", unverified")
        if reason := offer.unavailable_reason(transport):
            contenders.absent(name, reason)
            continue
        contenders.add(
            name,
            partial(target.fork, planner, source, transport, verify=verify),
            aside=transport in SLOW,
        )
    for transport in BARE_TRANSPORTS:
        name = f"{before}: {transport} reads"
        if reason := offer.unavailable_reason(transport):
            contenders.absent(name, reason)
            continue
        contenders.add(name, partial(target.read_remote, planner, offer, transport), aside=transport in SLOW)
    contenders.add(f"{before}: {COPY}", partial(target.copy_from, original))


def measure_local(
    contenders: GpuContenders, target: GpuPullTarget, original: Image, stack: contextlib.ExitStack
) -> None:
    """Add the contenders that read this host's memory and files, and those that only read."""
    before = target.shape
    contenders.add(f"{before}: {DIGEST}", partial(pull_local.digests, target, original))
    contenders.add(f"{before}: {READ}", partial(pull_local.memory_read, target, original))
    contenders.add(f"{before}: {PINNED}", partial(pull_local.pinned, target))
    for where, folder in (("page cache", Path(tempfile.gettempdir())), ("/dev/shm", SHM)):
        load, engine = f"{before}: rfork.load, {where}", f"{before}: rfork reading engine, {where}"
        try:
            path = stack.enter_context(temporary_folder_in(folder, target.bytes)) / FILE
            rfork.save(target.module, path)
        except (RforkError, OSError) as error:
            contenders.absent(load, error_text(error))
            contenders.absent(engine, error_text(error))
            continue
        contenders.add(load, partial(pull_local.restored, target, path))
        contenders.add(engine, partial(pull_local.engine_fill, target, path))
        if folder == SHM:
            continue
        contenders.add(f"{before}: safetensors load_file", partial(pull_local.load_file, target, path), aside=True)
        contenders.add(f"{before}: Run:ai", partial(pull_local.run_ai, target, path), aside=True)
        contenders.add(f"{before}: fastsafetensors", partial(pull_local.fastsafetensors, target, path), aside=True)
        contenders.add(f"{before}: tensorizer", partial(pull_local.tensorizer, target, path.parent), aside=True)


def figures(seconds: Mapping[str, Sequence[float]], sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the figures of DESIGN section 11 for the dense image on one GPU, and the same from the other
    GPU.

    The small tensors have no figure relative to a limit: a plain copy of 20,000 is bound by its launches.
    """
    speed = {name: sizes[name] / GB / median(values) for name, values in seconds.items()}
    requested_figures = {
        "gpu_ipc_vs_device_copy": ("cuda_ipc reads", COPY),
        "gpu_ipc_fork_vs_device_copy": ("rfork cuda_ipc, unverified", COPY),
        "gpu_ipc_verified_vs_device_copy": ("rfork cuda_ipc", COPY),
        "gpu_h2d_vs_pinned": (LOAD, PINNED),
        "gpu_http_vs_pinned": ("rfork http", PINNED),
        "gpu_digest_vs_memory_read": (DIGEST, READ),
    }
    found: dict[str, float] = {}
    for before in dict.fromkeys(name.partition(": ")[0] for name in speed):
        suffix = "" if before == "dense" else f"_{before.replace(' ', '_').replace(':', '')}"
        for name, (one, other) in requested_figures.items() if before.partition(" ")[0] != "small" else ():
            ours, limit = speed.get(f"{before}: {one}"), speed.get(f"{before}: {other}")
            if ours and limit:
                found[name + suffix] = ours / limit
        if digest := speed.get(f"{before}: {DIGEST}"):
            found[f"gpu_digest_tb_per_s{suffix}"] = digest / 1e3
    return found


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}".rstrip()) from None
