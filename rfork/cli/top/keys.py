"""Reads single keys from a terminal, and restores it on exit and while Ctrl-Z suspends the command."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Final

MAX_BYTES: Final = 64


class Keys:
    """Pressed keys; without a terminal on stdin there are none, and reading only waits."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def read(self, within_s: float) -> str:
        """Return the keys pressed within so many seconds; empty if none."""
        if self._descriptor is None:
            select.select([], [], [], within_s)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], within_s)
        if not ready:
            return ""
        typed = os.read(self._descriptor, MAX_BYTES)
        if not typed:  # the terminal was closed
            self._descriptor = None
        return typed.decode(errors="replace")


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """Read single keys without echo inside the block. Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Suspension:
    """Records Ctrl-Z until the terminal is restored."""

    def __init__(self) -> None:
        self.suspend_requested = False

    def suspend(self) -> None:
        """Suspend this process, as the shell expects; return when it continues."""
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, ours)
        self.suspend_requested = False

    def request_suspend(self, number: int, frame: object) -> None:
        """Handle SIGTSTP."""
        self.suspend_requested = True


@contextlib.contextmanager
def suspensions() -> Iterator[Suspension]:
    """Handle Ctrl-Z inside the block. Without job control, SIGTSTP is ignored and stays so."""
    suspension = Suspension()
    before = signal.getsignal(signal.SIGTSTP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, suspension.request_suspend)
    try:
        yield suspension
    finally:
        signal.signal(signal.SIGTSTP, before)
