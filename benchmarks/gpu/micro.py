"""Measure the parts of rfork's work on a GPU next to the limits of the hardware, each for some seconds.

`python -m benchmarks.gpu.micro SECTION… [--device cpu] [--json FILE] [--bytes N]`; each row is written at once:

- `compile`: seconds until the digest kernel is ready, compiled and then from Triton's cache.
- `memory`: what each part of rfork's work leaves reserved by torch, and used on the device.
- `digest`: `Image.manifest` next to its kernels alone and one read of all bytes, for a dense image (8 GiB if a third
  of the free memory suffices) and one of 20,000 small tensors; the time to plan their chunks; the gather kernel alone.
- `copies`: `Image.reading` and `Image.writing` next to plain copies from and to pinned memory.
- `contexts`: devices on which this process has a context after work on the last GPU. Any other than that one would
  take memory from another engine.

GB/s are 1e9 bytes per second, for the median of the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int, c_uint
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks import harness
from benchmarks.gpu.common import (
    NOT_FOUND,
    SMALL_BYTES,
    dense_shapes,
    error_text,
    module_of,
    small_shapes,
    synchronized,
    timed_on_device,
)
from benchmarks.gpu.result_file import ResultFile, Value
from benchmarks.harness import GB, Contender
from rfork import logs
from rfork.cuda import library
from rfork.cuda.device import cuda_driver
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.image.digest import gpu_kernel
from rfork.image.leaf_plan import LeafPlan
from rfork.image.memory import Image

DENSE_BYTES, CPU_BYTES, MEMORY_BYTES = 8 << 30, 64 << 20, 1 << 30
SHARE = 3
"""The dense image uses at most one part in SHARE of the free memory."""
ROUNDS, CPU_ROUNDS = 5, 2
BLOCK_BYTES, STEP_BYTES = 64 << 20, 2 << 20
"""Sizes of plain copies: large ones, and those of `Image.reading`."""
COPY_THREADS = 4
READY = "compile-in-child"
"""Section that only waits for the kernel, for a process with a filled cache."""


@dataclass(frozen=True, slots=True)
class MicroRun:
    """Options and result file of a run."""

    device: torch.device
    results: ResultFile
    bytes: int

    @property
    def rounds(self) -> int:
        """Number of rounds of a measurement."""
        return ROUNDS if self.device.type == "cuda" else CPU_ROUNDS

    def dense_bytes(self, max_bytes: int) -> int:
        """Return the size of a dense image."""
        if self.device.type != "cuda":
            return min(self.bytes or CPU_BYTES, max_bytes)
        return min(self.bytes or max_bytes, torch.cuda.mem_get_info(self.device)[0] // SHARE)

    def add_rates(self, contenders: Mapping[str, Contender], nbytes: int) -> None:
        """Measure the contenders in turn; a row for each."""
        for contender in contenders.values():
            contender()
        for name, seconds in harness.interleave(contenders, self.rounds).items():
            row: dict[str, Value] = {"name": name, "GB/s": nbytes / GB / median(seconds), "seconds": median(seconds)}
            self.results.add({**row, "min s": min(seconds), "max s": max(seconds)})

    def image(self, shapes: Mapping[str, tuple[int, ...]]) -> Image:
        """Return an image of random bytes on the device."""
        image = capture(module_of(shapes, self.device))
        synchronized(self.device)
        return image

    def timed(self, call: Callable[[], object]) -> Contender:
        """Return a contender that measures a call until the device has finished."""

        def run() -> None:
            call()

        return partial(timed_on_device, run, self.device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; one that fails does not prevent the next ones. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=(*SECTIONS, READY), metavar="SECTION")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bytes", type=int, default=0, help="size of the dense image")
    options = parser.parse_args(arguments)
    logs.configure(json=False, level="warning")
    harness.exit_on_sigterm()
    if READY in options.sections:
        print(seconds_until_ready(torch.device("cuda", 0)))
        return 0
    results = ResultFile(options.json, benchmark="gpu.micro", machine=harness.machine(), commit=harness.commit())
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    failed = 0
    for name in options.sections:
        try:
            SECTIONS[name](MicroRun(device, results, options.bytes))
        except NOT_FOUND as error:
            failed += device.type == "cuda"
            results.add({"name": name, "error": error_text(error)})
    return int(failed > 0)


def compile_kernel(run: MicroRun) -> None:
    """Section `compile`."""
    require_gpu(run.device)
    with tempfile.TemporaryDirectory(prefix="rfork-triton-") as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.micro", READY]
        for name in ("kernel ready, compiled", "kernel ready, from Triton's cache"):
            done = subprocess.run(
                command, env={**os.environ, "TRITON_CACHE_DIR": folder}, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RforkError((done.stderr.strip().splitlines() or ["it failed"])[-1])
            run.results.add({"name": name, "seconds": float(done.stdout.split()[-1])})


def seconds_until_ready(device: torch.device) -> float:
    """Return the seconds until the digest kernel is ready, CUDA's start excluded. Raises RforkError if it fails."""
    torch.empty(1, device=device)
    began = time.perf_counter()
    if not gpu_kernel(device).wait_until_ready():
        raise RforkError("the digest kernel is not used")
    return time.perf_counter() - began


