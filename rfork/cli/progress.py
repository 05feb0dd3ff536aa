"""Progress of long work on stderr: a bar with rate, time left and sources, or a line now and then."""

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

from rfork.cli import format
from rfork.cli.console import err

NARROW: Final = 110
"""On a terminal of fewer columns the sources are left out, and the bar is short."""
LONG, SHORT = 24, 10
"""Columns of a bar."""
QUARTERS: Final = 4


class _Amount(TextColumn):
    """``120.0 MB of 269.0 MB, 30.0 MB/s, 4.97 s left``, as far as it is known; of what, unless of bytes."""

    def __init__(self, noun: str) -> None:
        super().__init__("")
        self._noun = noun

    def render(self, task: Task) -> Text:
        parts = [amount(int(task.completed), int(task.total or 0), self._noun)]
        if task.speed:
            parts.append(speed(task.speed, self._noun))
        if task.time_remaining is not None and not task.finished:
            parts.append(f"{format.format_age(task.time_remaining)} left")
        return Text(", ".join(filter(None, parts)), no_wrap=True)


class _ShortBar(BarColumn):
    """A bar that makes room for what stands beside it."""

    def render(self, task: Task) -> ProgressBar:
        self.bar_width = SHORT if err.width < NARROW else LONG
        return super().render(task)


class Bar:
    """Progress of one transfer: a bar on a terminal, a plain line every quarter elsewhere."""

    def __init__(self, what: str, *, noun: str = "", console: Console | None = None) -> None:
        """`what` is done, as ``fork llama``; `noun` is counted, bytes without; `console` (default: stderr)
        shows it.
        """
        self._console = console or err
        self._noun = noun
        self._what = what
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
        self._task = self._progress.add_task(what, total=None, note="")

    def update(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` bytes are there; `note` says what else there is to know, as its sources."""
        note_text = note if self._console.width >= NARROW else ""
        self._progress.update(self._task, completed=done, total=total, note=note_text)
        quarter = done * QUARTERS // total if total else 0
        if not self._console.is_terminal and quarter > self._quarter:
            self._quarter = quarter
            self._console.print(self._line(done, total, note), markup=False)

    def _line(self, done: int, total: int, note: str) -> str:
        passed_s = time.monotonic() - self._began
        line = f"{self._what}: {amount(done, total, self._noun)}"
        if passed_s > 0:
            line += f", {speed(done / passed_s, self._noun)}"
            if done < total:
                line += f", {format.duration(passed_s * (total - done) / done)} left"
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
    """``30.00 MB/s``, ``1,290 tensors/s``."""
    return f"{per_s:,.0f} {noun}/s" if noun else format.rate(per_s)


def amount(done: int, total: int, noun: str = "") -> str:
    """``120.0 MB of 269.0 MB``, ``132 of 272 tensors``; empty while nothing is known."""
    if not done and not total:
        return ""
    if noun:
        return f"{done:,} of {total:,} {noun}" if total else f"{done:,} {noun}"
    return f"{format.size(done)} of {format.size(total)}" if total else format.size(done)


def sources_note(sources: dict[str, int]) -> str:
    """Who gives, most first: ``from 1f3a9c2e and 2 others``."""
    names = [format.format_source(name) for name, _ in sorted(sources.items(), key=lambda item: -item[1])]
    if not names:
        return ""
    others = f" and {format.plural(len(names) - 1, 'other')}" if len(names) > 1 else ""
    return f"from {names[0]}{others}"


class Spinner:
    """A wait for something: on a terminal one line that is kept up to date, elsewhere a line each change."""

    def __init__(self, max_s: float, *, console: Console | None = None) -> None:
        """It ends after `max_s` seconds at the latest."""
        self._console = console or err
        self._max_s = max_s
        self._began = time.monotonic()
        self._message = ""
        self._status = self._console.status("") if self._console.is_terminal else None
        self._is_displayed = False

    def set_message(self, why: str) -> None:
        """What is waited for now."""
        if self._status is None:
            if why != self._message:
                self._message = why
                self._console.print(f"waiting: {why}", markup=False)
            return
        left_s = max(0.0, self._max_s - (time.monotonic() - self._began))
        self._status.update(Text(f"waiting: {why} (at most {left_s:.0f} s more)"))
        if not self._is_displayed:
            self._is_displayed = True
            self._status.start()

    def close(self) -> None:
        """Take the line away."""
        if self._status is not None:
            self._status.stop()


@contextmanager
def spinner(max_s: float) -> Iterator[Spinner]:
    """A wait of at most so many seconds; nothing of it is left on the terminal."""
    wait = Spinner(max_s)
    try:
        yield wait
    finally:
        wait.close()
