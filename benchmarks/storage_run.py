"""One run of one loader, in a process of its own.

The process is a fork of a server that has imported torch, rfork and safetensors, and no other loader; it
sets the loader's environment, imports it, allocates (and touches) the tensors to fill where there are some,
and waits until the page cache is as it should be. Where the tensors are to be new, torch is told to take
huge pages for all but rfork (THP_MEM_ALLOC_ENABLE): peers run at their best, rfork as it comes. The clock
begins then and ends when one byte of every page of every tensor was read. After that all bytes are compared
with what was written.
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

from benchmarks.storage_case import Bucket, Contender, Destination, Load, Run, Target
from benchmarks.storage_image import Stored, Tensors, digests_of, fingerprint, shapes_of
from benchmarks.storage_memory import (
    Reserve,
    are_mapped,
    cpu_seconds,
    peak_resident,
    reset_peak,
    resident,
    touch,
)
from rfork.errors import RforkError

PATIENCE_S = 300.0
READY = "ready"
PRELOADED = ["benchmarks.storage_rounds"]


@dataclass(frozen=True)
class Job:
    """What a process is told."""

    contender: Contender
    stored: Stored
    bucket: Bucket | None
    destination: Destination
    quick: bool


class LoadFailed(RforkError):
    """A loader could not do it; the text is its own."""


def server() -> ForkServerContext:
    """What starts the processes: torch is imported there once, and each is a fork of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run(context: ForkServerContext, job: Job, before: Callable[[], None], reserve: Reserve) -> Run:
    """Run a job; `before` (the page cache) is called once the process is ready. Raises LoadFailed.

    The reserve is given free for the run, and is of one image after it.
    """
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, job), daemon=True)
    process.start()
    there.close()
    try:
        _answer(here, job)
        before()
        reserve.give()
        here.send(READY)
        return _answer(here, job)
    finally:
        here.close()
        process.join(1.0)
        process.kill()
        process.join()
        reserve.take(job.stored.bytes)


def _answer(here: Connection, job: Job) -> Run:
    if not here.poll(PATIENCE_S):
        raise LoadFailed(f"{job.contender.name} took more than {PATIENCE_S:g} s")
    try:
        answer: Run | str = here.recv()
    except EOFError:
        raise LoadFailed(f"{job.contender.name}: its process died") from None
    if isinstance(answer, str):
        raise LoadFailed(answer)
    return answer


def _work(there: Connection, job: Job) -> None:
    os.environ.update(job.contender.environment)
    if job.bucket is not None:
        os.environ.update(job.bucket.environment)
    if job.destination == "fresh" and not job.contender.role.startswith("ours"):
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some open a descriptor for each range
    try:
        into = _allocated(job) if job.destination == "existing" else None
        load = job.contender.prepare(Target(job.stored, job.bucket, job.destination, into))
        there.send(Run(0.0, 0.0, 0))
        there.recv()
        there.send(_measured(job, load))
    except Exception as error:  # whatever a loader raises is its result
        first = next(iter(str(error).splitlines()), "")
        there.send(f"{type(error).__name__}: {first}"[:200])


def _measured(job: Job, load: Load) -> Run:
    stored = job.stored
    gc.collect()
    reset_peak()
    base, cpu = resident(), cpu_seconds()
    began = time.perf_counter()
    loaded = load()
    touch(loaded)
    seconds = time.perf_counter() - began
    cpu = cpu_seconds() - cpu
    over = peak_resident() - base - (0 if job.destination == "existing" else stored.bytes)
    if are_mapped(loaded) != (job.destination == "mapped"):
        raise RforkError(f"what it loaded is not {job.destination}")
    expected = stored.file_fingerprint if job.contender.raw else stored.fingerprint
    if fingerprint(digests_of(loaded.items())) != expected:
        raise RforkError("the bytes it loaded are wrong")
    return Run(seconds, cpu, max(over, 0))


def _allocated(job: Job) -> Tensors:
    """A model's tensors, or files' buffers: one allocation each, every page of it there."""
    if job.contender.raw:
        files = job.stored.safetensors
        return {path.name: torch.zeros(path.stat().st_size, dtype=torch.uint8) + 1 for path in files}
    shapes = shapes_of(job.stored.name, job.quick)
    return {name: torch.full(shape, -1.0, dtype=torch.bfloat16) for name, shape in shapes.items()}
