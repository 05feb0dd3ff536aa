"""The processes of `benchmarks.gpu.disturb`: the seed that decodes, and targets that fork it on and on."""

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
from benchmarks.disturb_case import Told
from benchmarks.disturb_crew import MODEL, PATIENCE_S, settings_for
from benchmarks.gpu.case import settled, why
from benchmarks.gpu.disturb_model import LARGE, TINY, Decoder, decoder_on, steps_of
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.wire import ForkProgress

KERNELS = "kernel copies"
"""NCCL refuses two ranks on one GPU: its traffic is stood in for by a kernel that copies as many bytes."""
WARM_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Case:
    """`targets` take the weights over `way` again and again; the governor is the product's, or off."""

    way: str
    targets: int = 0
    governed: bool = True
    slot: int = 0

    @property
    def name(self) -> str:
        """The contender's name."""
        if self.way == "idle":
            return f"idle, slot {self.slot}"
        held = "" if self.way == KERNELS else f", governor {'on' if self.governed else 'off'}"
        return f"{self.way}, {self.targets} target{'s' if self.targets > 1 else ''}{held}"


@dataclass(frozen=True, slots=True)
class Order:
    """To the seed: `open` a case, `serve` for some seconds, `close` it. To a target: `start`, `stop`."""

    verb: Literal["open", "serve", "close", "start", "stop"]
    case: Case | None = None
    seconds: float = 0.0


def built(device_name: str) -> tuple[Decoder, torch.device]:
    """The decoder of this process."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    decoder = decoder_on(device, LARGE if device.type == "cuda" else TINY)
    settled(device)
    return decoder, device


class Seed:
    """Obeys in the seed's process. One case is open at a time."""

    def __init__(self, planner: str, device_name: str) -> None:
        self._planner = planner
        self._decoder, device = built(device_name)
        self._step, self.graphed = steps_of(self._decoder, device)
        self._open = contextlib.ExitStack()
        self._unit: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    def obey(self, order: Order) -> Told | None:
        """See `Order`."""
        match order.verb:
            case "open" if order.case is not None:
                self._unit = self._open.enter_context(self._giving(order.case))
                for _ in range(WARM_TOKENS):
                    self._timed()
                return None
            case "serve":
                return self._serve(order.seconds)
            case _:
                self._open.close()
                self._unit = contextlib.nullcontext
                return None

    def _serve(self, seconds: float) -> Told:
        told = Told()
        began = time.perf_counter()
        while (told.seconds < seconds) or not told.tokens:
            told.tokens.append(self._timed())
            told.seconds = time.perf_counter() - began
        return told

    def _timed(self) -> float:
        began = time.perf_counter()
        with self._unit():
            self._step()
        return time.perf_counter() - began

    @contextlib.contextmanager
    def _giving(self, case: Case) -> Iterator[Callable[[], AbstractContextManager[object]]]:
        if case.way == KERNELS:
            yield contextlib.nullcontext
            return
        way = "http" if case.way == "idle" else case.way
        options = settings_for(self._planner, way, governed=case.governed, reads=False)
        with rfork.seed(self._decoder, model=MODEL, settings=options) as giving:
            if not giving.wait_acknowledged(PATIENCE_S):
                raise RforkError("the planner did not answer the seed")
            yield giving.serving


class TargetProcess:
    """Obeys in a target's process; takes the weights on a thread of its own. `counter`: bytes so far."""

    def __init__(self, counter: Synchronized[int], planner: str, device_name: str) -> None:
        self._counter = counter
        self._planner = planner
        self._decoder, self._device = built(device_name)
        self._image = capture(self._decoder)
        self._right = self._image.manifest().digests
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error = ""
        self._done = 0

    def obey(self, order: Order) -> None:
        """See `Order`. At `stop` the last fork's bytes are compared; raises RforkError for what is wrong."""
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
        if self._done and self._image.manifest().digests != self._right:
            raise RforkError("WRONG BYTES")

    def _run(self, case: Case) -> None:
        try:
            if case.way == KERNELS:
                self._copy()
            else:
                while not self._stopping.is_set():
                    # Else the bytes of the fork before would be right for one that brings none.
                    torch._foreach_zero_(list(self._image.regions))
                    settled(self._device)
                    self._fork(case)
                    self._done += 1
        except (RforkError, OSError, RuntimeError) as error:
            self._error = why(error)

    def _copy(self) -> None:
        size = self._image.layout.image_bytes // 8
        source = torch.ones(size, dtype=torch.int64, device=self._device)
        into = torch.empty_like(source)
        while not self._stopping.is_set():
            torch.add(source, 0, out=into)  # a kernel, where copy_ would take the copy engine
            settled(self._device)
            self._count(size * 8)

    def _fork(self, case: Case) -> None:
        got = 0

        def on_progress(progress: ForkProgress, _: int) -> None:
            nonlocal got
            self._count(progress.bytes_read - got)
            got = max(got, progress.bytes_read)

        options = settings_for(self._planner, case.way, governed=case.governed, reads=True)
        report = rfork.fork(self._decoder, model=MODEL, settings=options, on_progress=on_progress)
        if report.seed is not None:
            report.seed.close()
        if report.outcome != "forked" or {share.transport for share in report.sources} != {case.way}:
            raise RforkError("; ".join(report.reasons) or f"not over {case.way}: {report.line()}")
        self._count(report.image_bytes - got)

    def _count(self, more: int) -> None:
        with self._counter.get_lock():
            self._counter.value += max(0, more)


def seed_main(counter: Synchronized[int], planner: str, device_name: str) -> Callable[[Order], Told | None]:
    """The seed's process; its counter says whether it replays a captured graph."""
    seed = Seed(planner, device_name)
    counter.value = int(seed.graphed)
    return seed.obey


def target_main(counter: Synchronized[int], planner: str, device_name: str) -> Callable[[Order], None]:
    """A target's process."""
    return TargetProcess(counter, planner, device_name).obey
