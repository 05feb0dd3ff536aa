"""Double-buffered pinned memory between a device and transports that send and receive on the host.

A range is processed in steps. While the host sends one step, the next is copied from the device; while the
host receives one, the previous one is copied to it. Two buffers suffice and are reused by the next pass.
However a pass ends, it first waits for its copies: none reads or writes the image's memory afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from rfork.image.host_memory import host_view

STEP_BYTES = 2 << 20
"""Size of a step in bytes. The first copy of a pass overlaps with nothing: 80 us at PCIe 4's 25 GB/s."""
MAX_FREE_BUFFERS = 16
"""Maximum number of cached buffers: 32 MiB per image, enough for eight concurrent passes."""


class PendingCopy(Protocol):
    """Copies in progress."""

    def wait(self) -> None:
        """Return when the copies are complete. May be called again."""
        ...


class DeviceCopier(Protocol):
    """Interface to a device's copy engines, such as CUDA's. Thread-safe."""

    def needs_staging(self, memory: torch.Tensor) -> bool:
        """Return True if the host can reach this memory only by copies."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return host memory (uint8, 1-D) for fast `device_to_host` and `host_to_device` copies."""
        ...

    def device_to_host(self, host: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> PendingCopy:
        """Start copying each device tensor to the host tensor at its position. If it raises, no copy is in progress."""
        ...

    def host_to_device(self, memory: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> PendingCopy:
        """Start copying each host tensor to the device tensor at its position. If it raises, no copy is in progress."""
        ...


class _Step(NamedTuple):
    buffer: torch.Tensor
    views: list[memoryview]
    memory: list[torch.Tensor]  # tensors on a device,
    host: list[torch.Tensor]  # and their slices of the buffer


class PinnedStaging:
    """The buffers of one image. Thread-safe, but each pass belongs to one thread.

    A step is passed as the tensors (uint8, 1-D) of its bytes in order, including tensors that the host can
    reach.
    """

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier
        self._lock = threading.Lock()
        self._spare: list[torch.Tensor] = []

    def reading(self, steps: Iterable[Sequence[torch.Tensor]]) -> Generator[Sequence[memoryview], None, None]:
        """Yield the bytes of each step as host views, valid until the next step is requested.

        Close the generator when done.
        """
        pending: list[tuple[_Step, PendingCopy]] = []  # at most two: one being read, one being copied
        try:
            for parts in steps:
                step = self._step(parts)
                try:
                    fetching = self._copier.device_to_host(step.host, step.memory)
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
        """Yield uninitialised host views of each step, to be filled before the next step is requested.

        All filled steps are in the tensors when the generator ends. A step that was not filled when it is
        closed is not written.
        """
        pending: list[tuple[_Step, PendingCopy]] = []  # at most one: the step being copied to the device
        step: _Step | None = None
        try:
            for parts in steps:
                step = self._step(parts)
                yield step.views
                host_to_device = self._copier.host_to_device(step.memory, step.host)
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
        staged = [self._copier.needs_staging(part) for part in parts]
        buffer = self._acquire(sum(part.numel() for part, is_staged in zip(parts, staged, strict=True) if is_staged))
        memory: list[torch.Tensor] = []
        host: list[torch.Tensor] = []
        views: list[memoryview] = []
        used = begin = 0  # the bytes of the buffer from `begin` on are in no view yet
        for part, is_staged in zip(parts, staged, strict=True):
            if is_staged:
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
        """Wait for the first pending copy and return its step. On failure, wait for and drop all pending copies."""
        step, copying = pending[0]
        try:
            copying.wait()
        except BaseException:
            others = [other.wait for _, other in pending[1:]]
            pending.clear()
            with suppress(Exception):  # report the first failure
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
        return self._copier.pinned(max(nbytes, STEP_BYTES))

    def _release(self, step: _Step) -> None:
        with self._lock:
            if step.buffer.numel() == STEP_BYTES and len(self._spare) < MAX_FREE_BUFFERS:
                self._spare.append(step.buffer)


class CudaCopier:
    """`DeviceCopier` for CUDA, with one stream per direction: neither waits for the other or for kernels."""

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
        # A blocking event: the thread sleeps instead of occupying a core that sockets could use.
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
    """Start copies on the streams of the devices; `memory` is the device side of the copies."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(memory):
        by_device.setdefault(tensor.device, []).append(index)
    copying = _EventWait()
    begun: list[torch.cuda.Stream] = []
    try:
        for device, chosen in by_device.items():
            begun.append(streams[device])
            with torch.cuda.stream(streams[device]):
                # One call per step: a copy per small tensor would be slow.
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
    """Wait for all, even if some raise; then raise the first exception."""
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
