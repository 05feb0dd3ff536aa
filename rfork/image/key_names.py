"""Names of dict keys that are equal in every process, used to match the entries of two processes."""

from __future__ import annotations

from enum import Enum

import torch

_BY_REPR = (bool, int, float, complex, bytes, type(None), torch.Size)
_BY_TEXT = (torch.dtype, torch.device)


def key_name(key: object) -> str | None:
    """Return the name of a key's type and value, or None if it has no stable name.

    A text key is its own name; any other key is its Python literal in brackets: ``table.a``, ``table[7]``,
    ``table[(Gate.UP, 'a')]``.
    """
    if type(key) is str and not key.startswith("["):
        return key
    literal = _literal(key)
    return None if literal is None else f"[{literal}]"


def _literal(key: object) -> str | None:
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key.name or key.value}"
    if type(key) is str or type(key) in _BY_REPR:
        return repr(key)
    if isinstance(key, _BY_TEXT):
        return str(key)
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    if isinstance(key, tuple):
        items = [_literal(item) for item in key]
        if None not in items:
            return f"{'' if type(key) is tuple else type(key).__name__}({', '.join(filter(None, items))})"
    return None
