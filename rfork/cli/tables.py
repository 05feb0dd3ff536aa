"""Tables without lines that fit any width: columns are first shortened, then omitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

GAP: Final = 2
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
    """A table that adapts to the width of the console."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield table(self.columns, self.rows, options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, table(self.columns, self.rows, None))


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None) -> Table:
    """Return a table with one line per row, at most `width` columns wide (None: as wide as needed).

    Cells are plain text, not markup. Empty columns are omitted.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    natural = [max((row[at].cell_len for row in texts), default=0) for at in range(len(columns))]
    visible_columns = [at for at, size in enumerate(natural) if size]
    full = {at: max(natural[at], len(columns[at].heading)) for at in visible_columns}
    widths = full if width is None else _fitted(columns, full, width)
    built = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for at, size in widths.items():
        column = columns[at]
        built.add_column(
            column.heading,
            justify="right" if column.right else "left",
            width=size,
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in texts:
        built.add_row(*(row[at] for at in widths))
    return built


def _fitted(columns: Sequence[Column], full: dict[int, int], width: int) -> dict[int, int]:
    """Return the width of each visible column; the widest are shortened first."""
    widths = dict(full)
    while widths:
        min_width = {at: min(size, columns[at].min_width or size) for at, size in widths.items()}
        gaps = GAP * (len(widths) - 1)
        if sum(min_width.values()) + gaps <= width:
            break
        priority = max(widths, key=lambda at: (columns[at].priority, at))
        if not columns[priority].priority:
            return min_width  # rich truncates what still does not fit
        del widths[priority]
    excess = sum(widths.values()) + GAP * (len(widths) - 1) - width
    while excess > 0:
        cuttable = [at for at, size in widths.items() if size > min_width[at]]
        widest = max(cuttable, key=lambda at: widths[at])
        widths[widest] -= 1
        excess -= 1
    return widths


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)
