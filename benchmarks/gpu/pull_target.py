"""Target process of `benchmarks.gpu.pull`: one module on the device, and ways to fill it from other
processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import rfork
from benchmarks.gpu.common import VerificationError, module_of, synchronized, timed_on_device
from benchmarks.gpu.pull_source import TOKEN, GpuOffer, model_name
from benchmarks.harness import Contender
from benchmarks.pull.source import IN_FLIGHT, READY_TIMEOUT_S, settings_for
from rfork.errors import RforkError
from rfork.image.capture import capture, image_from_tensors
from rfork.image.memory import Image
from rfork.transport.selection import TRANSPORTS

Tensors = Mapping[str, torch.Tensor]
MAX_CHUNKS = 1000


class GpuPullTarget:
    """A module of this process on a device, and its expected bytes."""

    def __init__(self, shape: str, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.module = module_of(shapes, device)
        self.image = capture(self.module)
        self.bytes = self.image.layout.image_bytes
        synchronized(device)
        self.expected = self.image.manifest().digests

    def original(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> Image:
        """Build the same bytes again on a device of this process: the source of plain copies."""
        image = capture(module_of(shapes, device))
        synchronized(device)
        return image

    def run_checked(self, fill: Callable[[], float | None]) -> Contender:
        """Run `fill` into zeroed tensors and check each byte; returns the seconds that it reports, else its
        wall time.
        """

        def run() -> float:
            torch._foreach_zero_(list(self.image.regions))
            seconds = timed_on_device(fill, self.device)
            self._check(self.image)
            return seconds

        return run

    def run_checked_load(self, load: Callable[[], tuple[Tensors, Callable[[], None]]]) -> Contender:
        """Run `load`, which returns new tensors on the device and their release function; checks each byte."""

        def run() -> float:
            synchronized(self.device)
            began = time.perf_counter()
            tensors, release = load()
            synchronized(self.device)
            seconds = time.perf_counter() - began
            try:
                if any(tensor.device != self.device for tensor in tensors.values()):
                    raise RforkError(f"its tensors are not on {self.device}")
                self._check(image_from_tensors(tensors))
            finally:
                del tensors
                release()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            return seconds

        return run

    def fork(self, planner: str, source: torch.device, transport: str, *, verify: bool) -> Contender:
        """Fork from the process on a device with `rfork.fork`; returns the report's transfer phase."""
        options = settings_for(planner, (transport,), verify=verify)
        model = model_name(self.shape, transport, source)

        def pull() -> float:
            report = rfork.fork(self.module, model=model, settings=options)
            if report.seed is not None:
                report.seed.close()
            if report.outcome != "forked" or {share.transport for share in report.sources} != {transport}:
                raise RforkError("; ".join(report.reasons) or f"not over {transport}: {report.line()}")
            return report.phases["transfer"]

        return self.run_checked(pull)

    def read_remote(self, planner: str, offer: GpuOffer, transport: str) -> Contender:
        """Read all chunks, several in flight, over a reader that is already connected."""
        options = settings_for(planner, (transport,))
        endpoint = offer.endpoints[self.shape].get(transport)
        if endpoint is None:
            raise RforkError(offer.unavailable_reason(transport) or "not offered")
        reader = TRANSPORTS[transport](options).connect(
            endpoint, self.image, lambda: TOKEN, time.monotonic() + READY_TIMEOUT_S
        )
        chunks = list(self.image.layout.chunks)

        def pull() -> None:
            until = time.monotonic() + READY_TIMEOUT_S
            read_sequentially(chunks, lambda chunk: reader.read(*chunk, until))

        return self.run_checked(pull)

    def copy_from(self, original: Image) -> Contender:
        """Copy tensor by tensor from tensors of this process: on one GPU, or between two."""
        into, out = list(self.image.regions), list(original.regions)

        def copy() -> None:
            copy_all(into, out)

        return self.run_checked(copy)

    def _check(self, image: Image) -> None:
        if image.manifest().digests != self.expected:
            raise VerificationError(self.shape)


def copy_all(into: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
    """Copy each tensor into its counterpart; very many in one call, which costs a device few launches."""
    if len(into) > MAX_CHUNKS:
        torch._foreach_copy_(list(into), list(out), non_blocking=True)
        return
    for one, other in zip(into, out, strict=True):
        one.copy_(other, non_blocking=True)


def read_sequentially(chunks: Sequence[tuple[int, int]], read: Callable[[tuple[int, int]], None]) -> None:
    """`read` each chunk, `IN_FLIGHT` concurrently; raises the first error."""
    waiting: Iterator[tuple[int, int]] = iter(chunks)
    lock = threading.Lock()

    def work(_: int) -> None:
        while True:
            with lock:
                chunk = next(waiting, None)
            if chunk is None:
                return
            read(chunk)

    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="benchmark-read") as threads:
        list(threads.map(work, range(IN_FLIGHT)))
