"""The command `rfork top`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Annotated, Final

import typer
from rich.live import Live

from rfork import settings as options
from rfork.cli.completion import complete_model
from rfork.cli.console import Output, handle_errors, out, print_json, print_renderable
from rfork.cli.options import JsonOption, PlannerOption
from rfork.cli.top.keys import keys, suspensions
from rfork.cli.top.overview import overview
from rfork.cli.top.poller import BackgroundPoller, FleetPoller, FleetSample, pause_after
from rfork.cli.top.render import Screen
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings

ESCAPE: Final = "\x1b"
QUIT_KEYS: Final = ("q", "Q", ESCAPE, "\x04")
"""Keys that quit: q, Escape, Ctrl-D."""
KEY_INTERVAL_S: Final = 0.25
"""Maximum wait for a key, and so the interval between redraws."""
SCREEN_HEIGHT: Final = 200
"""Height of the screen without a terminal."""


def top(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Show only this model.", autocompletion=complete_model),
    ] = None,
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
    with (
        handle_errors(as_json=as_json),
        PlannerClient.of(options.load(InstanceSettings, planner=planner)) as client,
    ):
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
        **overview(sample.fleet).to_dict(),
    }


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


def _live(url: str, poller: BackgroundPoller) -> None:
    console = Output(highlight=False)

    def screen() -> Screen:
        return Screen(poller.latest, url, time.time(), keys=True)

    try:
        with suspensions() as suspension:
            while True:
                live = Live(screen(), console=console, screen=True, auto_refresh=False)
                with keys() as keyboard, _live_screen(live):
                    while not suspension.suspend_requested:
                        if is_quit_key(keyboard.read(KEY_INTERVAL_S)):
                            return
                        live.update(screen(), refresh=True)
                # The terminal is restored here, so the shell can continue.
                suspension.suspend()
    except KeyboardInterrupt:
        pass  # quits like q
    finally:
        poller.stop()
