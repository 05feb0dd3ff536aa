"""The fenced blocks of a page, and the comments that control them.

A comment before a block controls how it is run. Without one, it is run as it is, in the page's order:

    <!-- terminal: TEXT -->     in a terminal of its own for the rest of the page; continues once TEXT is written
    <!-- everywhere -->         in each terminal that is opened later, too
    <!-- before: COMMANDS -->   hidden commands, run first
    <!-- not compared: REASON --> its output differs here
    <!-- exit: N -->            it must end with exit code N
    <!-- run by: PATH… -->      these tests, or the blocks of these pages, run the same: checked by `run_by`
    <!-- not run: REASON -->    it cannot run on a machine like this

``<!-- needs: s3 -->`` anywhere on a page starts an S3 server with the bucket `models`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from markdown_it import MarkdownIt

ROOT: Final = Path(__file__).parents[2]
EXECUTED_LANGUAGES: Final = frozenset({"bash", "console", "python"})
"""Languages of blocks that are run."""
DISPLAYED_LANGUAGES: Final = frozenset({"json", "proto", "text", "toml", "yaml", "promql", "ini", "diff"})
"""Languages of blocks that are displayed only."""
DIRECTIVES: Final = frozenset({"not compared", "terminal", "everywhere", "before", "exit", "run by", "not run"})
COMMENT: Final = re.compile(r"<!--\s*(?P<key>[a-z ]+?)\s*(?::\s*(?P<value>.*?))?\s*-->", re.DOTALL)


@dataclass(frozen=True)
class PageBlock:
    """A fenced block and the comments before it."""

    page: str
    line: int
    language: str
    text: str
    directives: dict[str, str] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """Return page and line, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Return True if the page's own test runs the block."""
        return self.language in EXECUTED_LANGUAGES and not {"run by", "not run"} & set(self.directives)


def pages() -> list[Path]:
    """Return every page with commands for readers."""
    docs = (path for path in (ROOT / "docs").rglob("*.md") if path.relative_to(ROOT).parts[1] != "site")
    others = (path for name in ("deploy", "examples") for path in (ROOT / name).rglob("*.md"))
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs, *others])


def page_name(page: Path) -> str:
    """Return the name of a page in tests."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def blocks(page: Path) -> Iterator[PageBlock]:
    """Return the fenced blocks of a page in order."""
    directives: dict[str, str] = {}
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.type == "html_block":
            directives |= {found["key"]: found["value"] or "" for found in COMMENT.finditer(token.content)}
        elif token.type == "fence":
            line = (token.map or [0])[0] + 1
            language = token.info.strip().partition(" ")[0]
            known = {key: value for key, value in directives.items() if key in DIRECTIVES}
            yield PageBlock(page_name(page), line, language, token.content, known)
            directives = {}
        elif token.type in ("paragraph_open", "heading_open", "table_open") and directives:
            # A comment belongs to a block only if nothing separates them.
            directives = {}


def page_links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures, except web addresses."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    found = (
        str(child.attrs.get("href") or child.attrs.get("src"))
        for token in tokens
        for child in token.children or ()
        if child.type in ("link_open", "image")
    )
    return [unquote(link) for link in found if not re.match(r"[a-z]+:", link)]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site spell them."""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    texts = (
        "".join(child.content for child in token.children or ())
        for before, token in pairwise(tokens)
        if before.type == "heading_open"
    )
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


def required_servers(page: Path) -> set[str]:
    """Return the servers that a page needs."""
    return {
        found["value"] for found in COMMENT.finditer(page.read_text()) if found["key"] == "needs" and found["value"]
    }


@dataclass(frozen=True)
class Step:
    """A command of a console block and its expected output."""

    command: str
    output: tuple[str, ...] = ()


def steps(block: PageBlock) -> list[Step]:
    """Return the shell commands of a block: all of a bash block, each line after ``$`` of a console."""
    if block.language != "console":
        return [Step(block.text)]
    found: list[tuple[str, list[str]]] = []
    goes_on = False
    for line in block.text.splitlines():
        if goes_on:
            command, output = found[-1]
            found[-1] = (f"{command}\n{line.removeprefix('> ')}", output)
            goes_on = line.endswith("\\")
        elif line.startswith("$ "):
            found.append((line[2:], []))
            goes_on = line.endswith("\\")
        elif found and line.strip():
            found[-1][1].append(line)
    compared = "not compared" not in block.directives
    return [Step(command, tuple(output) if compared else ()) for command, output in found]


BAR: Final = "█"
"""Characters of progress bars; their number is not compared."""
FREE: Final = re.compile(r"(…|(?<![\w])[0-9a-f]{8,32}(?![\w])|\d+(?:\.\d+)?)")


def output_pattern(expected: str) -> re.Pattern[str]:
    """Return a pattern for a line of output: any number matches a number, any id an id, any text ``…``."""
    parts = []
    for word in expected.replace(BAR, "").split():
        for piece in FREE.split(word):
            if piece == "…":
                parts.append(".*")
            elif re.fullmatch(r"\d+(\.\d+)?", piece) and len(piece) < 8:
                parts.append(r"\d+(?:\.\d+)?")
            elif FREE.fullmatch(piece):
                parts.append("[0-9a-f]+")
            else:
                parts.append(re.escape(piece))
        parts.append(r"\s+")
    return re.compile("".join(parts[:-1]))


def first_missing_line(expected: tuple[str, ...], actual: str) -> str | None:
    """Return the first expected line that the output lacks; other lines may be in between."""
    lines = iter(actual.replace(BAR, "").splitlines())
    for line in expected:
        pattern = output_pattern(line)
        if line.strip() != "…" and not any(pattern.search(one) for one in lines):
            return line
    return None
