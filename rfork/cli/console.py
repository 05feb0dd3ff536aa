"""Output of all commands: results on stdout, everything else on stderr, one line per error."""

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
from rfork.errors import MissingExtra, RforkError
from rfork.logs import logger
from rfork.settings import InstanceSettings
from rfork.settings.unknown_variables import find_typos

INTERRUPTED: Final = 130
BUG: Final = 1
MAX_WIDTH: Final = 4000
"""Maximum width of a table, in columns, if stdout is not a terminal."""


class Output(Console):
    """A console that survives a closed pipe. Rich's own exits with code 1 when its output is no longer read."""

    def on_broken_pipe(self) -> None:
        """On stderr: be quiet from now on. On stdout: raise BrokenPipeError, which `handle_errors` handles."""
        self.quiet = True
        if not self.stderr:
            raise BrokenPipeError
        _discard_buffer(sys.stderr)


def _discard_buffer(stream: TextIO) -> None:
    """Redirect a closed stream to /dev/null, so that flushing its buffer at exit does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


out = Output(highlight=False, soft_wrap=True)
err = Output(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a JSON document on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def replace_unencodable_output() -> None:
    """Replace characters that stdout or stderr cannot encode by question marks instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def configure_logs(settings: InstanceSettings, *, as_json: bool = False, brief: bool = False) -> None:
    """Log to stderr as configured by the settings; as JSON lines with `as_json`.

    `brief`: for commands that show progress and a result. On a terminal, log only warnings, unless
    RFORK_LOG_LEVEL is set.
    """
    warnings_only = brief and err.is_terminal and "log_level" not in settings.model_fields_set
    level = "warning" if warnings_only else settings.log_level
    logs.configure(json=settings.log_json or as_json, level=level, stream=cast(TextIO, _Stderr()))


def log_misspelt_variables() -> None:
    """Log a warning for each environment variable that is probably a misspelt setting: it has no effect."""
    for name, likely in find_typos().items():
        logger(__name__).warning("unknown variable ignored", variable=name, hint=f"did you mean {likely}?")


class _Stderr:
    """The current sys.stderr, looked up for each write: a progress bar replaces it temporarily."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


@contextlib.contextmanager
def handle_errors(*, as_json: bool = False) -> Iterator[None]:
    """Exit with one clear line and the error's exit code; never with a traceback.

    SIGTERM is handled like Ctrl-C, so that leases are released. If the output is no longer read, exit
    silently.
    """
    interrupted = False

    def interrupt(number: int, frame: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # shells ignore it for background processes
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
    except Exception as error:  # a bug: users should not see a traceback
        if interrupted:  # or an interrupted wait of Python, which may fail this way
            _leave_interrupted()
        _report_bug(error, as_json=as_json)
        raise typer.Exit(BUG) from None


@contextlib.contextmanager
def requires_extra(what: str, extra: str) -> Iterator[None]:
    """Import inside this block what needs an extra of rfork. Raises MissingExtra if a package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(("rfork.", "planner.")):  # a bug
            raise
        raise MissingExtra(what, extra=extra, reason=f"{error.name} is not installed") from None


def _leave_interrupted() -> NoReturn:
    err.print("interrupted")
    raise typer.Exit(INTERRUPTED) from None


def _report_bug(error: Exception, *, as_json: bool) -> None:
    error_text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    message = f"unexpected error: {error_text}"
    hint = "this is a bug in rfork: report it, with the output under RFORK_LOG_LEVEL=debug"
    if as_json:
        print_json({"error": type(error).__name__, "fault": "rfork", "message": message, "hint": hint})
    err.print(f"[bold red]error:[/] {escaped(message)}")
    if _debugging():
        err.print("".join(traceback.format_exception(error)), markup=False)
    else:
        err.print(f"[bold]hint:[/] {escaped(hint)}")


def _debugging() -> bool:
    """Return whether debug output is enabled (RFORK_LOG_LEVEL)."""
    try:
        return options.load(InstanceSettings).log_level == "debug"
    except RforkError:
        return False


def escaped(text: str) -> str:
    """Escape rich markup in a text."""
    return text.replace("[", r"\[")


def print_renderable(renderable: ConsoleRenderable) -> None:
    """Print a renderable on stdout, as wide as the terminal, or as wide as needed without one."""
    if out.is_terminal:
        out.print(renderable, soft_wrap=False)
        return
    needed = Measurement.get(out, out.options.update(max_width=MAX_WIDTH), renderable).maximum
    console = Output(file=cast(TextIO, out.file), width=max(1, needed), highlight=False, no_color=True)
    console.print(renderable)


def hard_exit(code: int) -> NoReturn:
    """Exit immediately, without waiting for other threads, after running the exit handlers.

    Generators that an interruption left half open are closed first, unless an error still refers to them. A
    regular exit stops daemon threads when they next acquire the GIL. In a thread that returns from torch,
    this unwinds through C++ and aborts the process (exit code 134).
    """
    gc.collect()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
