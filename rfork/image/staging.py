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
MOST_SPARE = 16
"""Buffers that wait for the next walk: 32 MiB an image, enough for eight walks at once."""


class Copying(Protocol):
    """Copies under way."""

    def wait(self) -> None:
        """Return once they are done; safe to call again."""
        ...


class Copies(Protocol):
    """What a device's copy engines do: the seam to CUDA. Thread-safe."""

    def stages(self, memory: torch.Tensor) -> bool:
        """Whether the host reaches this memory only by copies."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory (uint8, 1-D) that `fetch` and `put` copy from and to at full speed."""
        ...

    def fetch(self, host: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> Copying:
        """Begin to copy each device tensor into the host tensor of its place; raises with none under way."""
        ...

    def put(self, memory: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> Copying:
        """Begin to copy each host tensor into the device tensor of its place; raises with none under way."""
        ...


class _Step(NamedTuple):
    buffer: torch.Tensor
    views: list[memoryview]
    memory: list[torch.Tensor]  # what lies on a device,
    host: list[torch.Tensor]  # and where the buffer holds it


class Staging:
    """The buffers of one image. Thread-safe; each walk is for one thread.

    A step is given as the tensors (uint8, 1-D) of its bytes in order, those that the host reaches among them.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._lock = threading.Lock()
        self._spare: list[torch.Tensor] = []

    def reading(self, steps: Iterable[Sequence[torch.Tensor]]) -> Generator[Sequence[memoryview], None, None]:
        """The bytes of each step as host views, valid until the next is asked for. Close it when done."""
        held: list[tuple[_Step, Copying]] = []  # at most two: what is read, and what is fetched meanwhile
        try:
            for parts in steps:
                step = self._step(parts)
                try:
                    fetching = self._copies.fetch(step.host, step.memory)
                except BaseException:
                    self._give_back(step)
                    raise
                held.append((step, fetching))
                if len(held) == 2:
                    yield self._first(held).views
                    self._give_back(held.pop(0)[0])
            if held:
                yield self._first(held).views
        finally:
            self._end(held)

    def writing(self, steps: Iterable[Sequence[torch.Tensor]]) -> Generator[Sequence[memoryview], None, None]:
        """Host views of each step, of undefined content, to be filled before the next is asked for.

        What was filled is in the tensors once there is no next. A step that was not filled when the walk is
        closed is not written.
        """
        held: list[tuple[_Step, Copying]] = []  # at most one: what goes to the device meanwhile
        step: _Step | None = None
        try:
            for parts in steps:
                step = self._step(parts)
                yield step.views
                put = self._copies.put(step.memory, step.host)
                held.append((step, put))
                step = None
                if len(held) == 2:
                    self._give_back(self._first(held))
                    held.pop(0)
            if held:
                self._first(held)
        finally:
            if step is not None:
                self._give_back(step)
            self._end(held)

    def _step(self, parts: Sequence[torch.Tensor]) -> _Step:
        staged = [self._copies.stages(part) for part in parts]
        buffer = self._take(sum(part.numel() for part, there in zip(parts, staged, strict=True) if there))
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

    def _first(self, held: list[tuple[_Step, Copying]]) -> _Step:
        """The first of them, once it is copied. Where that fails, none is under way any more, nor held."""
        step, copying = held[0]
        try:
            copying.wait()
        except BaseException:
            others = [other.wait for _, other in held[1:]]
            held.clear()
            with suppress(Exception):  # the first failure is the one to tell
                wait_all(others)
            raise
        return step

    def _end(self, held: list[tuple[_Step, Copying]]) -> None:
        wait_all([copying.wait for _, copying in held])
        for step, _ in held:
            self._give_back(step)

    def _take(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if nbytes <= STEP_BYTES:
            with self._lock:
                if self._spare:
                    return self._spare.pop()
        return self._copies.pinned(max(nbytes, STEP_BYTES))

    def _give_back(self, step: _Step) -> None:
        with self._lock:
            if step.buffer.numel() == STEP_BYTES and len(self._spare) < MOST_SPARE:
                self._spare.append(step.buffer)


class CudaCopies:
    """`Copies` of CUDA, each way on a stream of its own: neither waits for the other, nor for kernels."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        streams = [
            (device, torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            for device in devices
        ]
        self._from = {device: stream for device, stream, _ in streams}
        self._to = {device: stream for device, _, stream in streams}

    def stages(self, memory: torch.Tensor) -> bool:
        """See `Copies`."""
        return memory.device.type != "cpu"

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `Copies`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, host: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> Copying:
        """See `Copies`."""
        return _begin(self._from, host, memory, memory)

    def put(self, memory: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> Copying:
        """See `Copies`."""
        return _begin(self._to, memory, host, memory)


class _Events:
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
) -> _Events:
    """Copy on the stream of each place's device; `memory` is the one of the two that lies there."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(memory):
        places.setdefault(tensor.device, []).append(place)
    copying = _Events()
    begun: list[torch.cuda.Stream] = []
    try:
        for device, chosen in places.items():
            begun.append(streams[device])
            with torch.cuda.stream(streams[device]):
                # One call for all of a step: many small tensors cost many copies, but few steps here.
                torch._foreach_copy_(
                    [into[place] for place in chosen],
                    [source[place] for place in chosen],
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
