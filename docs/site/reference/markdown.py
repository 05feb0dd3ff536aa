"""Markdown tables, code and links."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table without its empty columns; cells are Markdown, and line breaks in a cell are removed."""
    found = list(rows)
    kept = [column for column in range(len(header)) if any(row[column] for row in found)]
    lines = [[line[column] for column in kept] for line in (header, ["---"] * len(header), *found)]
    return "\n".join("| " + " | ".join(cell(each) for each in line) + " |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Escape a text for use in a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Render a text as code; empty for an empty text. A bar is escaped for table cells."""
    return f"`{text}`" if text else ""


def nowrap_code(text: str, anchor: str = "") -> str:
    """Render a name as code that does not wrap, with an anchor."""
    anchor_attribute = f' id="{anchor}"' if anchor else ""
    return f'<code{anchor_attribute} style="white-space: nowrap">{html.escape(text)}</code>'


def codes(texts: Iterable[str]) -> str:
    """Render several texts as code, separated by commas."""
    return ", ".join(code(text) for text in texts)


def block(text: str, language: str = "text") -> str:
    """Render a fenced code block."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def as_json(value: object) -> str:
    """Render a value as formatted JSON."""
    return block(json.dumps(value, indent=2, ensure_ascii=False), "json")


def collapsible(title: str, body: str) -> str:
    """Render a collapsible section."""
    inside = "\n".join(f"    {line}".rstrip() for line in body.rstrip().splitlines())
    return f'??? example "{title}"\n\n{inside}\n'


def heading(level: int, text: str, anchor: str) -> str:
    """Render a heading with an anchor that does not depend on its words."""
    return f"{'#' * level} {text} {{#{anchor}}}\n"


def anchor_of(*words: str) -> str:
    """Return an anchor: lower case, with one hyphen for every run of other characters."""
    return re.sub(r"[^a-z0-9_]+", "-", "-".join(words).lower()).strip("-")


def sentence(text: str) -> str:
    """Turn a comment or description into a sentence: capitalise it and add a full stop."""
    text = " ".join(text.split())
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".:!?" else ".")
