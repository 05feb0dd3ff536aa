"""Page-locked memory between a device and transports that send and receive on the host: two slices at once.

A range is walked in steps. While the host sends one step, the next comes from the device; while the host
receives one, the one before goes to it. Two buffers do for that; they are used again by the next walk.
Whatever ends a walk, it waits for its copies first: none reads or writes the image's memory after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from rfork.image.host_memory import host_view

STEP_BYTES = 2 << 20
"""Bytes of a step. The first of a walk has nothing to hide behind: 80 us at PCIe 4's 25 GB/s."""
MAX_FREE_BUFFERS = 16
"""Buffers that wait for the next walk: 32 MiB an image, enough for eight walks at once."""


class PendingCopy(Protocol):
    """Copies under way."""

    def wait(self) -> None:
        """Return once they are done; safe to call again."""
        ...


class DeviceCopier(Protocol):
    """What a device's copy engines do: the seam to CUDA. Thread-safe."""

    def needs_staging(self, memory: torch.Tensor) -> bool:
        """Whether the host reaches this memory only by copies."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory (uint8, 1-D) that `device_to_host` and `host_to_device` copy from and to at full speed."""
        ...

    def device_to_host(self, host: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> PendingCopy:
        """Begin to copy each device tensor into the host tensor of its place; raises with none under way."""
        ...

    def host_to_device(self, memory: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> PendingCopy:
        """Begin to copy each host tensor into the device tensor of its place; raises with none under way."""
        ...


class _Step(NamedTuple):
    buffer: torch.Tensor
    views: list[memoryview]
    memory: list[torch.Tensor]  # what lies on a device,
    host: list[torch.Tensor]  # and where the buffer holds it


class PinnedStaging:
    """The buffers of one image. Thread-safe; each walk is for one thread.

    A step is given as the tensors (uint8, 1-D) of its bytes in order, those that the host reaches among them.
    """

    def __init__(self, copies: DeviceCopier) -> None:
        self._copies = copies
        self._lock = threading.Lock()
        self._spare: list[torch.Tensor] = []

    def reading(self, steps: Iterable[Sequence[torch.Tensor]]) -> Generator[Sequence[memoryview], None, None]:
        """The bytes of each step as host views, valid until the next is asked for. Close it when done."""
        pending: list[tuple[_Step, PendingCopy]] = []  # at most two: what is read, and what is fetched meanwhile
        try:
            for parts in steps:
                step = self._step(parts)
                try:
                    fetching = self._copies.device_to_host(step.host, step.memory)
                except BaseException:
                    self._release(step)
                    raise
                pending.append((step, fetching))
                if len(pending) == 2:
                    yield self._first(pending).views
                    self._release(pending.pop(0)[0])
            if pending:
                yield self._first(pending).views
        finally:
            self._end(pending)

    def writing(self, steps: Iterable[Sequence[torch.Tensor]]) -> Generator[Sequence[memoryview], None, None]:
        """Host views of each step, of undefined content, to be filled before the next is asked for.

        What was filled is in the tensors once there is no next. A step that was not filled when the walk is
        closed is not written.
        """
        pending: list[tuple[_Step, PendingCopy]] = []  # at most one: what goes to the device meanwhile
        step: _Step | None = None
        try:
            for parts in steps:
                step = self._step(parts)
                yield step.views
                host_to_device = self._copies.host_to_device(step.memory, step.host)
                pending.append((step, host_to_device))
                step = None
                if len(pending) == 2:
                    self._release(self._first(pending))
                    pending.pop(0)
            if pending:
                self._first(pending)
        finally:
            if step is not None:
                self._release(step)
            self._end(pending)

    def _step(self, parts: Sequence[torch.Tensor]) -> _Step:
        staged = [self._copies.needs_staging(part) for part in parts]
        buffer = self._acquire(sum(part.numel() for part, there in zip(parts, staged, strict=True) if there))
        memory: list[torch.Tensor] = []
        host: list[torch.Tensor] = []
        views: list[memoryview] = []
        used = begin = 0  # the bytes of the buffer from `begin` on are in no view yet
        for part, there in zip(parts, staged, strict=True):
            if there:
                memory.append(part)
                host.append(buffer[used : used + part.numel()])
                used += part.numel()
                continue
            if begin < used:
                views.append(_view(buffer[begin:used]))
                begin = used
            views.append(_view(part))
        if begin < used:
            views.append(_view(buffer[begin:used]))
        return _Step(buffer, views, memory, host)

    def _first(self, pending: list[tuple[_Step, PendingCopy]]) -> _Step:
        """The first of them, once it is copied. Where that fails, none is under way any more, nor held."""
        step, copying = pending[0]
        try:
            copying.wait()
        except BaseException:
            others = [other.wait for _, other in pending[1:]]
            pending.clear()
            with suppress(Exception):  # the first failure is the one to tell
                wait_all(others)
            raise
        return step

    def _end(self, pending: list[tuple[_Step, PendingCopy]]) -> None:
        wait_all([copying.wait for _, copying in pending])
        for step, _ in pending:
            self._release(step)

    def _acquire(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if nbytes <= STEP_BYTES:
            with self._lock:
                if self._spare:
                    return self._spare.pop()
        return self._copies.pinned(max(nbytes, STEP_BYTES))

    def _release(self, step: _Step) -> None:
        with self._lock:
            if step.buffer.numel() == STEP_BYTES and len(self._spare) < MAX_FREE_BUFFERS:
                self._spare.append(step.buffer)


class CudaCopier:
    """`DeviceCopier` of CUDA, each way on a stream of its own: neither waits for the other, nor for kernels."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        streams = [
            (device, torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            for device in devices
        ]
        self._from = {device: stream for device, stream, _ in streams}
        self._to = {device: stream for device, _, stream in streams}

    def needs_staging(self, memory: torch.Tensor) -> bool:
        """See `DeviceCopier`."""
        return memory.device.type != "cpu"

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `DeviceCopier`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def device_to_host(self, host: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> PendingCopy:
        """See `DeviceCopier`."""
        return _begin(self._from, host, memory, memory)

    def host_to_device(self, memory: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> PendingCopy:
        """See `DeviceCopier`."""
        return _begin(self._to, memory, host, memory)


class _EventWait:
    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def record(self, stream: torch.cuda.Stream) -> None:
        # One that sleeps, instead of keeping a core busy that sockets could use.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        self._events.append(event)

    def wait(self) -> None:
        wait_all([event.synchronize for event in self._events])


def _begin(
    streams: dict[torch.device, torch.cuda.Stream],
    into: Sequence[torch.Tensor],
    source: Sequence[torch.Tensor],
    memory: Sequence[torch.Tensor],
) -> _EventWait:
    """Copy on the stream of each place's device; `memory` is the one of the two that lies there."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(memory):
        by_device.setdefault(tensor.device, []).append(index)
    copying = _EventWait()
    begun: list[torch.cuda.Stream] = []
    try:
        for device, chosen in by_device.items():
            begun.append(streams[device])
            with torch.cuda.stream(streams[device]):
                # One call for all of a step: many small tensors cost many copies, but few steps here.
                torch._foreach_copy_(
                    [into[index] for index in chosen],
                    [source[index] for index in chosen],
                    non_blocking=True,
                )
            copying.record(streams[device])
    except BaseException:
        wait_all([stream.synchronize for stream in begun])
        raise
    return copying


def wait_all(waits: Iterable[Callable[[], None]]) -> None:
    """Wait for each, whatever another one raises; then raise what the first of them did that failed."""
    failed: BaseException | None = None
    for wait in waits:
        try:
            wait()
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _view(memory: torch.Tensor) -> memoryview:
    return host_view(memory.data_ptr(), memory.numel())
