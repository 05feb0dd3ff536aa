"""Measures the steps of a vLLM worker. Runs in the worker.

On a GPU the worker's methods return once the kernels of a step have been launched, so their own duration is
not that of the step. A step ends when its output is available:

- With asynchronous scheduling the output is an object, and its `get_output` waits for the device. vLLM calls it
  on another thread, while the worker launches the next step.
- Otherwise the worker has already waited when it returns the output.
- Of most ranks vLLM reads no output: of tensor-parallel ranks except the first, and of pipeline stages except the
  last. Their steps are measured by events on the device, which are polled at the next launch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch

from rfork.engines.hook_targets import patch_method
from rfork.engines.served_model import ServedModel
from rfork.source.step_sequence import MAX_RUNNING

STEP_ATTRIBUTE: Final = "rfork_step"
"""Attribute of an asynchronous output: the WorkerSteps of its worker, and the number of its step."""

MAX_UNREAD: Final = MAX_RUNNING
"""Consecutive outputs that were not read, after which vLLM does not read those of this rank."""


class TimingEvent(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self) -> None:
        """Record the event on the current stream of this thread."""
        ...

    def query(self) -> bool:
        """Return True if the device has reached the event."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds between two events that the device has reached."""
        ...


def _new_event() -> TimingEvent:
    event: TimingEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class DeviceTimer:
    """Measures steps by events on the device. Only the worker's thread may use it: it owns device and stream.

    The device reaches the first event of a step when the previous step has ended, so steps that are launched
    early are not counted twice, and an idle device is not counted.
    """

    def __init__(self, new_event: Callable[[], TimingEvent] = _new_event) -> None:
        self._new_event = new_event
        self._began: TimingEvent | None = None
        self._steps: deque[tuple[TimingEvent, TimingEvent]] = deque(maxlen=MAX_RUNNING)

    def begin(self) -> None:
        """Record the beginning of a step. Replaces one that did not end."""
        self._began = self._record()

    def end(self) -> None:
        """Record the end of the step."""
        if self._began is not None:
            self._steps.append((self._began, self._record()))
            self._began = None

    def finished(self) -> Iterator[float]:
        """Yield the seconds of each step that has ended since the last call. Never waits for the device."""
        while self._steps and self._steps[0][1].query():
            began, ended = self._steps.popleft()
            yield began.elapsed_time(ended) / 1000

    def _record(self) -> TimingEvent:
        event = self._new_event()
        event.record()
        return event


class WorkerSteps:
    """Reports the steps of one worker to its served model.

    `device_timer`: None for a worker whose methods return when the step has ended, as on a CPU.
    """

    def __init__(self, served: ServedModel, device_timer: DeviceTimer | None) -> None:
        self._seed = served.seed
        self._steps = served.steps
        self._timer = device_timer
        self._step: int | None = None
        """The step that is being launched; None if it is measured on the device."""
        self._unread = 0
        """Consecutive outputs that have not been read; more than `MAX_UNREAD` if vLLM reads none of this rank."""

    @contextlib.contextmanager
    def launching(self, *, begins: bool = False) -> Iterator[None]:
        """Wrap a part of a step; the first one `begins` it. A step that raises is not counted."""
        if begins:
            self._begin()
        try:
            yield
        except BaseException:
            self._cancel()
            raise

    def on_executed(self, output: Any) -> None:
        """Handle the output of a step without sampling. It is empty if the step launched no work."""
        if _is_async(output) or output.req_ids:
            self.on_sampled(output)
        else:
            self._cancel()

    def on_sampled(self, output: Any) -> None:
        """Handle the output of a step: all its work has been launched."""
        step, self._step = self._step, None
        if _is_async(output):
            self._unread += 1
            patch_method(type(output), "get_output", _get_output)
            setattr(output, STEP_ATTRIBUTE, (self, step))
        else:
            # Another pipeline stage has the output of this step if it is empty here.
            self._unread = 0 if output is not None and output.req_ids else MAX_UNREAD + 1
        if step is None:
            if self._timer is not None:
                self._timer.end()
        elif self._is_unread and self._timer is not None:
            self._steps.clear()  # the device measures from the next step on
        elif self._is_unread or not _is_async(output):
            self._steps.end(step)

    def on_output(self, step: int | None) -> None:
        """Handle an asynchronous output that has been read: its step has ended. Called on any thread."""
        self._unread = 0
        if step is not None:
            self._steps.end(step)

    def on_failed_output(self, step: int | None) -> None:
        """Handle an asynchronous output that could not be read."""
        if step is not None:
            self._steps.cancel(step)

    @property
    def _is_unread(self) -> bool:
        return self._unread > MAX_UNREAD

    def _begin(self) -> None:
        self._cancel()  # a step whose second part was not observed
        if self._timer is None or not self._is_unread:
            self._step = self._steps.begin()
            return
        for seconds in self._timer.finished():
            self._seed.record_step_latency(seconds)
        self._timer.begin()

    def _cancel(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._steps.cancel(step)


def _is_async(output: Any) -> bool:
    return callable(getattr(output, "get_output", None))


def _get_output(method: Callable[..., object], output: Any, *args: object, **kwargs: object) -> object:
    """Wrap `get_output` of vLLM's asynchronous outputs."""
    steps, step = vars(output).pop(STEP_ATTRIBUTE, (None, None))
    if steps is None:
        return method(output, *args, **kwargs)
    try:
        result = method(output, *args, **kwargs)
    except BaseException:
        steps.on_failed_output(step)
        raise
    steps.on_output(step)
    return result
