"""`rfork top`: a live view of the fleet. Polls the planner, draws `top_screen`, and reads single keys."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from typing import Annotated, Final

import typer
from rich.live import Live

from rfork.cli.console import Output, handle_errors, out, print_json, print_renderable
from rfork.cli.fleet_queries import FleetState
from rfork.cli.options import JsonOption, ModelFilterOption, PlannerOption, planner_client
from rfork.cli.top_screen import FleetSample, Overview, Screen
from rfork.errors import PlannerRejected, PlannerUnreachable, RforkError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo

ESCAPE: Final = "\x1b"
QUIT_KEYS: Final = ("q", "Q", ESCAPE, "\x04")
"""Keys that quit: q, Escape, Ctrl-D."""
KEY_INTERVAL_S: Final = 0.25
"""Maximum wait for a key, and so the interval between redraws."""
MAX_KEY_BYTES: Final = 64
SCREEN_HEIGHT: Final = 200
"""Height of the screen without a terminal."""
MAX_FINISHED_AGE_S: Final = 10.0
"""Finished forks are requested at least this often: a fork may start and finish between two polls."""
PAUSE_FACTOR: Final = 4.0
"""Minimum pause after a poll, as a multiple of its duration, to limit the load on the planner."""


def top(
    model: ModelFilterOption = None,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Seconds between polls.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the current state once and exit.")] = False,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the fleet live: running forks, problems, sources, and finished forks with errors. Press q to quit.

    If stdout is not a terminal, the state is printed once. With --json, prints one JSON line per poll until
    interrupted (with --once: one line).
    """
    with handle_errors(as_json=as_json), planner_client(planner) as client:
        poller = FleetPoller(client, model)
        first = poller.poll()
        if as_json:
            _stream(client.url, poller, first, interval, once=once)
        elif once or not out.is_terminal or out.is_dumb_terminal:
            print_renderable(Screen(first, client.url, time.time(), height=SCREEN_HEIGHT))
        else:
            _live(client.url, BackgroundPoller(poller, first, interval))


def _stream(url: str, poller: FleetPoller, sample: FleetSample, interval_s: float, *, once: bool) -> None:
    while True:
        began = time.monotonic()
        print_json(sample_to_dict(sample, url))
        if once:
            return
        time.sleep(pause_after(time.monotonic() - began, interval_s))
        sample = poller.poll()


def sample_to_dict(sample: FleetSample, url: str) -> dict[str, object]:
    """Return a sample for JSON. If `error` is set, the planner is unreachable and the rest is the last known state."""
    return {
        "at": round(sample.at, 3),
        "planner": url,
        "error": sample.error or None,
        **Overview(sample.fleet).to_dict(),
    }


# -- polling --------------------------------------------------------------------------------------------------


