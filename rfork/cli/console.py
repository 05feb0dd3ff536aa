"""How every command speaks: results on stdout, everything else on stderr, one line an error."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Final, NoReturn, TextIO, cast

import typer
from rich.console import Console, ConsoleRenderable
from rich.measure import Measurement

from rfork import logs
from rfork import settings as options
from rfork.errors import RforkError
from rfork.settings import InstanceSettings, PlannerSettings

INTERRUPTED: Final = 130
BUG: Final = 1
MAX_WIDTH: Final = 4000
"""Columns that a table may take where no terminal's width binds it."""

LogSettings = InstanceSettings | PlannerSettings


class Output(Console):
    """A console of ours. Rich's own ends the process with 1 as soon as nobody reads its output any more."""

    def on_broken_pipe(self) -> None:
        """On stderr: say nothing more, and go on. On stdout: raise BrokenPipeError; see `handle_errors`."""
        self.quiet = True
        if not self.stderr:
            raise BrokenPipeError
        _discard_buffer(sys.stderr)


def _discard_buffer(stream: TextIO) -> None:
    """Nobody reads it: what is still in its buffer would fail once more when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


out = Output(highlight=False, soft_wrap=True)
err = Output(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON document on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def replace_unencodable_output() -> None:
    """A character that stdout or stderr cannot write becomes a question mark: no reason to end a command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def configure_logs(settings: LogSettings, *, as_json: bool = False, brief: bool = False) -> None:
    """Log to stderr as the settings say; JSON lines with `as_json`.

    `brief`: a command that shows its progress and its result: on a terminal it tells warnings alone, unless
    RFORK_LOG_LEVEL is set.
    """
    unasked = brief and err.is_terminal and "log_level" not in settings.model_fields_set
    level = "warning" if unasked else settings.log_level
    logs.configure(json=settings.log_json or as_json, level=level, stream=cast(TextIO, _Stderr()))


class _Stderr:
    """Standard error as it is when something is written: a progress bar puts itself in its place."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


@contextlib.contextmanager
def handle_errors(*, as_json: bool = False) -> Iterator[None]:
    """End the command with one clear line and the error's exit code; never a traceback.

    SIGTERM ends it as Ctrl-C does, so that leases are given back. Where nobody reads its output any more, it
    ends without a word.
    """
    interrupted = False

    def interrupt(number: int, frame: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as a shell has it for what runs in the background
        signal.signal(signal.SIGINT, interrupt)
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
        _leave_interrupted()
    except BrokenPipeError:
        _discard_buffer(sys.stdout)
        raise typer.Exit(0) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:  # a bug, which no user is to read a traceback of
        if interrupted:  # or a wait of Python's, which fails so where it is broken off as it ends
            _leave_interrupted()
        _report_bug(error, as_json=as_json)
        raise typer.Exit(BUG) from None


def _leave_interrupted() -> NoReturn:
    err.print("interrupted")
    raise typer.Exit(INTERRUPTED) from None


def _report_bug(error: Exception, *, as_json: bool) -> None:
    error_text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    message = f"rfork failed where it should not: {error_text}"
    hint = "set RFORK_LOG_LEVEL=debug to see where, and report it"
    if as_json:
        print_json({"error": type(error).__name__, "fault": "rfork", "message": message, "hint": hint})
    err.print(f"[bold red]error:[/] {escaped(message)}")
    if _debugging():
        err.print("".join(traceback.format_exception(error)), markup=False)
    else:
        err.print(f"[bold]hint:[/] {escaped(hint)}")


def _debugging() -> bool:
    """Whether whoever runs this wants to see everything (RFORK_LOG_LEVEL)."""
    try:
        return options.load(InstanceSettings).log_level == "debug"
    except RforkError:
        return False


def escaped(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", r"\[")


def print_renderable(what: ConsoleRenderable) -> None:
    """Print a table or the like on stdout: as wide as the terminal, or as it needs where there is none."""
    if out.is_terminal:
        out.print(what, soft_wrap=False)
        return
    needed = Measurement.get(out, out.options.update(max_width=MAX_WIDTH), what).maximum
    console = Output(file=cast(TextIO, out.file), width=max(1, needed), highlight=False, no_color=True)
    console.print(what)


def hard_exit(code: int) -> NoReturn:
    """End the process now, though threads are in the middle of something: after what is to be done at exit.

    What an interruption left open amid its opening is closed before, unless somebody still holds the error.
    Python would end daemon threads where they next ask for its lock. In one that comes back from torch that
    unwinds through C++, which aborts the process (exit code 134, and no word that helps).
    """
    gc.collect()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
