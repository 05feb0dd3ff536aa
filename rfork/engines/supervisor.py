"""An engine's process, watched by another: it is drained before a SIGTERM reaches it.

Runs beside the engine, as its parent (`rfork launch`). Also as process 1 of a container; but only the engine
itself is waited for, and not what it leaves behind.
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
"""Signals that go on as they came; SIGTERM goes on once the engine is drained."""

Drain = Callable[[threading.Event], None]
"""Returns once the engine may end, or the event is set; on a thread of its own, and raises nothing."""


class _Exited(int):
    """The exit code of the engine."""


class _DrainDone:
    """The engine may end."""


_Event = signal.Signals | _Exited | _DrainDone


def supervise(command: Sequence[str], environment: Mapping[str, str], drain: Drain) -> int:
    """Run the command to its end; returns its exit code, 128 + n where signal n ended it.

    The first SIGTERM begins to `drain`, and goes on to the engine after it; the second goes on at once. Call
    it on the main thread. Raises SettingsError where the command cannot be started.
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
        # In a session of its own: a terminal's Ctrl-C comes here alone, and goes on once.
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
                stop.set()  # what drains ends, and has its say too: a second SIGTERM does no harm
                engine.send_signal(signal.SIGTERM)
    except OSError as error:
        hint = "install the engine in this environment, or give the program's path"
        raise SettingsError(f"cannot start {command[0]}: {error.strerror}", hint=hint) from None
    finally:
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)
