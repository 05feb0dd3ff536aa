"""Errors: the tree of `rfork.errors`, and what a process that ends with one of them exits with."""

from __future__ import annotations

from collections.abc import Iterator

from docs.site.reference.markdown import anchor_of, block, code, nowrap_code, sentence, table
from rfork import errors
from rfork.errors import RforkError


def tree() -> str:
    """The tree as the module draws it."""
    text = (errors.__doc__ or "").partition("::\n\n")[2]
    lines = []
    for line in text.splitlines():
        if line and not line.startswith("    "):
            break
        lines.append(line.removeprefix("    "))
    return block("\n".join(lines))


def error_classes(base: type[RforkError] = RforkError) -> Iterator[type[RforkError]]:
    """All classes of errors, each behind that which it is a kind of."""
    yield base
    for error_class in base.__subclasses__():
        if error_class.__module__ == errors.__name__:
            yield from error_classes(error_class)


def page() -> str:
    """A table of all of them."""
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
    return table(["error", "a kind of", "whose fault", "exit code", "what it means"], rows)


def _text(error_class: type[RforkError]) -> str:
    return " ".join((error_class.__doc__ or "").split()).replace("::", ":")