class FleetPoller:
    """Polls one planner, for all models or for one. Not thread-safe.

    Finished forks are requested only if one finished.
    """

    def __init__(self, client: PlannerClient, model: str | None = None, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._model = model
        self._clock = clock
        self._last: FleetSample | None = None
        self._running_ids: frozenset[str] = frozenset()
        self._finished: tuple[ForkInfo, ...] = ()
        self._finished_at = float("-inf")

    def poll(self) -> FleetSample:
        """Return the current state. If the planner became unreachable, return the last state with the error.

        Raises PlannerUnreachable and PlannerRejected at the first poll, and PlannerRejected for a rejected
        token.
        """
        try:
            sample = FleetSample(self._fleet(), self._clock())
        except (PlannerUnreachable, PlannerRejected) as error:
            is_final = isinstance(error, PlannerRejected) and error.status < 500 and error.status != 429
            if self._last is None or is_final:
                raise
            since = self._last.away_since
            sample = FleetSample(self._last.fleet, self._last.at, str(error), self._clock() if since is None else since)
        self._last = sample
        return sample

    def _fleet(self) -> FleetState:
        client, model = self._client, self._model
        running = [*client.forks(model=model, state="planning"), *client.forks(model=model, state="running")]
        running_ids = frozenset(fork.fork_id for fork in running)
        now = self._clock()
        if self._running_ids - running_ids or now - self._finished_at >= MAX_FINISHED_AGE_S:
            self._finished = (*client.forks(model=model, state="finished"), *client.forks(model=model, state="failed"))
            self._finished_at = now
        self._running_ids = running_ids
        # Finished forks have become older since they were requested.
        elapsed_s = now - self._finished_at
        finished = (
            fork.model_copy(update={"age_s": fork.age_s + elapsed_s}) if elapsed_s else fork
            for fork in self._finished
            if fork.fork_id not in running_ids
        )
        rows = tuple(row for row in client.models() if model in (None, row.model))
        return FleetState(rows, tuple(client.instances(model=model)), (*running, *finished))


class BackgroundPoller:
    """Polls repeatedly on another thread, so that keys work while the planner does not respond."""

    def __init__(self, poller: FleetPoller, first: FleetSample, interval_s: float) -> None:
        self._poller = poller
        self._interval_s = interval_s
        self._sample = first
        self._failure: RforkError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-top", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> FleetSample:
        """The latest sample. Raises the error that ended polling."""
        if self._failure is not None:
            raise self._failure
        return self._sample

    def stop(self) -> None:
        """Stop polling; a request in progress is not interrupted."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            began = time.monotonic()
            try:
                self._sample = self._poller.poll()
            except RforkError as error:
                self._failure = error
                return
            pause_s = pause_after(time.monotonic() - began, self._interval_s)


def pause_after(elapsed_s: float, interval_s: float) -> float:
    """Return the seconds until the next poll, after one that took `elapsed_s`."""
    return max(interval_s - elapsed_s, PAUSE_FACTOR * elapsed_s)


# -- the terminal ---------------------------------------------------------------------------------------------


def _live(url: str, poller: BackgroundPoller) -> None:
    console = Output(soft_wrap=False)

    def screen() -> Screen:
        return Screen(poller.latest, url, time.time(), keys=True)

    try:
        with _suspensions() as suspension:
            while True:
                live = Live(screen(), console=console, screen=True, auto_refresh=False)
                with _keys() as read_keys, _live_screen(live):
                    while not suspension.is_requested:
                        if is_quit_key(read_keys(KEY_INTERVAL_S)):
                            return
                        live.update(screen(), refresh=True)
                # The terminal is restored here, so the shell can continue.
                suspension.suspend()
    except KeyboardInterrupt:
        pass  # quits like q
    finally:
        poller.stop()


def is_quit_key(keys_read: str) -> bool:
    """Return whether a quit key was pressed; arrow keys, which begin with Escape, do not quit."""
    return keys_read in QUIT_KEYS or any(key in QUIT_KEYS for key in keys_read if not keys_read.startswith(ESCAPE))


@contextlib.contextmanager
def _live_screen(live: Live) -> Iterator[None]:
    """Like `with live`, but also restores the screen if the start is interrupted."""
    try:
        live.start(refresh=True)
        yield
    finally:
        live.stop()


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys without echo inside the block. Ctrl-C still interrupts.

    The yielded function returns the keys pressed within so many seconds. Without a terminal on stdin it only waits.
    """
    descriptors = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def read(within_s: float) -> str:
        ready, _, _ = select.select(descriptors, [], [], within_s)
        typed = os.read(ready[0], MAX_KEY_BYTES) if ready else b""
        if ready and not typed:  # the terminal was closed
            descriptors.clear()
        return typed.decode(errors="replace")

    if not descriptors:
        yield read
        return
    terminal = descriptors[0]
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield read
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class _Suspension:
    """Records Ctrl-Z until the terminal is restored."""

    is_requested = False

    def request(self, number: int, frame: object) -> None:
        """Handle SIGTSTP."""
        self.is_requested = True

    def suspend(self) -> None:
        """Suspend this process, as the shell expects; return when it continues."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self.request)
        self.is_requested = False


@contextlib.contextmanager
def _suspensions() -> Iterator[_Suspension]:
    """Handle Ctrl-Z inside the block. Without job control, SIGTSTP is ignored and stays so."""
    suspension = _Suspension()
    before = signal.getsignal(signal.SIGTSTP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, suspension.request)
    try:
        yield suspension
    finally:
        signal.signal(signal.SIGTSTP, before)
