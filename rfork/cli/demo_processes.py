"""Child processes of the demo, which print JSON lines."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from rfork.errors import RforkError

Event = dict[str, Any]
END_S: Final = 10.0
ERROR_LINES: Final = 5
"""Lines of stderr shown if a process fails."""


class ChildFailed(RforkError):
    """A process of the demo exited, or did not respond in time."""


class Child:
    """A ``python -m …`` process that writes JSON lines to stdout."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**_without_settings(os.environ), **environment},
        )
        self._thread = threading.Thread(
            target=self._read, args=(self._process.stdout,), name=f"{name}-out", daemon=True
        )
        self._thread.start()

    def wait_for(self, key: str, timeout_s: float) -> Event:
        """Return the next event that has this key.

        Raises ChildFailed if the process reports an error or exits, or after the timeout.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._failure(f"did not respond within {timeout_s:.0f} s") from None
            if event is None:
                raise self._failure(f"exited with code {self._process.wait()}")
            if "error" in event and "fault" in event:
                raise ChildFailed(str(event["message"]))
            if key in event:
                return event

    def check(self) -> None:
        """Raise ChildFailed if the process has exited."""
        if self._process.poll() is not None:
            raise self._failure(f"exited with code {self._process.wait()}")

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Send SIGTERM, then SIGKILL if the process does not exit; return when it has exited."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._thread.join()
        self._errors.close()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # output of a library
                if isinstance(event, dict):
                    self._events.put(event)
        self._events.put(None)

    def _failure(self, problem: str) -> ChildFailed:
        self._errors.seek(0)
        last = self._errors.read().splitlines()[-ERROR_LINES:]
        return ChildFailed("\n  ".join([f"{self._name} {problem}", *last]))


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove rfork settings exported by the user's shell, so that the demo always runs the same way."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("RFORK_") or name.startswith("RFORK_TRACING_")
    }
