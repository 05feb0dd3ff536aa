"""Errors: the tree of `rfork.errors`, and what a process that ends with one of them exits with."""

from __future__ import annotations

from collections.abc import Iterator

from docs.site.reference.markdown import anchor_of, block, code, sentence, table, whole
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


def kinds(above: type[RforkError] = RforkError) -> Iterator[type[RforkError]]:
    """All classes of errors, each behind that which it is a kind of."""
    yield above
    for kind in above.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from kinds(kind)


def page() -> str:
    """A table of all of them."""
    rows = (
        [
            whole(kind.__name__, anchor_of(kind.__name__)),
            code(kind.__mro__[1].__name__) if kind is not RforkError else "",
            kind.fault if kind is not errors.NothingLeft else "that of its last reason",
            str(kind.exit_code),
            sentence(_text(kind)),
        ]
        for kind in kinds()
    )
    return table(["error", "a kind of", "whose fault", "exit code", "what it means"], rows)


def _text(kind: type[RforkError]) -> str:
    return " ".join((kind.__doc__ or "").split()).replace("::", ":")
