"""Errors reference: the tree of `rfork.errors`, and the exit code of each error."""

from __future__ import annotations

from collections.abc import Iterator

from docs.site.reference.markdown import anchor_of, block, code, nowrap_code, sentence, table
from rfork import errors
from rfork.errors import RforkError


def tree() -> str:
    """Return the tree as drawn in the module's docstring."""
    text = (errors.__doc__ or "").partition("::\n\n")[2]
    lines = []
    for line in text.splitlines():
        if line and not line.startswith("    "):
            break
        lines.append(line.removeprefix("    "))
    return block("\n".join(lines))


def error_classes(base: type[RforkError] = RforkError) -> Iterator[type[RforkError]]:
    """Return all error classes, each after its base class."""
    yield base
    for error_class in base.__subclasses__():
        if error_class.__module__ == errors.__name__:
            yield from error_classes(error_class)


def page() -> str:
    """Render a table of all errors."""
    rows = (
        [
            nowrap_code(error_class.__name__, anchor_of(error_class.__name__)),
            code(error_class.__mro__[1].__name__) if error_class is not RforkError else "",
            error_class.fault if error_class is not errors.AllSourcesFailed else "that of its last reason",
            str(error_class.exit_code),
            sentence(_text(error_class)),
        ]
        for error_class in error_classes()
    )
    return table(["error", "base", "fault of", "exit code", "meaning"], rows)


def _text(error_class: type[RforkError]) -> str:
    return " ".join((error_class.__doc__ or "").split()).replace("::", ":")
