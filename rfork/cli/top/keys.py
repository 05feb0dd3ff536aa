"""Single keys from a terminal, which is left as it was found."""

from __future__ import annotations

import contextlib
import os
import select
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
