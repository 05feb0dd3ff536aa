"""Single keys from a terminal, which is left as it was found, also while Ctrl-Z suspends the command."""

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

READ: Final = 64


class Keys:
    """Keys as they are pressed; without a terminal on stdin there are none, and waiting is all it does."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def pressed(self, within_s: float) -> str:
        """What was typed within so many seconds; empty: nothing."""
        if self._descriptor is None:
            select.select([], [], [], within_s)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], within_s)
        if not ready:
            return ""
        typed = os.read(self._descriptor, READ)
        if not typed:  # the terminal is gone
            self._descriptor = None
        return typed.decode(errors="replace")


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """Hear single keys, unechoed, until the block is left. Ctrl-C interrupts as ever."""
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
    """Whether Ctrl-Z was pressed, which waits here until the terminal has been given back."""

    def __init__(self) -> None:
        self.suspend_requested = False

    def suspend(self) -> None:
        """Stop this process as the shell expects it; returns when it is continued."""
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, ours)
        self.suspend_requested = False

    def request_suspend(self, number: int, frame: object) -> None:
        """The handler of SIGTSTP."""
        self.suspend_requested = True


@contextlib.contextmanager
def suspensions() -> Iterator[Suspension]:
    """Hear Ctrl-Z until the block is left; where a shell has no jobs, and so ignores it, there is none."""
    suspension = Suspension()
    before = signal.getsignal(signal.SIGTSTP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, suspension.request_suspend)
    try:
        yield suspension
    finally:
        signal.signal(signal.SIGTSTP, before)