def measure_memory(run: MicroRun) -> None:
    """Section `memory`: in a process that did nothing else on the device before."""
    require_gpu(run.device)
    device = run.device
    torch.empty(1, device=device)
    shapes = dense_shapes(run.dense_bytes(MEMORY_BYTES))
    module = module_of(shapes, device)
    reserved, used = memory_of(device)

    def add(name: str) -> None:
        nonlocal reserved, used
        synchronized(device)
        before = reserved, used
        reserved, used = memory_of(device)
        row: dict[str, Value] = {"name": f"memory: {name}", "reserved by torch, MiB": (reserved - before[0]) / 2**20}
        run.results.add({**row, "used on the device, MiB": (used - before[1]) / 2**20})

    image = capture(module)
    add("an Image")
    copy_out(image)
    add("Image.reading")
    copy_in(image)
    add("Image.writing")
    kernel = gpu_kernel(device)
    kernel.wait_until_ready()
    add("the digest kernel")
    image.manifest()
    add("Image.manifest")
    hash_leaves, kernel.hash_leaves = kernel.hash_leaves, None
    try:
        image.digest(0)
    finally:
        kernel.hash_leaves = hash_leaves
    add("a digest on the host")
    torch.cuda.empty_cache()
    add("torch.cuda.empty_cache")


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the bytes that torch has reserved, and those that all processes use on the device."""
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device), total - free


def measure_digest(run: MicroRun) -> None:
    """Section `digest`."""
    dense = run.dense_bytes(DENSE_BYTES)
    for shape, shapes in (("dense", dense_shapes(dense)), ("small", small_shapes(min(SMALL_BYTES, dense // 2)))):
        image = run.image(shapes)
        nbytes, chunks = image.layout.image_bytes, len(image.layout.chunks)
        began = time.perf_counter()
        plans = [image.leaf_plan(chunk)[1] for chunk in range(chunks)]
        seconds = time.perf_counter() - began
        row: dict[str, Value] = {"name": f"{shape}: plan of all chunks", "seconds": seconds}
        run.results.add(row | {"us per chunk": seconds / chunks * 1e6, "chunks": chunks, "tensors": len(shapes)})
        gathered = sum(int(plan.range_begins[-1]) for plan in plans)
        row = {"name": f"{shape}: gathered", "share of the bytes": gathered / nbytes}
        run.results.add(row | {"ranges": sum(len(plan.range_bases) for plan in plans)})
        words = [region[: region.numel() // 8 * 8].view(torch.int64) for region in image.runs if region.numel() >= 8]
        contenders: dict[str, Contender] = {
            f"{shape}: limit: memory read": run.timed(partial(read_all, words)),
            f"{shape}: Image.manifest": run.timed(image.manifest),
            f"{shape}: Image.manifest, 1 thread": run.timed(partial(image.manifest, threads=1)),
        }
        if run.device.type == "cuda":
            if not gpu_kernel(run.device).wait_until_ready():
                raise RforkError("the digest kernel is not used")
            bare = BareKernels(image)
            contenders[f"{shape}: kernels alone"] = bare.run
            contenders[f"{shape}: gather kernel alone"] = partial(bare.run, hashes=False)
        run.add_rates(contenders, nbytes)
        del image, words, contenders


def read_all(words: Sequence[torch.Tensor]) -> None:
    """Queue one read of all bytes."""
    for part in words:
        part.sum()


class BareKernels:
    """The kernels' launches for all chunks of an image, with tables that are on the device already."""

    def __init__(self, image: Image) -> None:
        from rfork.image import xxh3_triton

        self._kernels = xxh3_triton
        self._device = image.device
        self._chunks: list[tuple[LeafPlan, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        head = len(xxh3_triton.HEAD)
        for chunk in range(len(image.layout.chunks)):
            plan = image.leaf_plan(chunk)[1]
            scratch = torch.empty(-(-plan.scratch_bytes // 8), dtype=torch.int64, device=self._device)
            table = np.concatenate((xxh3_triton.HEAD, plan.addresses, plan.range_begins, plan.range_bases))
            table[head : head + len(plan.addresses)][plan.gathered] += scratch.data_ptr()
            hashes = torch.empty(2 * len(plan.addresses), dtype=torch.int64, device=self._device)
            self._chunks.append((plan, torch.from_numpy(table).to(self._device), scratch, hashes))

    def run(self, *, hashes: bool = True) -> float:
        """Return the device's seconds for all launches; without `hashes`, for those of the gather kernel."""
        synchronized(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for plan, table, scratch, results in self._chunks:
            for launch in plan.launches:
                if launch.gather_begin < launch.gather_end:
                    self._kernels._gather(plan, table, scratch, launch.gather_begin, launch.gather_end)
                if hashes:
                    self._kernels._hash_leaves[(launch.leaves,)](
                        table, results, launch.first, launch.leaf_bytes, launch.last_stripe,
                        WIDE=plan.is_wide, STAGES=self._kernels.STAGES, num_warps=1,
                    )  # fmt: skip
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def measure_copies(run: MicroRun) -> None:
    """Section `copies`."""
    image = run.image(dense_shapes(run.dense_bytes(MEMORY_BYTES)))
    nbytes = image.layout.image_bytes
    contenders: dict[str, Contender] = {}
    for to_device in (False, True):
        arrow = "host to device" if to_device else "device to host"
        for size in (BLOCK_BYTES, STEP_BYTES):
            contenders[f"limit: pinned copy, {arrow}, {size >> 20} MiB"] = run.timed(
                PlainCopies(run.device, nbytes, size, to_device=to_device).run
            )
    for name, copy in (("reading", copy_out), ("writing", copy_in)):
        for threads in (1, COPY_THREADS):
            contenders[f"Image.{name}, {threads} thread{'s' if threads > 1 else ''}"] = run.timed(
                partial(copy, image, threads)
            )
    run.add_rates(contenders, nbytes)


class PlainCopies:
    """Copies of `nbytes` in blocks of `size` between one device buffer and one pinned buffer."""

    def __init__(self, device: torch.device, nbytes: int, size: int, *, to_device: bool) -> None:
        size = min(size, nbytes)
        host = torch.zeros(size, dtype=torch.uint8)
        self._host = host.pin_memory() if device.type == "cuda" else host
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copies = nbytes // size
        self._to_device = to_device

    def run(self) -> None:
        """Queue all copies."""
        into, out = (self._memory, self._host) if self._to_device else (self._host, self._memory)
        for _ in range(self._copies):
            into.copy_(out, non_blocking=True)


def copy_out(image: Image, threads: int = 1) -> None:
    """Read all chunks to the host, and use no byte of them."""

    def read(chunk: tuple[int, int]) -> None:
        with image.reading(*chunk) as steps:
            for _ in steps:
                pass

    _for_each_chunk(image, read, threads)


def copy_in(image: Image, threads: int = 1) -> None:
    """Write all chunks from the host, with any bytes."""

    def write(chunk: tuple[int, int]) -> None:
        with image.writing(*chunk) as steps:
            for _ in steps:
                pass

    _for_each_chunk(image, write, threads)


def _for_each_chunk(image: Image, work: Callable[[tuple[int, int]], None], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, image.layout.chunks))


def measure_contexts(run: MicroRun) -> None:
    """Section `contexts`: work on the last GPU, on a new thread, as rfork's threads in an engine's rank."""
    require_gpu(run.device)
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(last)
    image = capture(module_of(small_shapes(CPU_BYTES), last))
    gpu_kernel(last).wait_until_ready()

    def work() -> None:
        image.manifest()
        copy_out(image, COPY_THREADS)
        copy_in(image, COPY_THREADS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    found = devices_with_context()
    run.results.add({"name": f"devices with a context after work on {last}", "value": ", ".join(map(str, found))})
    if found != [last.index]:
        raise RforkError(f"contexts on devices {found}, work on {last.index} only")


def devices_with_context() -> list[int]:
    """Return the devices whose primary context is active in this process."""
    driver, loaded = cuda_driver(), ctypes.CDLL(library.LIBRARY_PATH)
    found: list[int] = []
    for index in range(torch.cuda.device_count()):
        flags, active = c_uint(), c_int()
        if loaded.cuDevicePrimaryCtxGetState(driver.ordinal(index), byref(flags), byref(active)):
            raise RforkError("cuDevicePrimaryCtxGetState failed")
        if active.value:
            found.append(index)
    return found


def require_gpu(device: torch.device) -> None:
    """Raise RforkError for a device without the measured parts."""
    if device.type != "cuda":
        raise RforkError("needs a GPU")


SECTIONS: Mapping[str, Callable[[MicroRun], None]] = {
    "compile": compile_kernel,
    "memory": measure_memory,
    "digest": measure_digest,
    "copies": measure_copies,
    "contexts": measure_contexts,
}


if __name__ == "__main__":
    raise SystemExit(main())
