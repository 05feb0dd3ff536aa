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
QUIT: Final = ("q", "Q", ESCAPE, "\x04")
"""Keys that end it: q, Escape, Ctrl-D."""
KEY_S: Final = 0.25
"""How long one wait for a key takes: the picture is drawn anew this often."""
LINES: Final = 200
"""The height of a picture that no terminal bounds."""


def top(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Only what is about this model.", autocompletion=complete_model),
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="How often to look.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print it, and end.")] = False,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the fleet live: forks under way, instances in trouble, who gives, what ended and why. q quits.

    Where stdout is no terminal it looks once. With --json it prints one line of JSON a look until it is
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
            print_renderable(Screen(first, client.url, time.time(), height=LINES))
        else:
            _live(client.url, BackgroundPoller(poller, first, interval))


def _stream(url: str, poller: FleetPoller, sample: FleetSample, interval_s: float, *, once: bool) -> None:
    while True:
        began = time.monotonic()
        print_json(line_of(sample, url))
        if once:
            return
        time.sleep(pause_after(time.monotonic() - began, interval_s))
        sample = poller.poll()


def line_of(sample: FleetSample, url: str) -> dict[str, object]:
    """One look as JSON; `error` is null unless the planner is gone: then the rest is what was seen last."""
    return {
        "at": round(sample.at, 3),
        "planner": url,
        "error": sample.error or None,
        **overview(sample.fleet).to_dict(),
    }


def is_quit_key(typed: str) -> bool:
    """Whether one of the keys is among what was typed; an arrow's begins with Escape, and does not quit."""
    return typed in QUIT or any(key in QUIT for key in typed if not typed.startswith(ESCAPE))


@contextlib.contextmanager
def _live_screen(live: Live) -> Iterator[None]:
    """As `with live` does, which leaves the terminal's other screen on where its start is interrupted."""
    try:
        live.start(refresh=True)
        yield
    finally:
        live.stop()


def _live(url: str, watch: BackgroundPoller) -> None:
    console = Output(highlight=False)

    def screen() -> Screen:
        return Screen(watch.poll, url, time.time(), keys=True)

    try:
        with suspensions() as suspension:
            while True:
                live = Live(screen(), console=console, screen=True, auto_refresh=False)
                with keys() as pressed, _live_screen(live):
                    while not suspension.suspend_requested:
                        if is_quit_key(pressed.pressed(KEY_S)):
                            return
                        live.update(screen(), refresh=True)
                # The terminal is as it was found, for the shell to go on with.
                suspension.suspend()
    except KeyboardInterrupt:
        pass  # the way to leave, beside q
    finally:
        watch.stop()
