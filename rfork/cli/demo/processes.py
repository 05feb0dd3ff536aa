"""Child processes of the demo, which are always terminated at the end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Self

from rfork.errors import RforkError

Event = Mapping[str, object]
END_S = 10.0


class ChildFailed(RforkError):
    """A process of the demo exited, or did not respond in time."""


class Child:
    """A ``python -m …`` process that writes JSON lines to stdout.

    `on_event` is called on a reader thread for each line; lines are also queued for `wait_for`.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.name = name
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._on_event = on_event
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**_without_settings(os.environ), **environment},
        )
        self._threads = [
            threading.Thread(target=self._read_events, name=f"{name}-out", daemon=True),
            threading.Thread(target=self._read_errors, name=f"{name}-err", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if the process is still running."""
        return self._process.poll() is None

    def wait_for(self, match: Callable[[Event], bool], timeout: float) -> Event:
        """Return the next event that matches. Raises ChildFailed if the process exits, or after `timeout`."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ChildFailed(f"{self.name} did not respond within {timeout:.0f} s{self._last_words()}") from None
            if event is None:
                raise ChildFailed(f"{self.name} exited with code {self._process.wait()}{self._last_words()}")
            if match(event):
                return event

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Send SIGTERM, then SIGKILL if the process does not exit; return when it has exited."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()

    def _read_events(self) -> None:
        with _pipe(self._process.stdout) as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # output of a library
                if not isinstance(event, dict):
                    continue
                if self._on_event is not None:
                    self._on_event(event)
                self._events.put(event)
        self._events.put(None)

    def _read_errors(self) -> None:
        with _pipe(self._process.stderr) as lines:
            for line in lines:
                self._errors = [*self._errors[-20:], line.rstrip()]

    def _last_words(self) -> str:
        return "".join(f"\n  {line}" for line in self._errors[-5:])


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove rfork settings exported by the user's shell, so that the demo always runs the same way."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("RFORK_") or name.startswith("RFORK_TRACING_")
    }


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ValueError("the process was started without this pipe")
    return stream


class Children:
    """All child processes of one demo. Leaving the block terminates those still running, newest first."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def add(self, child: Child) -> Child:
        """Register `child` for termination."""
        self._children.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            child.end()
