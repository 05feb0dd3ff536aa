"""Tables, code and links as Markdown has them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without its empty columns; cells are Markdown, and one of several lines is made one."""
    found = list(rows)
    kept = [column for column in range(len(header)) if any(row[column] for row in found)]
    lines = [[line[column] for column in kept] for line in (header, ["---"] * len(header), *found)]
    return "\n".join("| " + " | ".join(cell(each) for each in line) + " |" for line in lines) + "\n"


def cell(text: str) -> str:
    """A text that can stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """A text as code; nothing for an empty one. A bar in it does not end a table's cell."""
    return f"`{text}`" if text else ""


def nowrap_code(text: str, anchor: str = "") -> str:
    """A name as code that is never broken into two lines, and a place that links can mean."""
    anchor_attribute = f' id="{anchor}"' if anchor else ""
    return f'<code{anchor_attribute} style="white-space: nowrap">{html.escape(text)}</code>'


def codes(texts: Iterable[str]) -> str:
    """Several, with commas between them."""
    return ", ".join(code(text) for text in texts)


def block(text: str, language: str = "text") -> str:
    """Lines of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def as_json(value: object) -> str:
    """A value as lines of JSON."""
    return block(json.dumps(value, indent=2, ensure_ascii=False), "json")


def collapsible(title: str, body: str) -> str:
    """What is shown once somebody opens it."""
    inside = "\n".join(f"    {line}".rstrip() for line in body.rstrip().splitlines())
    return f'??? example "{title}"\n\n{inside}\n'


def heading(level: int, text: str, anchor: str) -> str:
    """A heading with an anchor that stays whatever its words are."""
    return f"{'#' * level} {text} {{#{anchor}}}\n"


def anchor_of(*words: str) -> str:
    """Words as an anchor: lower case, with one hyphen for all else between them."""
    return re.sub(r"[^a-z0-9_]+", "-", "-".join(words).lower()).strip("-")


def sentence(text: str) -> str:
    """Comments and descriptions as a sentence: the first letter large, a full stop behind."""
    text = " ".join(text.split())
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".:!?" else ".")
