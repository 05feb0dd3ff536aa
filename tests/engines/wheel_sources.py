"""Checks hook targets against the Python sources of a wheel, by their syntax trees: nothing is installed or run.

Used for versions of an engine that do not run on this machine. It finds what `rfork.engines.hook_targets` finds
in an installed engine, except names that are created at run time.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rfork.engines.hook_targets import HookTarget, Incompatible

Function = ast.FunctionDef | ast.AsyncFunctionDef


class NotFound(Exception):
    """A dotted path leads to nothing; the message is the reason."""


@dataclass(frozen=True)
class Found:
    """A definition, with the module that contains it."""

    module: str
    node: ast.AST


class WheelSources:
    """The modules of one wheel, parsed when they are first needed."""

    def __init__(self, wheel: Path) -> None:
        self._archive = zipfile.ZipFile(wheel)
        self._files = frozenset(self._archive.namelist())
        self._parse = cache(self._parse_module)

    def find(self, path: str) -> Found:
        """Return the definition that a dotted path leads to. Raises NotFound."""
        module, names = self._split(path)
        found = Found(module, self._parse(module))
        for name in names:
            found = self._member(found, name)
        return found

    def has(self, path: str) -> bool:
        """Return True if a dotted path leads to a definition."""
        try:
            self.find(path)
        except NotFound:
            return False
        return True

    def public_methods(self, path: str) -> Sequence[str]:
        """Return the public methods of a class and of its base classes in this wheel, sorted."""
        names: set[str] = set()
        for found in self._bases(self.find(path)):
            names.update(
                node.name
                for node in _statements(found.node)
                if isinstance(node, Function) and node.name[0] != "_" and not _is_property(node)
            )
        return sorted(names)

    def _split(self, path: str) -> tuple[str, Sequence[str]]:
        """Split a path into the longest module that exists and the names in it."""
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            module = ".".join(parts[:count])
            if self._file(module) is not None:
                return module, parts[count:]
        raise NotFound(f"no module {parts[0]}")

    def _file(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((file for file in (f"{base}.py", f"{base}/__init__.py") if file in self._files), None)

    def _parse_module(self, module: str) -> ast.Module:
        file = self._file(module)
        if file is None:
            raise NotFound(f"no module {module}")
        return ast.parse(self._archive.read(file))

    def _member(self, owner: Found, name: str) -> Found:
        candidates = self._bases(owner) if isinstance(owner.node, ast.ClassDef) else iter([owner])
        for candidate in candidates:
            if (found := self._defined(candidate, name)) is not None:
                return found
        kind = f"class {owner.node.name}" if isinstance(owner.node, ast.ClassDef) else f"module {owner.module}"
        raise NotFound(f"{kind} has no attribute {name}")

    def _defined(self, owner: Found, name: str) -> Found | None:
        last: Found | None = None
        for node in _statements(owner.node):
            if name in _names_bound(node):
                # ``Class = dataclass(Class)`` keeps the methods of the class.
                if not (isinstance(node, ast.Assign) and last is not None and isinstance(last.node, ast.ClassDef)):
                    last = Found(owner.module, node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        last = self._imported(owner.module, node, alias.name) or Found(owner.module, node)
        return last

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> Found | None:
        """Return the definition behind an import; None if it is in another package."""
        source = node.module or ""
        if node.level:
            package = module.split(".") if self._is_package(module) else module.split(".")[:-1]
            package = package[: len(package) - (node.level - 1)]
            source = ".".join([*package, source] if source else package)
        try:
            return self.find(f"{source}.{name}")
        except NotFound:
            return None

    def _is_package(self, module: str) -> bool:
        return (self._file(module) or "").endswith("/__init__.py")

    def _bases(self, found: Found) -> Iterator[Found]:
        """Yield a class, and its base classes that are in this wheel."""
        yield found
        for base in getattr(found.node, "bases", []):
            name = _name(base)
            parent = self._defined(Found(found.module, self._parse(found.module)), name) if name else None
            if parent is not None and isinstance(parent.node, ast.ClassDef):
                yield from self._bases(parent)


def check_sources(wheel: Path, hook_targets: Iterable[HookTarget]) -> Incompatible:
    """Return the hook targets that do not match a wheel's sources, each with the reason."""
    sources = WheelSources(wheel)
    return [(target, mismatch) for target in hook_targets if (mismatch := _mismatch(sources, target))]


def _mismatch(sources: WheelSources, target: HookTarget) -> str:
    owner, _, name = target.path.rpartition(".")
    try:
        found_owner = sources.find(owner)
        try:
            found = sources.find(target.path)
        except NotFound:
            if target.optional:
                return ""
            raise
    except NotFound as error:
        return f"does not exist ({error})"
    if not target.parameters:
        return ""
    node = found.node
    if isinstance(node, ast.ClassDef):
        try:
            node = sources.find(f"{target.path}.__init__").node
        except NotFound:
            return "cannot be inspected (it has no __init__)"
    if not isinstance(node, Function):
        return f"cannot be inspected ({name} of {found_owner.module} is no function)"
    missing = [parameter for parameter in target.parameters if parameter not in _parameters(node)]
    return f"has no parameter {', '.join(missing)}" if missing else ""


def _parameters(node: Function) -> frozenset[str]:
    arguments = node.args
    return frozenset(each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class body, also those inside `if`, `try` and `with`."""
    for name in ("body", "orelse", "finalbody"):
        for statement in getattr(node, name, []):
            yield statement
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _statements(statement)
    for handler in getattr(node, "handlers", []):
        yield from _statements(handler)


def _names_bound(node: ast.stmt) -> Collection[str | None]:
    """Return the names that a definition or an assignment binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.Assign(targets=targets):
            return [_name(target) for target in targets]
        case ast.AnnAssign(target=target):
            return (_name(target),)
        case _:
            return ()


def _is_property(node: Function) -> bool:
    return any(ast.unparse(each).rpartition(".")[2] in {"property", "cached_property"} for each in node.decorator_list)


def _name(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Subscript(value=ast.Name(id=name)):
            return name
        case _:
            return None
