"""Common parts of engine servers: a process with its workers, its health, its log, its end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import httpx
import pytest
from typing_extensions import Self

from tests.engines.process_tree import process_tree
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
# Read before any fixture removes RFORK_* from the environment.
PYTHONS = {
    engine: Path(os.environ.get(f"RFORK_TEST_{engine.upper()}_PYTHON") or ROOT / f".venv-{engine}/bin/python")
    for engine in ("vllm", "sglang")
}
# Several times the start-up time of SmolLM2 with two servers on two cores.
READY_S = 300.0
REQUEST_TIMEOUT_S = 120.0
STOP_S = 20.0
POLL_INTERVAL_S = 0.1

Body = dict[str, str | int | bool | dict[str, int | bool]]
"""JSON object of an engine's REST interface."""


@dataclass(frozen=True)
class Completion:
    """A server's greedy completion of one prompt."""

    text: str
    """Without the prompt."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithms, one per token."""


def engine_python(engine: str) -> Path:
    """Return the Python of an engine's venv (``vllm`` or ``sglang``); skips the test if there is none."""
    python = PYTHONS[engine]
    if not python.is_file():
        pytest.skip(f"NO {engine.upper()} AT {python}: its forks are NOT tested; run `make test-engines`")
    return python


def wait_until(condition: Callable[[], bool], *, deadline_s: float, what: str) -> None:
    """Return once `condition` is true, checked ten times per second; TimeoutError with `what` if it never is."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {deadline_s} s")
        time.sleep(POLL_INTERVAL_S)


class ServerDied(RuntimeError):
    """The server's process ended while a test waited for it; the message has the exit code and the end of its
    log.
    """


class EngineServer(ABC):
    """One engine's server process with all its workers, on a free port of the loopback interface.

    `model` is the folder it serves. `log` receives all its output and is overwritten. `arguments` are
    appended to its command line; `environment` is added to this process's environment without ``RFORK_*``.
    `threads` is the number of compute threads: one by default, so that two servers on two cores do not starve
    each other. `python` is that of another venv than the default.
    """

    engine: ClassVar[str]
    """``vllm`` or ``sglang``."""

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        dtype: str = "float32",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        threads: int = 1,
        port: int | None = None,
        python: Path | None = None,
    ) -> None:
        self.python = python or engine_python(self.engine)
        self.model = model
        self.log_file = log
        self.dtype = dtype
        self.threads = threads
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [str(part) for part in (*self._command(), *arguments)]
        self.environment = self._environment(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None

    # -- engine-specific parts ------------------------------------------------------------------------------

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """Return the command line without a test's arguments."""

    @abstractmethod
    def _variables(self) -> dict[str, str]:
        """Return the environment variables that this engine needs on a CPU."""

    @abstractmethod
    def request(self, prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> tuple[str, Body]:
        """Return path and JSON body of a POST that requests a greedy completion with token ids."""

    @abstractmethod
    def completion(self, response: bytes) -> Completion:
        """Parse the JSON response to `request`."""

    # -- start and stop -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it in a new session and return immediately."""
        # Engines create sockets among the temporary files, whose paths must be short.
        self._scratch = Path(tempfile.mkdtemp(prefix="rfork-"))
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**self.environment, "TMPDIR": str(self._scratch)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = READY_S) -> float:
        """Return once it is healthy: the seconds waited. ServerDied if it ended, TimeoutError if it is not
        ready.
        """
        began = time.monotonic()
        while not self.healthy():
            self._wait_poll_interval()
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"{self.engine} is not ready after {timeout_s} s\n{self.tail()}")
        return time.monotonic() - began

    def healthy(self) -> bool:
        """Return whether its health endpoint responds with 200, as a load balancer would check."""
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def running(self) -> bool:
        """Return whether the started process is running."""
        return self._started().poll() is None

    def wait(self, timeout_s: float = READY_S) -> int:
        """Return its exit code (negative: the signal) once it has ended; TimeoutError if it does not end."""
        try:
            return self._started().wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.engine} is still running after {timeout_s} s\n{self.tail()}") from None

    def stop(self) -> list[int]:
        """End it as an orchestrator does: SIGTERM, then SIGKILL after twenty seconds.

        Returns the ids of the processes that had to be killed. Idempotent.
        """
        if self._process is None:
            return []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            # A test may have stopped it, so that it cannot handle the signal.
            self.signal(signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            wait_until(self._has_ended, deadline_s=STOP_S, what="its end")
        left = self.processes()
        self.kill()
        return left

    def kill(self) -> None:
        """Send SIGKILL to it and all its workers, and wait until none is left."""
        if self._process is not None and self._scratch is not None:
            wait_until(self._kill_remaining, deadline_s=STOP_S, what=f"the end of all processes of {self.engine}")
            shutil.rmtree(self._scratch, ignore_errors=True)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal (SIGSTOP, SIGCONT, …) to it and to all its workers."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def pid(self) -> int:
        """Id of the started process: the API server, not the worker that owns the weights."""
        return self._started().pid

    def processes(self) -> list[int]:
        """Return the ids of that process and of all its living descendants, even if their parent has ended."""
        return process_tree(self.pid)

    # -- responses and log ----------------------------------------------------------------------------------

    def complete(self, prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> Completion:
        """Return greedy tokens for a prompt; httpx.HTTPError unless it responds with 200 within two minutes."""
        path, body = self.request(prompt, max_tokens, ignore_eos=ignore_eos)
        response = httpx.post(self.url + path, json=body, timeout=REQUEST_TIMEOUT_S)
        response.raise_for_status()
        return self.completion(response.content)

    @property
    def log(self) -> str:
        """All output of it and its workers so far."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def tail(self, lines: int = 60) -> str:
        """Return the end of its log below the command line, for a failure's message."""
        return "\n".join((f"$ {' '.join(self.command)}", *self.log.splitlines()[-lines:]))

    def lines_with(self, word: str) -> list[str]:
        """Return the lines of its log that contain a word."""
        return [line for line in self.log.splitlines() if word in line]

    def wait_for_line(self, pattern: str, *, deadline_s: float = READY_S) -> re.Match[str]:
        """Return the first match of a regular expression in its log; ServerDied or TimeoutError if there is
        none.
        """
        compiled, deadline = re.compile(pattern, re.MULTILINE), time.monotonic() + deadline_s
        while True:
            ended = not self.running()
            if match := compiled.search(self.log):
                return match
            if time.monotonic() > deadline:
                raise TimeoutError(f"no line matches {pattern!r} after {deadline_s} s\n{self.tail()}")
            if ended:
                self._wait_poll_interval()
            time.sleep(POLL_INTERVAL_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error_type is not None:
            print(self.tail(200))

    def _has_ended(self) -> bool:
        """Return whether the process, which is reaped here, and all its workers have ended."""
        return self._started().poll() is not None and not self.processes()

    def _kill_remaining(self) -> bool:
        """Send SIGKILL to all remaining processes, including newly started ones; returns whether none is
        left.
        """
        self.signal(signal.SIGKILL)
        return self._has_ended()

    def _wait_poll_interval(self) -> None:
        """Wait one poll interval, during which the process must not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._started().wait(POLL_INTERVAL_S)
            raise ServerDied(f"{self.engine} ended with {code}\n{self.tail()}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"the {self.engine} server was not started")
        return self._process

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RFORK_")}
        # Engines must neither fetch anything from the network nor send telemetry.
        quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
        # The venv's own programs (ninja, …) are found as in an activated venv.
        path = f"{self.python.parent}{os.pathsep}{inherited.get('PATH', '')}"
        cores = {"OMP_NUM_THREADS": str(self.threads)}
        return {**inherited, "PATH": path, **quiet, **cores, **self._variables(), **more}
