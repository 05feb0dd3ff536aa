"""Real `rfork` processes for tests: started, watched line by line with a deadline, and always ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.fork_server import PythonProcess

# Importing torch and transformers dominates this time on a busy machine with two cores.
START_S = 120.0
STOP_S = 10.0


def send(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to a child; after SIGSTOP, wait until it is stopped."""
    process.send_signal(number)
    if number == signal.SIGSTOP:
        with contextlib.suppress(ChildProcessError):  # it has ended
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def startup_patch(folder: Path, code: str) -> dict[str, str]:
    """Return the environment that makes a Python process run `code` first; creates `folder` for it."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


class SignalThread:
    """A thread of a Python process that receives its signals, so that the main thread is not interrupted."""

    def __init__(self, folder: Path) -> None:
        self.environment = startup_patch(folder, SIGNAL_THREAD_PATCH.format(fifo=str(folder / "signal")))
        """Environment for the process; its children do not inherit it."""
        self._fifo = folder / "signal"
        os.mkfifo(self._fifo)

    def deliver(self, number: signal.Signals) -> None:
        """Deliver the signal to the thread."""
        self._fifo.write_text(str(int(number)))


SIGNAL_THREAD_PATCH = """
import os, signal, threading
del os.environ["PYTHONPATH"]
def receive_signal():
    with open({fifo!r}) as fifo:
        number = int(fifo.read())
    signal.pthread_kill(threading.get_ident(), number)
threading.Thread(target=receive_signal, daemon=True).start()
"""


class RforkProcess:
    """``python -m MODULE ARGUMENTS`` in its own process group, with its output read continuously."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], *, module: str = "rfork") -> None:
        self.module = module
        self.arguments = tuple(arguments)
        self._changed = threading.Condition()
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._process = PythonProcess(
            [sys.executable, "-m", module, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr))
            if stream is not None
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Process id, also the id of the process group."""
        return self._process.pid

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._text("stderr")

    def wait_for(self, pattern: str, *, deadline_s: float = START_S) -> re.Match[str]:
        """Return the first match of `pattern` in a line of either stream. Raises TimeoutError with all
        output.

        Fails immediately once the process has ended and all its output is read.
        """
        compiled, deadline = re.compile(pattern), time.monotonic() + deadline_s
        with self._changed:
            while True:
                # Poll the process first: output read after its end is complete.
                ended = not any(reader.is_alive() for reader in self._readers)
                for line in (*self._lines["stdout"], *self._lines["stderr"]):
                    if match := compiled.search(line):
                        return match
                remaining = deadline - time.monotonic()
                if ended or remaining <= 0:
                    why = f"ended with {self._process.poll()}" if ended else f"{deadline_s} s passed"
                    raise TimeoutError(f"no line matches {pattern!r}: {why}\n{self.transcript()}")
                # The end of a reader wakes no waiter, so poll regularly.
                self._changed.wait(min(remaining, 0.2))

    def wait(self, *, deadline_s: float = START_S) -> int:
        """Wait for its end and all its output; return the exit code (negative: the signal)."""
        code = self._process.wait(deadline_s)
        for reader in self._readers:
            reader.join(STOP_S)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its group."""
        send(self._process, number)

    def stop(self) -> None:
        """End it and its children: SIGTERM, then SIGKILL to the group. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(STOP_S)

    def transcript(self) -> str:
        """Return command, exit code and all output, for a failure report."""
        heading = f"$ {self.module} {' '.join(self.arguments)}  (exit code {self._process.poll()})"
        return "\n".join((heading, "--- stdout", self.stdout, "--- stderr", self.stderr))

    def _text(self, name: str) -> str:
        with self._changed:
            return "".join(self._lines[name])

    def _read(self, name: str, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines[name].append(line)
                    self._changed.notify_all()


class RedisServer:
    """A real redis-server on one loopback port, without files."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self._process: subprocess.Popen[str] | None = None
        self._drain: threading.Thread | None = None

    def start(self, *options: str) -> None:
        """Start it, empty, and wait until it accepts connections. Raises TimeoutError with its log."""
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port)]
        self._process = process = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log, ready = process.stdout, threading.Event()
        if log is None:
            raise RuntimeError("redis-server was started without a pipe")
        lines: list[str] = []

        def read() -> None:
            with log:
                for line in log:
                    lines.append(line)
                    if "Ready to accept connections" in line:
                        ready.set()

        self._drain = threading.Thread(target=read, daemon=True)
        self._drain.start()
        if not ready.wait(START_S):
            self.kill()
            raise TimeoutError(f"redis-server did not start\n{''.join(lines)}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self._process is not None:
            send(self._process, number)

    def kill(self) -> None:
        """Kill it and wait for its end. Idempotent."""
        if self._process is None or self._drain is None:
            return
        self._process.kill()
        self._process.wait()
        self._drain.join(STOP_S)
        self._process = self._drain = None
