"""A pseudo-terminal that runs one `rfork` command."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from typing import cast

DEADLINE_S = 60.0


class PseudoTerminal:
    """A pseudo-terminal that runs one `rfork` command."""

    def __init__(self, *, rows: int, columns: int) -> None:
        self._controller_fd, self._terminal_fd = pty.openpty()
        fcntl.ioctl(self._terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = self.modes()
        self.text = ""
        self._process: subprocess.Popen[bytes] | None = None

    def modes(self) -> list[object]:
        """Terminal attributes."""
        return cast(list[object], termios.tcgetattr(self._terminal_fd))

    def start(self, *arguments: str, **environment: str) -> None:
        """Run the command with this as its terminal."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rfork", *arguments],
            stdin=self._terminal_fd,
            stdout=self._terminal_fd,
            stderr=self._terminal_fd,
            env={**os.environ, "TERM": "xterm-256color", **environment},
            preexec_fn=_set_controlling_terminal,
        )

    def wait_for(self, text: str) -> None:
        """Read until the text appears; fails after `DEADLINE_S`."""
        at, deadline = len(self.text), time.monotonic() + DEADLINE_S
        while text not in self.text[at:]:
            assert time.monotonic() < deadline, self.text[-3000:]
            self._read()

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._controller_fd, text.encode())

    def end(self) -> int:
        """Wait for the command to exit; return its exit code."""
        assert self._process is not None
        deadline = time.monotonic() + DEADLINE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            self._read()
        self._process.kill()
        while self._read():
            pass
        return self._process.wait()

    def close(self) -> None:
        """Kill the command if it still runs, and close the terminal."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for descriptor in (self._controller_fd, self._terminal_fd):
            os.close(descriptor)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._controller_fd], [], [], 0.1)
        if ready:
            self.text += os.read(self._controller_fd, 65536).decode(errors="replace")
        return bool(ready)


def _set_controlling_terminal() -> None:
    os.setsid()
    os.close(os.open(os.ttyname(0), os.O_RDWR))
