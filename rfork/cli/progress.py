"""Progress of long operations on stderr: a bar with rate, time left and sources, or occasional lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from rfork.cli import formatters
from rfork.cli.console import err

NARROW_WIDTH: Final = 110
"""On a narrower terminal, sources are omitted and the bar is short."""
LONG_BAR_WIDTH, SHORT_BAR_WIDTH = 24, 10
"""In columns."""
QUARTERS: Final = 4


class _Amount(TextColumn):
    """``120.0 MB of 269.0 MB, 30.0 MB/s, 4.97 s left``, as far as known; with a noun unless it counts bytes."""

    def __init__(self, noun: str) -> None:
        super().__init__("")
        self._noun = noun

    def render(self, task: Task) -> Text:
        parts = [amount(int(task.completed), int(task.total or 0), self._noun)]
        if task.speed:
            parts.append(speed(task.speed, self._noun))
        if task.time_remaining is not None and not task.finished:
            parts.append(f"{formatters.age(task.time_remaining)} left")
        return Text(", ".join(filter(None, parts)), no_wrap=True)


class _ShortBar(BarColumn):
    """A bar that is shorter on narrow terminals."""

    def render(self, task: Task) -> ProgressBar:
        self.bar_width = SHORT_BAR_WIDTH if err.width < NARROW_WIDTH else LONG_BAR_WIDTH
        return super().render(task)


class Bar:
    """Progress of one operation: a bar on a terminal, otherwise a line per quarter."""

    def __init__(self, title: str, *, noun: str = "", console: Console | None = None) -> None:
        """`title`: the operation, such as ``fork llama``; `noun`: the counted unit, if not bytes."""
        self._console = console or err
        self._noun = noun
        self._title = title
        self._quarter = 0
        self._began = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            _ShortBar(),
            _Amount(noun),
            TextColumn("{task.fields[note]}", markup=False, style="dim"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=None, note="")

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`, with an optional note such as the sources."""
        note_text = note if self._console.width >= NARROW_WIDTH else ""
        self._progress.update(self._task, completed=done, total=total, note=note_text)
        quarter = done * QUARTERS // total if total else 0
        if not self._console.is_terminal and quarter > self._quarter:
            self._quarter = quarter
            self._console.print(self._line(done, total, note), markup=False)

    def _line(self, done: int, total: int, note: str) -> str:
        elapsed_s = time.monotonic() - self._began
        line = f"{self._title}: {amount(done, total, self._noun)}"
        if elapsed_s > 0:
            line += f", {speed(done / elapsed_s, self._noun)}"
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


def speed(per_s: float, noun: str = "") -> str:
    """Format a speed: ``30.00 MB/s``, ``1,290 tensors/s``."""
    return f"{per_s:,.0f} {noun}/s" if noun else formatters.rate(per_s)


def amount(done: int, total: int, noun: str = "") -> str:
    """Format an amount: ``120.0 MB of 269.0 MB``, ``132 of 272 tensors``; empty if nothing is known."""
    if not done and not total:
        return ""
    if noun:
        return f"{done:,} of {total:,} {noun}" if total else f"{done:,} {noun}"
    return f"{formatters.size(done)} of {formatters.size(total)}" if total else formatters.size(done)


def sources_note(sources: dict[str, int]) -> str:
    """Format the sources, largest first: ``from 1f3a9c2e and 2 others``."""
    names = [formatters.source(name) for name, _ in sorted(sources.items(), key=lambda item: -item[1])]
    if not names:
        return ""
    suffix = f" and {formatters.plural(len(names) - 1, 'other')}" if len(names) > 1 else ""
    return f"from {names[0]}{suffix}"


class Spinner:
    """Shows what the command waits for: one updated line on a terminal, otherwise a line per change."""

    def __init__(self, max_s: float, *, console: Console | None = None) -> None:
        """`max_s`: maximum duration of the wait in seconds."""
        self._console = console or err
        self._max_s = max_s
        self._began = time.monotonic()
        self._message = ""
        self._status = self._console.status("") if self._console.is_terminal else None
        self._is_displayed = False

    def set_message(self, message: str) -> None:
        """Show what the command waits for now."""
        if self._status is None:
            if message != self._message:
                self._message = message
                self._console.print(f"waiting: {message}", markup=False)
            return
        left_s = max(0.0, self._max_s - (time.monotonic() - self._began))
        self._status.update(Text(f"waiting: {message} (at most {left_s:.0f} s more)"))
        if not self._is_displayed:
            self._is_displayed = True
            self._status.start()

    def close(self) -> None:
        """Remove the line."""
        if self._status is not None:
            self._status.stop()


@contextmanager
def spinner(max_s: float) -> Iterator[Spinner]:
    """Show a spinner inside the block; remove it from the terminal afterwards."""
    wait = Spinner(max_s)
    try:
        yield wait
    finally:
        wait.close()
