"""Checks that the files named in a `run by` comment run exactly the block's commands.

A test reads its blocks from the pages with `blocks_run_by` and runs them literally. Otherwise it contains
each command: one list of words with its subcommands, all its options and the variables before it; values
(names, addresses, folders) may differ. Tests have such lists in their calls and displays, pages in their
blocks that are run, and other files in their lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import typer
from typer.core import TyperGroup

from rfork.cli.app import app
from tests.docs.commands import simple_commands
from tests.docs.pages import ROOT, PageBlock, blocks, pages, steps

BUILT_IN: Final = frozenset({"export", "cd", "true", "done", "do", "for", "break", "sleep"})
PROGRAMS_WITH_VERB: Final = frozenset({"docker", "git", "helm", "kubectl", "pip", "vllm"})
"""Programs whose first word after options is a subcommand."""
OPTIONS_WITH_VALUE: Final = frozenset({"-n"})
"""Options with a value that precede such a word."""
MAX_DEPTH: Final = 4
"""Maximum depth to which names are resolved to assignments and calls to callees."""

Names = dict[str, list[ast.expr]]


def blocks_run_by(test: str) -> list[PageBlock]:
    """Return the blocks that are run by this test file (`__file__`), in their pages' order."""
    path = str(Path(test).resolve().relative_to(ROOT))
    return [block for page in pages() for block in blocks(page) if path in block.directives.get("run by", "").split()]


def commands_not_run(block: PageBlock) -> list[str]:
    """The commands of a `run by` block that none of the files it names has."""
    files = [file for path in block.directives["run by"].split() if _runs_something(file := ROOT / path)]
    available = [words for file in files for words in word_lists(file)]
    if any(file.suffix == ".py" and "blocks_run_by(__file__)" in file.read_text() for file in files):
        return []
    return [" ".join(sorted(each)) for each in required_words(block) if not any(each <= words for words in available)]


def _runs_something(file: Path) -> bool:
    """Return False for directories, and for tests that exclude blocks run by another test."""
    return file.is_file() and file.name not in ("test_docs.py", "test_docs_commands.py")


def required_words(block: PageBlock) -> list[frozenset[str]]:
    """Return, for each command of a block, the words that identify it in a list."""
    if block.language == "python":
        return [found for node in ast.walk(ast.parse(block.text)) if (found := _rfork_call(node))]
    return [found for step in steps(block) for found in script_commands(step.command)]


def script_commands(script: str) -> list[frozenset[str]]:
    """Return variables, subcommands and options of each simple command of a shell script."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", script).splitlines():
        line = re.sub(r"(?:^|\s)#.*", "", line)
        variables = frozenset(re.findall(r"(?:^|\s)([A-Z][A-Z_]+)=", line))
        commands = [words for words in simple_commands(line) if words[0] not in BUILT_IN]
        if variables and not commands:
            found.append(variables)
        found += [variables | _command_words(words[0].rpartition("/")[2], words[1:]) for words in commands]
    return found


def _command_words(program: str, words: Sequence[str]) -> frozenset[str]:
    """Return the words of a simple command that are not values."""
    own, launched = (list(words), []) if "--" not in words else _split_launcher(list(words), words.index("--"))
    if launched:
        return _command_words(program, own) | _command_words(launched[0], launched[1:])
    options = {word.partition("=")[0] for word in own if word.startswith("-") and word.strip("-")}
    if program == "rfork":
        return frozenset(options) | _subcommands(own)
    if program == "make":
        return frozenset({"make", *(word for word in own if "=" not in word)})
    if program.startswith("python"):
        return frozenset(options | {own[own.index("-m") + 1]}) if "-m" in own else frozenset(options)
    if program in PROGRAMS_WITH_VERB:
        plain = [
            word for before, word in zip(["", *own], own, strict=False)
            if not word.startswith("-") and before not in OPTIONS_WITH_VALUE
        ]  # fmt: skip
        return frozenset(options | set(plain[:1]))
    return frozenset(options | {program})


def _split_launcher(words: list[str], at: int) -> tuple[list[str], list[str]]:
    """Split a launcher's own words from the command that it starts."""
    return words[:at], words[at + 1 :]


