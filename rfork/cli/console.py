"""How every command speaks: results on stdout, everything else on stderr, one line an error."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from rfork.errors import RforkError

INTERRUPTED = 130

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON document on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def reported(*, as_json: bool = False) -> Iterator[None]:
    """End the command with one clear line and the error's exit code; never a traceback.

    SIGTERM ends it as Ctrl-C does, so that leases are given back.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except RforkError as error:
        if as_json:
            print_json({"error": error.kind, "fault": error.fault, "message": str(error), "hint": error.hint})
        err.print(f"[bold red]error:[/] {escaped(str(error))}")
        if error.hint:
            err.print(f"[bold]hint:[/] {escaped(error.hint)}")
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        err.print("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def escaped(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", r"\[")


class Bar:
    """Progress of one transfer: a bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._task = self._progress.add_task(what, total=None)

    def update(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` bytes are there."""
        self._progress.update(
            self._task, completed=done, total=total, description=f"{self._what} {note}".strip()
        )
        quarter = done * 4 // total if total else 0
        if not err.is_terminal and quarter > self._told:
            self._told = quarter
            err.print(f"{self._what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB {note}".rstrip())

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def wait_for_signal() -> None:
    """Block until SIGINT or SIGTERM; the second one while closing ends the process at once."""
    stopped = threading.Event()

    def stop(number: int, frame: object) -> None:
        stopped.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    # An untimed wait would keep Python from running the handler on some platforms.
    while not stopped.wait(3600):
        pass
