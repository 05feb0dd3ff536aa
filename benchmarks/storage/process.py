"""Runs one loader once, in a separate process.

The process is a fork of a server that has imported torch, rfork and safetensors, and no other loader. It sets
the loader's environment, imports it, allocates (and touches) the tensors to fill, if any, and waits until the
page cache is prepared. If the tensors are to be new, torch is configured to use huge pages for all loaders
but rfork (THP_MEM_ALLOC_ENABLE): peers run at their best, rfork at its defaults. The clock starts then and
stops when one byte of every page of every tensor was read. After that all bytes are compared with what was
written.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

import torch

from benchmarks.memory_reserve import MemoryReserve
from benchmarks.storage.cases import Bucket, Destination, Load, LoadMeasurement, LoadTarget, StorageContender
from benchmarks.storage.images import StoredImage, Tensors, digests_of, fingerprint, shapes_of
from benchmarks.storage.memory import are_mapped, cpu_seconds, peak_resident, reset_peak, resident, touch
from rfork.errors import RforkError

RESULT_TIMEOUT_S = 300.0
READY = "ready"
PRELOADED = ["benchmarks.storage.runner"]


@dataclass(frozen=True)
class LoadJob:
    """Job of a process."""

    contender: StorageContender
    stored: StoredImage
    bucket: Bucket | None
    destination: Destination
    quick: bool


class LoadFailed(RforkError):
    """A loader failed; the message is its own."""


def server() -> ForkServerContext:
    """Return the fork server of the processes, which imports torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run(
    context: ForkServerContext, job: LoadJob, before: Callable[[], None], reserve: MemoryReserve
) -> LoadMeasurement:
    """Run a job; `before` (prepares the page cache) is called once the process is ready. Raises LoadFailed.

    The reserve is freed for the run, and has the size of one image after it.
    """
    parent_pipe, child_pipe = context.Pipe()
    process = context.Process(target=_work, args=(child_pipe, job), daemon=True)
    process.start()
    child_pipe.close()
    try:
        _receive_result(parent_pipe, job)
        before()
        reserve.release()
        parent_pipe.send(READY)
        return _receive_result(parent_pipe, job)
    finally:
        parent_pipe.close()
        process.join(1.0)
        process.kill()
        process.join()
        reserve.acquire(job.stored.bytes)


def _receive_result(parent_pipe: Connection, job: LoadJob) -> LoadMeasurement:
    if not parent_pipe.poll(RESULT_TIMEOUT_S):
        raise LoadFailed(f"{job.contender.name} timed out after {RESULT_TIMEOUT_S:g} s")
    try:
        result: LoadMeasurement | str = parent_pipe.recv()
    except EOFError:
        raise LoadFailed(f"{job.contender.name}: its process died") from None
    if isinstance(result, str):
        raise LoadFailed(result)
    return result


def _work(child_pipe: Connection, job: LoadJob) -> None:
    os.environ.update(job.contender.environment)
    if job.bucket is not None:
        os.environ.update(job.bucket.environment)
    if job.destination == "fresh" and not job.contender.role.startswith("ours"):
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # some loaders open a descriptor per range
    try:
        into = _allocated(job) if job.destination == "existing" else None
        load = job.contender.prepare(LoadTarget(job.stored, job.bucket, job.destination, into))
        child_pipe.send(LoadMeasurement(0.0, 0.0, 0))
        child_pipe.recv()
        child_pipe.send(_measured(job, load))
    except Exception as error:  # any error of a loader is its result
        first = next(iter(str(error).splitlines()), "")
        child_pipe.send(f"{type(error).__name__}: {first}"[:200])


def _measured(job: LoadJob, load: Load) -> LoadMeasurement:
    stored = job.stored
    gc.collect()
    reset_peak()
    base, cpu = resident(), cpu_seconds()
    began = time.perf_counter()
    loaded = load()
    touch(loaded)
    seconds = time.perf_counter() - began
    cpu = cpu_seconds() - cpu
    extra_bytes = peak_resident() - base - (0 if job.destination == "existing" else stored.bytes)
    if are_mapped(loaded) != (job.destination == "mapped"):
        raise RforkError(f"the loaded tensors are not {job.destination}")
    expected = stored.file_fingerprint if job.contender.raw else stored.fingerprint
    if fingerprint(digests_of(loaded.items())) != expected:
        raise RforkError("the loaded bytes are wrong")
    return LoadMeasurement(seconds, cpu, max(extra_bytes, 0))


def _allocated(job: LoadJob) -> Tensors:
    """Allocate a model's tensors, or files' buffers: one allocation each, with every page in memory."""
    if job.contender.raw:
        files = job.stored.safetensors
        return {path.name: torch.zeros(path.stat().st_size, dtype=torch.uint8) + 1 for path in files}
    shapes = shapes_of(job.stored.name, job.quick)
    return {name: torch.full(shape, -1.0, dtype=torch.bfloat16) for name, shape in shapes.items()}
