"""Output of all commands: results on stdout; progress, warnings and errors on stderr, one line per error.

Every command prints through this module: lines, JSON, tables, progress bars and errors. Text is never interpreted as
markup; colours come from `rich.text.Text`, and rich omits them in pipes and with NO_COLOR. Rich is a dependency of
Typer, so that using it adds nothing to the base install.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NoReturn, TextIO, cast

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from rfork import logs
from rfork import settings as options
from rfork.cli import formatters
from rfork.errors import MissingExtra, RforkError
from rfork.logs import logger
from rfork.schema import ForkProgress
from rfork.settings import InstanceSettings, find_typos

INTERRUPTED: Final = 130
BUG: Final = 1
MAX_WIDTH: Final = 4000
"""Maximum width of a table, in columns, if stdout is not a terminal."""
GAP: Final = 2
"""Spaces between the columns of a table."""
NARROW_WIDTH: Final = 110
"""On a narrower terminal, progress omits sources and its bar is short."""
LONG_BAR_WIDTH, SHORT_BAR_WIDTH = 24, 10
"""In columns."""
QUARTERS: Final = 4


# -- streams --------------------------------------------------------------------------------------------------


class Output(Console):
    """A console that prints plain text and survives a closed pipe. Rich's own exits with code 1 if it is closed."""

    def __init__(
        self, *, stderr: bool = False, soft_wrap: bool = True, file: TextIO | None = None, width: int | None = None
    ) -> None:
        """`soft_wrap`: leave the wrapping of long lines to the terminal."""
        super().__init__(
            stderr=stderr, soft_wrap=soft_wrap, file=file, width=width, markup=False, emoji=False, highlight=False
        )

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


out = Output()
err = Output(stderr=True)


def print_json(value: object) -> None:
    """Print a JSON document on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def print_result(result: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print the result of a command: as JSON, or as text."""
    if as_json:
        print_json(result)
    else:
        out.print(text)


def print_renderable(renderable: ConsoleRenderable) -> None:
    """Print a renderable on stdout, as wide as the terminal, or as wide as needed without one."""
    if out.is_terminal:
        out.print(renderable, soft_wrap=False)
        return
    needed = Measurement.get(out, out.options.update(max_width=MAX_WIDTH), renderable).maximum
    Output(soft_wrap=False, file=cast(TextIO, out.file), width=max(1, needed)).print(renderable)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    err.print(Text.assemble(("warning: ", "yellow"), text))


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


# -- errors and exits -----------------------------------------------------------------------------------------


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
        _print_error(error.kind, error.fault, str(error), error.hint, as_json=as_json)
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


def _print_error(kind: str, fault: str, message: str, hint: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"error": kind, "fault": fault, "message": message, "hint": hint})
    err.print(Text.assemble(("error: ", "bold red"), message))
    if hint:
        err.print(Text.assemble(("hint: ", "bold"), hint))


def _leave_interrupted() -> NoReturn:
    err.print("interrupted")
    raise typer.Exit(INTERRUPTED) from None


def _report_bug(error: Exception, *, as_json: bool) -> None:
    name = type(error).__name__
    message = f"unexpected error: {name}: {' '.join(str(error).split())}"
    hint = "this is a bug in rfork: report it, with the output under RFORK_LOG_LEVEL=debug"
    _print_error(name, "rfork", message, hint, as_json=as_json)
    if _debugging():
        err.print("".join(traceback.format_exception(error)))


def _debugging() -> bool:
    """Return whether debug output is enabled (RFORK_LOG_LEVEL)."""
    try:
        return options.load(InstanceSettings).log_level == "debug"
    except RforkError:
        return False


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


# -- tables ---------------------------------------------------------------------------------------------------

