"""The vocabulary of the project: names, docstrings, comments, messages and pages use the field's standard terms."""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("rfork", "planner", "tests", "benchmarks", "deploy", "docs")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])

FORBIDDEN_IN_NAMES = {
    "told tell tells telling say says said saying news hear hears heard": "report, notify, log, message, update",
    "give giver givers gives giving gave": "serve, source, send",
    "take takes taking took taken": "receive, acquire, load",
    "ask asks asking asked": "request",
    "look looks looking looked": "poll, check",
    "holds holding": "own, cache; throttled, limited",
    "way ways": "strategy, access path",
    "place places placed placing": "location, slot, placement",
    "whole": "complete",
    "most least longest shortest largest smallest": "max, min",
    "beside behind anew over gone": "concurrent, downstream, again, finished, removed",
    "patience": "timeout",
    "room rooms house seam stranger strangers": "package, codebase, interface, unauthenticated client",
    "who whom whose whoever nobody somebody anybody": "source, target, caller",
}
"""Words that no name contains, and the terms to use instead."""

ALLOWED_PHRASES = re.compile(r"(in|into|out_?of)_?place", re.IGNORECASE)
"""Standard terms that contain a forbidden word: PyTorch's in-place and out-of-place operations."""

PROSE = re.compile(
    r"""
    \b(?P<word>
      told | tells? | telling | said | says? | saying | hears? | heard | news
    | givers? | gave | (?:gives? | giving) (?!\s+up\b)
    | asks? | asked | asking
    | (?:looks? | looked | looking) (?!\s+(?:up|like|deleted)\b)
    | patience | (?<!as\ a\ ) whole (?!\s+(?:bytes|seconds|number|and\ broken)) | anew | beside | bell | stead
    | seams? | strangers? | whoever | whomever | nobody | somebody | anybody
    )\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Words that no docstring, comment, message or page contains.

`take`, `place`, `way`, `most`, `over` and the like are ordinary English in a sentence: they are forbidden in names
only.
"""

GERUND = re.compile(
    r"(?!string|ring|timing|tracing|hashing|hedging|pricing|testing|monitoring|staging|streaming)\w+ing"
)
"""A module is a noun: the thing that it defines. Excepted are nouns of the field that end in -ing."""

ENGINE_STAND_INS = ROOT / "tests/engines/setup"
"""Files whose names belong to an engine's own interface."""


class Name(NamedTuple):
    """A name that a module defines."""

    text: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@cache
def sources() -> dict[str, str]:
    """Return the text of each Python file of the repository, by path; generated code excluded."""
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for tree in TREES
        for path in sorted((ROOT / tree).rglob("*.py"))
        if "_pb2" not in path.name and ENGINE_STAND_INS not in path.parents and "build" not in path.parts
    }


class SourceFile(NamedTuple):
    """Names and texts of a Python file. Its syntax tree is not kept: millions of nodes would slow down each garbage
    collection of the tests that follow.
    """

    names: list[Name]
    docstrings: list[tuple[int, str]]
    comments: list[tuple[int, str]]
    messages: list[tuple[int, str]]
    public_classes: list[str]


