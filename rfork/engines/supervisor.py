"""Runs an engine as a child process and drains it before a SIGTERM reaches it.

Used by `rfork launch`, also as process 1 of a container. Only the engine itself is waited for; its orphaned
children are not reaped.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import FrameType
from typing import Final

from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.shutdown import get_interruptible

log = logger(__name__)

FORWARDED: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals forwarded unchanged. SIGTERM is forwarded after the drain."""

Drain = Callable[[threading.Event], None]
"""Returns when the engine may exit or the event is set. Runs on its own thread and must not raise."""


class _Exited(int):
    """Exit code of the engine."""


class _DrainDone:
    """The drain has finished: the engine may exit."""


_Event = signal.Signals | _Exited | _DrainDone


def supervise(command: Sequence[str], environment: Mapping[str, str], drain: Drain) -> int:
    """Run the command until it exits. Returns its exit code, or 128 + n if signal n ended it.

    The first SIGTERM starts `drain` and is forwarded after it; the second is forwarded immediately. Must be
    called on the main thread. Raises SettingsError if the command cannot be started.
    """
    events: SimpleQueue[_Event] = SimpleQueue()

    def on_signal(number: int, _: FrameType | None) -> None:
        events.put(signal.Signals(number))

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, *FORWARDED)}
    stop = threading.Event()

    def drain_and_stop() -> None:
        drain(stop)
        events.put(_DrainDone())

    try:
        # In its own session, so that a terminal's Ctrl-C reaches only this process, which forwards it once.
        engine = subprocess.Popen(command, env=dict(environment), start_new_session=True)
        threading.Thread(target=lambda: events.put(_Exited(engine.wait())), name="rfork-engine", daemon=True).start()
        terminated = 0
        while True:
            event = get_interruptible(events)
            if isinstance(event, _Exited):
                return int(event) if event >= 0 else 128 - event
            if isinstance(event, _DrainDone):
                engine.send_signal(signal.SIGTERM)
            elif event is not signal.SIGTERM:
                engine.send_signal(event)
            elif terminated == 0:
                terminated = 1
                threading.Thread(target=drain_and_stop, name="rfork-drain", daemon=True).start()
            else:
                stop.set()  # the drain thread will also send SIGTERM, which is harmless
                engine.send_signal(signal.SIGTERM)
    except OSError as error:
        hint = "install the engine in this environment, or pass the program's path"
        raise SettingsError(f"cannot start {command[0]}: {error.strerror}", hint=hint) from None
    finally:
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)