def _subcommands(words: Sequence[str]) -> frozenset[str]:
    """Return `snapshot` and `rm` of `rfork snapshot rm URI`."""
    command, found = typer.main.get_command(app), set()
    for word in words:
        if not isinstance(command, TyperGroup) or word not in command.commands:
            break
        command = command.commands[word]
        found.add(word)
    return frozenset(found)


def _rfork_call(node: ast.AST) -> frozenset[str]:
    """Return the name and the keywords of a call of the package."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("rfork."):
        return frozenset({f"{ast.unparse(node.func)}()", *(f"{word.arg}=" for word in node.keywords)})
    return frozenset()


@cache
def word_lists(file: Path) -> tuple[frozenset[str], ...]:
    """Return every list of words of a file."""
    if file.suffix == ".md":
        return tuple(words for block in blocks(file) if block.is_run for words in required_words(block))
    if file.suffix != ".py":
        return tuple(script_commands(file.read_text()))
    tree = ast.parse(file.read_text())
    definitions = _local_definitions(file)
    module_names = _assignments(tree, tree.body)
    found = []
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = module_names | _assignments(scope, scope.body)
        found += [
            frozenset(_words(node, names, definitions, MAX_DEPTH))
            for node in ast.walk(scope)
            if isinstance(node, ast.Call | ast.List | ast.Tuple) and not _is_table(node)
        ]
    return tuple(found)


def _is_table(node: ast.expr) -> bool:
    """Return True for a list of lists: many commands, not one."""
    return isinstance(node, ast.List | ast.Tuple) and any(isinstance(each, ast.List | ast.Tuple) for each in node.elts)


def _local_definitions(file: Path) -> dict[str, ast.stmt]:
    """Return the statements of a test's functions and classes, and of those that it imports from tests."""
    tree = ast.parse(file.read_text())
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            path = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            wanted = {name.name for name in node.names}
            if path.is_file():
                body = ast.parse(path.read_text()).body
                found |= {
                    each.name: each
                    for each in body
                    if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name in wanted
                }
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
    return found


def _assignments(scope: ast.AST, body: Sequence[ast.stmt]) -> Names:
    """Return the values assigned to each name of a function, or of a module's top level."""
    found: Names = {}
    inner = ast.walk(scope) if not isinstance(scope, ast.Module) else iter(body)
    for node in inner:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        found.setdefault(name.id, []).append(value)
    return found


def _words(node: ast.AST, names: Names, definitions: dict[str, ast.stmt], depth_left: int) -> Iterator[str]:
    """The words of an expression, with those of the names in it and of what it calls in the tests."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            yield text.partition("=")[0]
        case ast.Name(id=name) if depth_left and name in names:
            for value in names[name]:
                yield from _words(value, names, definitions, depth_left - 1)
        case ast.Call(func=func, args=arguments, keywords=keywords):
            yield f"{ast.unparse(func)}()"
            if isinstance(func, ast.Name) and depth_left and func.id in definitions:
                yield from _string_constants(definitions[func.id], definitions, depth_left - 1)
            for argument in arguments:
                yield from _words(argument, names, definitions, depth_left)
            for keyword in keywords:
                yield f"{keyword.arg}="
                yield from _words(keyword.value, names, definitions, depth_left)
        case ast.Dict(keys=keys, values=values):
            for each in (*filter(None, keys), *values):
                yield from _words(each, names, definitions, depth_left)
        case ast.List() | ast.Tuple() | ast.Starred() | ast.BinOp() | ast.IfExp():
            for child in ast.iter_child_nodes(node):
                yield from _words(child, names, definitions, depth_left)
        case _:
            return


def _string_constants(node: ast.AST, definitions: dict[str, ast.stmt], depth_left: int) -> Iterator[str]:
    """Every text in a function or class of the tests, and in what it calls of them."""
    for inner in ast.walk(node):
        match inner:
            case ast.Constant(value=str(text)):
                yield text
            case ast.Call(func=ast.Name(id=name)) if depth_left and name in definitions:
                yield from _string_constants(definitions[name], definitions, depth_left - 1)