@cache
def source_file(path: str) -> SourceFile:
    """Return the contents of a file of `sources`."""
    nodes = list(ast.walk(ast.parse(sources()[path])))
    return SourceFile(
        list(names_in(nodes, path)),
        list(docstrings_in(nodes)),
        list(comments_in(sources()[path])),
        list(messages_in(nodes)),
        [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")],
    )


def words_of(name: str) -> list[str]:
    """Return the words of an identifier, in lower case: `MostOf_a` has `most`, `of`, `a`."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", ALLOWED_PHRASES.sub("", name))]


def names_in(nodes: Iterable[ast.AST], path: str) -> Iterator[Name]:
    """Yield each class, function, parameter, variable and attribute that these nodes define."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield Name(node.name, path, node.lineno)
        elif isinstance(node, ast.arg):
            yield Name(node.arg, path, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Name(node.id, path, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield Name(node.attr, path, node.lineno)
        elif isinstance(node, ast.alias) and node.asname:
            yield Name(node.asname, path, node.lineno)


def docstrings_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, those below attributes included."""
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = ast.get_docstring(node)
        if first is not None:
            yield node.body[0].lineno, first
        for before, after in pairwise(node.body):
            if (
                isinstance(before, ast.Assign | ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                yield after.lineno, after.value.value


def comments_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def messages_in(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that is not a docstring, and of each part of an f-string.

    These are the errors, hints, log events, option helps and test values.
    """
    expressions = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in expressions:
            yield node.lineno, node.value


def forbidden_words(text: str) -> list[str]:
    """Return the forbidden words of a text; quoted code is not checked."""
    if not PROSE.search(text):
        return []
    plain = re.sub(r"``.+?``|`[^`]+`|\"[^\"\n]+\"", "", text, flags=re.DOTALL)
    return [found["word"] for found in PROSE.finditer(plain)]


def nonstandard(names: Iterable[Name]) -> list[str]:
    """Return the names that contain a forbidden word, with the terms to use instead."""
    forbidden = {word: use for words, use in FORBIDDEN_IN_NAMES.items() for word in words.split()}
    return sorted(
        {f"{name} (use {forbidden[word]})" for name in names for word in words_of(name.text) if word in forbidden}
    )


@pytest.mark.parametrize("tree", TREES)
def test_names_use_standard_terms(tree: str) -> None:
    """No name contains a word for which the field has a standard term."""
    names = (name for path in sources() if path.startswith(f"{tree}/") for name in source_file(path).names)
    assert [] == nonstandard(name for name in names if not name.text.startswith("test_"))


def test_modules_are_nouns() -> None:
    """No module or package is named after an activity."""
    parts = {
        part.removesuffix(".py")
        for path in sources()
        if path.startswith(("rfork/", "planner/"))
        for part in path.split("/")
    }
    assert [] == sorted(part for part in parts if GERUND.fullmatch(part.split("_")[-1]))


@pytest.mark.parametrize("tree", TREES)
def test_prose_uses_standard_terms(tree: str) -> None:
    """Docstrings, comments and messages contain no word for which the field has a standard term."""
    found = [
        f"{path}:{line}: {word}"
        for path in sources()
        if path.startswith(f"{tree}/") and path != "tests/unit/test_language.py"
        for texts in (source_file(path).docstrings, source_file(path).comments, source_file(path).messages)
        for line, text in texts
        for word in forbidden_words(text)
    ]
    assert [] == found


def test_names_of_tests_use_standard_terms() -> None:
    """The name of a test is a sentence: it follows the rules for prose."""
    found = [
        f"{name}: {word}"
        for path in sources()
        if path.startswith("tests/")
        for name in source_file(path).names
        if name.text.startswith("test_")
        for word in forbidden_words(name.text.replace("_", " "))
    ]
    assert [] == found


@pytest.mark.parametrize("tree", TREES)
def test_docstrings_start_with_a_statement(tree: str) -> None:
    """A docstring's first line says what the thing is or does; it is no question in disguise."""
    found = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path in sources()
        if path.startswith(f"{tree}/")
        for line, text in source_file(path).docstrings
        if re.match(r"(What|Who|Whom|Whose|Whether|Which|Where|Why|How)\b", text)
    ]
    assert [] == found


def test_public_class_names_are_unique() -> None:
    """No public class name is defined twice in the product."""
    definitions: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources():
        if path.startswith(("rfork/", "planner/")):
            for name in source_file(path).public_classes:
                definitions[name].append(path)
    assert {} == {name: paths for name, paths in definitions.items() if len(paths) > 1}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_standard_terms(page: Path) -> None:
    """Pages contain no word for which the field has a standard term; code blocks and comments are not checked."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    assert [] == forbidden_words(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_use_standard_names(page: Path) -> None:
    """Names in the Python examples of a page contain no word for which the field has a standard term."""
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    trees_of_examples = [ast.parse(textwrap.dedent(example), mode="exec") for example in examples]
    assert [] == nonstandard(name for tree in trees_of_examples for name in names_in(ast.walk(tree), page.name))
