"""Formatting of sizes, rates, times and names, and the layout of tables and progress bars."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rfork.cli import format
from rfork.cli.progress import Bar, amount, sources_note, speed
from rfork.cli.tables import Column, FittedTable


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ("0 B", format.size(0)),
        ("999 B", format.size(999)),
        ("1.50 kB", format.size(1500)),
        ("269.0 MB", format.size(269_030_272)),
        ("15.20 GB", format.size(15.2e9)),
        ("1.40 TB", format.size(1.4e12)),
        ("1.25 GB/s", format.rate(1.25e9)),
        ("0.42 s", format.duration(0.42)),
        ("12.3 s", format.duration(12.3)),
        ("3 min 20 s", format.duration(200)),
        ("2 h 05 min", format.duration(7500)),
        ("3 days", format.duration(86_400 * 3.2)),
        ("-1.50 s", format.duration(-1.5)),
        ("12 s", format.format_age(12.4)),
        ("4 min", format.format_age(240)),
        ("3 h", format.format_age(10_800)),
        ("5 days", format.format_age(86_400 * 5)),
        ("aaaaaaaa", format.short("a" * 32)),
        ("llama-7c9f-main-tp0", format.short("llama-7c9f-main-tp0")),
        ("snapshot:s3://m/", format.format_source("snapshot:s3://m/")),
        ("-", format.rank("main-tp0of1-pp0of1-ep0of1")),
        ("speculative tp 3/8 pp 1/2", format.rank("speculative-tp3of8-pp1of2-ep0of1")),
        ("something else", format.rank("something else")),
        ("1 fork", format.plural(1, "fork")),
        ("1,000 forks", format.plural(1000, "fork")),
        ("120.0 MB of 269.0 MB", amount(120_000_000, 269_000_000)),
        ("132 of 272 tensors", amount(132, 272, "tensors")),
        ("", amount(0, 0)),
        ("1,290 tensors/s", speed(1290.4, "tensors")),
        ("", sources_note({})),
        ("from bbbbbbbb and 2 others", sources_note({"a" * 32: 1, "b" * 32: 3, "c": 2})),
    ],
)
def test_formats(expected: str, actual: str) -> None:
    """Each value is formatted as expected."""
    assert expected == actual


COLUMNS = (Column("name", min_width=6), Column("size", right=True), Column("reason", min_width=4, priority=1))
ROWS = [("a-long-name", "1.00 GB", "a short reason"), ("b", "12 B", "")]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (60, ["name            size  reason", "a-long-name  1.00 GB  a short reason", "b               12 B"]),
        (30, ["name          size  reason", "a-long-n…  1.00 GB  a short r…", "b             12 B"]),
        (20, ["name            size", "a-long-name  1.00 GB", "b               12 B"]),
        (16, ["name        size", "a-long…  1.00 GB", "b           12 B"]),
        (12, ["name    size", "a-l…  1.00 …", "b       12 B"]),
    ],
)
def test_tables_fit_the_width(width: int, lines: list[str]) -> None:
    """The widest columns are shortened first, then low-priority columns are omitted; each row stays on one line."""
    assert lines == [line.rstrip() for line in drawn(FittedTable(COLUMNS, ROWS), width)]


def test_empty_columns_are_omitted() -> None:
    """A column without content in any row is not shown."""
    assert ["name", "b"] == [line.rstrip() for line in drawn(FittedTable(COLUMNS, [("b", "", "")]), 60)]


def test_cells_are_plain_text() -> None:
    """Markup in names is not interpreted."""
    assert "[red]x[/]" in drawn(FittedTable((Column("name"),), [("[red]x[/]",)]), 60)[1]


def test_progress_without_a_terminal_is_a_line_per_quarter() -> None:
    """A log has four lines per transfer, however many updates, with rate, time left and sources."""
    console = Console(file=io.StringIO(), width=200)
    with Bar("fork llama", console=console) as bar:
        for done in range(0, 101, 5):
            bar.update(done * 1000, 100_000, "from a")
    lines = written(console).splitlines()
    assert ["25.00 kB", "50.00 kB", "75.00 kB", "100.0 kB"] == [line[12:].split(" of ")[0] for line in lines]
    assert [True, True, True, False] == [" left, from a" in line for line in lines]


def drawn(what: FittedTable, width: int) -> list[str]:
    """Return the lines of a table on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return written(console).splitlines()


def written(console: Console) -> str:
    """Return what was printed on the console."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
