"""Processes of `benchmarks.gpu.disturb`: the seed that decodes, and targets that fork it in a loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Literal

import torch

import rfork
from benchmarks.disturb.cases import SlotResult
from benchmarks.disturb.workers import MODEL, REPLY_TIMEOUT_S, fork_without_serving, settings_for
from benchmarks.gpu.common import error_text, synchronized
from benchmarks.gpu.disturb_model import LARGE, TINY, Decoder, decoder_on, steps_of
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.schema import ForkProgress

KERNEL_COPIES = "kernel copies"
"""NCCL refuses two ranks on one GPU, so a kernel that copies as many bytes stands in for its traffic."""
WARM_TOKENS = 20
MIN_TOKENS = 25
"""Minimum number of tokens of a slot: a transfer may slow the seed down so much that its seconds contain none."""
MAX_SLOT_FACTOR = 25
"""A slot without them lasts at most this multiple of its seconds."""


@dataclass(frozen=True, slots=True)
class GpuDisturbCase:
    """`targets` fork the weights over `transport` in a loop; the governor is the product's default, or off."""

    transport: str
    targets: int = 0
    governed: bool = True
    slot: int = 0

    @property
    def name(self) -> str:
        """Name of the contender."""
        if self.transport == "idle":
            return f"idle, slot {self.slot}"
        governor_label = "" if self.transport == KERNEL_COPIES else f", governor {'on' if self.governed else 'off'}"
        return f"{self.transport}, {self.targets} target{'s' if self.targets > 1 else ''}{governor_label}"


@dataclass(frozen=True, slots=True)
class GpuOrder:
    """Command to the seed: `open` a case, `serve` for some seconds, `close` it. To a target: `start`, `stop`."""

    verb: Literal["open", "serve", "close", "start", "stop"]
    case: GpuDisturbCase | None = None
    seconds: float = 0.0


def build_decoder(device_name: str) -> tuple[Decoder, torch.device]:
    """Build the decoder of this process."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    decoder = decoder_on(device, LARGE if device.type == "cuda" else TINY)
    synchronized(device)
    return decoder, device


def is_slot_finished(elapsed_s: float, tokens: int, slot_s: float) -> bool:
    """Return True if a slot of `slot_s` has enough tokens for its rate, or has lasted too long."""
    enough = elapsed_s >= slot_s and tokens >= MIN_TOKENS
    return enough or (tokens > 0 and elapsed_s >= MAX_SLOT_FACTOR * slot_s)


class GpuSeed:
    """Executes commands in the seed's process. One case is open at a time."""

    def __init__(self, planner: str, device_name: str) -> None:
        self._planner = planner
        self._decoder, device = build_decoder(device_name)
        self._step, self.graphed = steps_of(self._decoder, device)
        self._open = contextlib.ExitStack()
        self._step_meter: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    def handle(self, order: GpuOrder) -> SlotResult | None:
        """Execute a command; see `GpuOrder`."""
        match order.verb:
            case "open" if order.case is not None:
                self._step_meter = self._open.enter_context(self._seeded(order.case))
                for _ in range(WARM_TOKENS):
                    self._timed()
                return None
            case "serve":
                return self._serve(order.seconds)
            case _:
                self._open.close()
                self._step_meter = contextlib.nullcontext
                return None

    def _serve(self, seconds: float) -> SlotResult:
        result = SlotResult()
        began = time.perf_counter()
        while not is_slot_finished(result.seconds, len(result.tokens), seconds):
            result.tokens.append(self._timed())
            result.seconds = time.perf_counter() - began
        return result

    def _timed(self) -> float:
        began = time.perf_counter()
        with self._step_meter():
            self._step()
        return time.perf_counter() - began

    @contextlib.contextmanager
    def _seeded(self, case: GpuDisturbCase) -> Iterator[Callable[[], AbstractContextManager[object]]]:
        if case.transport == KERNEL_COPIES:
            yield contextlib.nullcontext
            return
        transport = "http" if case.transport == "idle" else case.transport
        options = settings_for(self._planner, transport, governed=case.governed)
        with rfork.seed(self._decoder, model=MODEL, settings=options) as seed_handle:
            if not seed_handle.wait_registered(REPLY_TIMEOUT_S):
                raise RforkError("the planner did not respond to the seed")
            yield seed_handle.measure_step


class GpuTarget:
    """Executes commands in a target's process; forks on a separate thread. `counter`: bytes so far."""

    def __init__(self, counter: Synchronized[int], planner: str, device_name: str) -> None:
        self._counter = counter
        self._planner = planner
        self._decoder, self._device = build_decoder(device_name)
        self._image = capture(self._decoder)
        self._expected = self._image.manifest().digests
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error = ""
        self._done = 0

    def handle(self, order: GpuOrder) -> None:
        """Execute a command; see `GpuOrder`. `stop` compares the last fork's bytes; raises RforkError for any
        error.
        """
        if order.verb == "start" and order.case is not None:
            self._stopping.clear()
            self._error, self._done = "", 0
            self._thread = threading.Thread(target=self._run, args=(order.case,), daemon=True)
            self._thread.start()
            return
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._error:
            raise RforkError(self._error)
        if self._done and self._image.manifest().digests != self._expected:
            raise RforkError("WRONG BYTES")

    def _run(self, case: GpuDisturbCase) -> None:
        try:
            if case.transport == KERNEL_COPIES:
                self._copy()
            else:
                while not self._stopping.is_set():
                    # Otherwise the bytes of the previous fork would hide one that transfers none.
                    torch._foreach_zero_(list(self._image.regions))
                    synchronized(self._device)
                    self._fork(case)
                    self._done += 1
        except (RforkError, OSError, RuntimeError) as error:
            self._error = error_text(error)

    def _copy(self) -> None:
        size = self._image.layout.image_bytes // 8
        source = torch.ones(size, dtype=torch.int64, device=self._device)
        into = torch.empty_like(source)
        while not self._stopping.is_set():
            torch.add(source, 0, out=into)  # a kernel; copy_ would use the copy engine
            synchronized(self._device)
            self._count(size * 8)

    def _fork(self, case: GpuDisturbCase) -> None:
        received_bytes = 0

        def on_progress(progress: ForkProgress, _: int) -> None:
            nonlocal received_bytes
            self._count(progress.bytes_read - received_bytes)
            received_bytes = max(received_bytes, progress.bytes_read)

        options = settings_for(self._planner, case.transport, governed=case.governed)
        report = fork_without_serving(self._decoder, options, on_progress)
        if report.seed is not None:
            report.seed.close()
        if report.outcome != "forked" or {share.transport for share in report.sources} != {case.transport}:
            raise RforkError("; ".join(report.reasons) or f"not over {case.transport}: {report.line()}")
        self._count(report.image_bytes - received_bytes)

    def _count(self, more: int) -> None:
        with self._counter.get_lock():
            self._counter.value += max(0, more)


def seed_main(counter: Synchronized[int], planner: str, device_name: str) -> Callable[[GpuOrder], SlotResult | None]:
    """Entry point of the seed's process; its counter reports whether it replays a captured graph."""
    seed = GpuSeed(planner, device_name)
    counter.value = int(seed.graphed)
    return seed.handle


def target_main(counter: Synchronized[int], planner: str, device_name: str) -> Callable[[GpuOrder], None]:
    """Entry point of a target's process."""
    return GpuTarget(counter, planner, device_name).handle