Cell = str | Text


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    It can be shortened to `min_width` characters; 0: never. If the table still does not fit, the column with the
    highest `priority` is omitted first; 0: never.
    """

    heading: str
    right: bool = False
    min_width: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table without lines that fits any width, with one line per row: columns are first shortened, then omitted.

    Cells are plain text, not markup. Empty columns are omitted.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(MAX_WIDTH))

    def _table(self, width: int) -> Table:
        texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in self.rows]
        full = {}
        for at, column in enumerate(self.columns):
            if max_len := max((row[at].cell_len for row in texts), default=0):
                full[at] = max(max_len, len(column.heading))
        widths = self._fitted(full, width)
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
        for at, size in widths.items():
            column = self.columns[at]
            table.add_column(
                column.heading,
                justify="right" if column.right else "left",
                width=size,
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in texts:
            table.add_row(*(row[at] for at in widths))
        return table

    def _fitted(self, full: Mapping[int, int], width: int) -> dict[int, int]:
        """Return the width of each visible column; the widest are shortened first."""
        widths = dict(full)
        while widths:
            min_width = {at: min(size, self.columns[at].min_width or size) for at, size in widths.items()}
            if sum(min_width.values()) + GAP * (len(widths) - 1) <= width:
                break
            omitted = max(widths, key=lambda at: (self.columns[at].priority, at))
            if not self.columns[omitted].priority:
                return min_width  # rich truncates what still does not fit
            del widths[omitted]
        excess = sum(widths.values()) + GAP * (len(widths) - 1) - width
        for _ in range(excess):
            widest = max((at for at, size in widths.items() if size > min_width[at]), key=lambda at: widths[at])
            widths[widest] -= 1
        return widths


# -- progress -------------------------------------------------------------------------------------------------


class Bar:
    """Progress of an operation that moves bytes, on stderr: a bar on a terminal, otherwise a line per quarter."""

    def __init__(self, title: str, *, console: Console = err) -> None:
        """`title`: the operation, such as ``fork llama``."""
        self._console = console
        self._title = title
        self._quarter = 0
        self._began = time.monotonic()
        is_narrow = self._console.width < NARROW_WIDTH
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(SHORT_BAR_WIDTH if is_narrow else LONG_BAR_WIDTH),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            *([] if is_narrow else [TextColumn("{task.fields[note]}", markup=False, style="dim")]),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=None, note="")

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`, with an optional note such as the sources."""
        self._progress.update(self._task, completed=done, total=total or None, note=note)
        quarter = done * QUARTERS // total if total else 0
        if not self._console.is_terminal and quarter > self._quarter:
            self._quarter = quarter
            self._console.print(self._line(done, total, note), markup=False)

    def add(self, count: int, total: int) -> None:
        """Count `count` more of `total`."""
        self.update(int(self._progress.tasks[0].completed) + count, total)

    def show_fork(self, progress: ForkProgress, image_bytes: int) -> None:
        """Show the progress of a transfer from other instances."""
        self.update(min(progress.bytes_read, image_bytes), image_bytes, formatters.sources_note(progress.sources))

    def _line(self, done: int, total: int, note: str) -> str:
        elapsed_s = time.monotonic() - self._began
        line = f"{self._title}: {formatters.size(done)} of {formatters.size(total)}"
        if elapsed_s > 0:
            line += f", {formatters.rate(done / elapsed_s)}"
            if done < total:
                line += f", {formatters.duration(elapsed_s * (total - done) / done)} left"
        return f"{line}, {note}" if note else line

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


@contextlib.contextmanager
def waiting(max_s: float) -> Iterator[Callable[[str], None]]:
    """Show what a command waits for, at most `max_s` seconds: call the yielded function with each new state.

    A terminal has one line that is removed afterwards; otherwise each change is a line.
    """
    began, last = time.monotonic(), ""

    def show(message: str) -> None:
        nonlocal last
        if err.is_terminal:
            left_s = max(0.0, max_s - (time.monotonic() - began))
            status.update(Text(f"waiting: {message} (at most {left_s:.0f} s more)"))
            status.start()
        elif message != last:
            err.print(f"waiting: {message}")
        last = message

    status = err.status("")
    try:
        yield show
    finally:
        status.stop()


@contextlib.contextmanager
def transformers_loads(title: str) -> Iterator[None]:
    """Show that transformers loads a model: by its own bar on a terminal, otherwise by a line with the title."""
    if not err.is_terminal:
        err.print(title)
    with transformers_bars(enabled=err.is_terminal):
        yield


@contextlib.contextmanager
def transformers_bars(*, enabled: bool) -> Iterator[None]:
    """Enable or disable the progress bars of transformers inside the block."""
    from transformers.utils import logging

    switches: dict[bool, Callable[[], None]] = {
        True: logging.enable_progress_bar,
        False: logging.disable_progress_bar,
    }
    before = logging.is_progress_bar_enabled()
    switches[enabled]()
    try:
        yield
    finally:
        switches[before]()
