"""Formatters of values, and the layout of tables and progress bars."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rfork.cli import formatters
from rfork.cli.console import Bar, Column, FittedTable

COLUMNS = (Column("name", min_width=6), Column("size", right=True), Column("reason", min_width=4, priority=1))
ROWS = [("a-long-name", "1.00 GB", "a short reason"), ("b", "12 B", "")]


def rendered_lines(table: FittedTable, width: int) -> list[str]:
    """Return the lines of a table on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return output_of(console).splitlines()


def output_of(console: Console) -> str:
    """Return the text that was printed on a console."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ("0 B", formatters.size(0)),
        ("999 B", formatters.size(999)),
        ("1.50 kB", formatters.size(1500)),
        ("269.0 MB", formatters.size(269_030_272)),
        ("15.20 GB", formatters.size(15.2e9)),
        ("1.40 TB", formatters.size(1.4e12)),
        ("1.25 GB/s", formatters.rate(1.25e9)),
        ("0.42 s", formatters.duration(0.42)),
        ("12.3 s", formatters.duration(12.3)),
        ("3 min 20 s", formatters.duration(200)),
        ("2 h 05 min", formatters.duration(7500)),
        ("3 days", formatters.duration(86_400 * 3.2)),
        ("-1.50 s", formatters.duration(-1.5)),
        ("12 s", formatters.age(12.4)),
        ("4 min", formatters.age(240)),
        ("3 h", formatters.age(10_800)),
        ("5 days", formatters.age(86_400 * 5)),
        ("aaaaaaaa", formatters.short("a" * 32)),
        ("llama-7c9f-main-tp0", formatters.short("llama-7c9f-main-tp0")),
        ("snapshot:s3://m/", formatters.source("snapshot:s3://m/")),
        ("-", formatters.rank("main-tp0of1-pp0of1-ep0of1")),
        ("speculative tp 3/8 pp 1/2", formatters.rank("speculative-tp3of8-pp1of2-ep0of1")),
        ("something else", formatters.rank("something else")),
        ("1 fork", formatters.plural(1, "fork")),
        ("1,000 forks", formatters.plural(1000, "fork")),
        ("", formatters.sources_note({})),
        ("from bbbbbbbb and 2 others", formatters.sources_note({"a" * 32: 1, "b" * 32: 3, "c": 2})),
    ],
)
def test_values_are_formatted_with_units(expected: str, actual: str) -> None:
    """Sizes, rates, times, ids, rank keys and counts are short and have a unit."""
    assert expected == actual


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
    assert lines == [line.rstrip() for line in rendered_lines(FittedTable(COLUMNS, ROWS), width)]


def test_empty_columns_are_omitted() -> None:
    """A column without content in any row is not shown."""
    assert ["name", "b"] == [line.rstrip() for line in rendered_lines(FittedTable(COLUMNS, [("b", "", "")]), 60)]


def test_cells_are_plain_text() -> None:
    """Markup in names is not interpreted."""
    assert "[red]x[/]" in rendered_lines(FittedTable((Column("name"),), [("[red]x[/]",)]), 60)[1]


def test_progress_without_a_terminal_is_a_line_per_quarter() -> None:
    """A log has four lines per transfer, however many updates, with rate, time left and sources."""
    console = Console(file=io.StringIO(), width=200)
    with Bar("fork llama", console=console) as bar:
        for done in range(0, 101, 5):
            bar.update(done * 1000, 100_000, "from a")
    lines = output_of(console).splitlines()
    assert ["25.00 kB", "50.00 kB", "75.00 kB", "100.0 kB"] == [line[12:].split(" of ")[0] for line in lines]
    assert all(" left, from a" in line for line in lines[:3])
    assert " left" not in lines[3]
