"""Fingerprint of the plain values on a module: numbers, text, flags and enums used in its computation.

They are not transferred: source and target must have equal values. So they become part of the layout, as
lines that name an attribute, its value and its owners. Two layouts can then report the attribute in which
they differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from hashlib import sha256

import numpy as np

PROCESS_WORDS = frozenset(
    {
        *("rank", "ranks", "device", "devices", "host", "hostname", "port", "address", "addr", "pid", "uuid"),
        *("path", "paths", "dir", "dirs", "directory", "folder", "file", "files", "filename", "url", "uri"),
        *("ptr", "handle", "seed", "rng", "time", "timestamp", "cache", "cached", "caches", "counter"),
        *("counters", "calls", "seen", "warned", "warning", "warnings", "verbose", "debug", "logger"),
    }
)
"""Words in attribute names that refer to a process: its location, time or state."""
PROCESS_NAMES = frozenset(
    {
        *("step", "steps", "_step", "_steps", "global_step", "epoch", "iteration", "_version"),
        # From torch's buffers, accelerate and transformers: how a model was created or is trained.
        *("_is_buffer", "persistent", "_hf_hook", "_old_forward", "_is_hf_initialized", "hf_quantizer"),
        *("gradient_checkpointing", "is_quantized"),
    }
)
"""Attribute names with the same meaning, and annotations that libraries put on loaded objects."""
_BASES: tuple[type, ...] = (bool, int, float, complex, str, bytes)
MAX_TEXT = 80
"""Maximum characters of a value; a longer value is cut and identified by its digest."""
MAX_VALUES = 256
"""Maximum number of values listed per attribute."""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


class Attributes:
    """Plain values by attribute, each with its owners."""

    def __init__(self) -> None:
        self._owners: dict[str, list[str]] = {}
        """Keyed by ``attribute=value``: a model has few of them, but tens of thousands of owners."""

    def add(self, owner: str, key: str, value: object) -> None:
        """Add one attribute of a module or of an object attached to it, unless the attribute is process-specific."""
        if is_compared(key) and not _is_location(value):
            self._owners.setdefault(f"{key}={_text(value)}", []).append(owner)

    def lines(self, excluded: Callable[[str], object] | None = None) -> tuple[str, ...]:
        """Return one line for each value of each attribute, without owners whose attribute is `excluded`."""
        found = []
        values = Counter(line.partition("=")[0] for line in self._owners)
        overflowing: dict[str, list[str]] = {}
        for line, owners in self._owners.items():
            key = line.partition("=")[0]
            kept = owners if excluded is None else [each for each in owners if not excluded(_name(each, key))]
            if not kept:
                continue
            if values[key] > MAX_VALUES:
                overflowing.setdefault(key, []).extend(f"{each} {line}" for each in kept)
            else:
                found.append(f"{line} at {_owners_text(kept)}")
        found.extend(f"{key}={values[key]} values at {_owners_text(names)}" for key, names in overflowing.items())
        return tuple(sorted(found))


@cache
def is_compared(key: str) -> bool:
    """Return whether an attribute of this name belongs to the model rather than to a process that runs it."""
    if key in PROCESS_NAMES:
        return False
    return PROCESS_WORDS.isdisjoint(word.lower() for word in _WORDS.findall(key))


def differing(own: Sequence[str], other: Sequence[str]) -> Iterator[str]:
    """Yield one line for each attribute in which two modules differ, with the values of both."""
    here, there = frozenset(own), frozenset(other)
    sides = [_by_key(here - there), _by_key(there - here)]
    for key in sorted(sides[0].keys() | sides[1].keys()):
        descriptions = ["; ".join(side.get(key, ["nothing"])) for side in sides]
        yield f"attribute {key}: here {descriptions[0]}, there {descriptions[1]}"


def _by_key(lines: Iterable[str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for line in sorted(lines):
        key, _, rest = line.partition("=")
        grouped.setdefault(key, []).append(rest)
    return grouped


def _owners_text(owners: Sequence[str]) -> str:
    """Return the first owner; if there are more, also their number and a digest of their names."""
    first = min(owners) or "the module"
    if len(owners) == 1:
        return first
    digest = sha256("\n".join(sorted(owners)).encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{first} and {len(owners) - 1} more ({digest})"


def _name(owner: str, key: str) -> str:
    return f"{owner}.{key}" if owner else key


def _text(value: object) -> str:
    if type(value) not in _BASES and isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.generic):
        value = value.item()
    base = type(value)
    if base not in _BASES:  # reduce a subclass to its base type
        base = next((each for each in _BASES if isinstance(value, each)), base)
    text = str(base.__repr__(value))
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}… ({sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]})"


def _is_location(value: object) -> bool:
    """Return whether a value is a path or a URL, which differs between machines."""
    return isinstance(value, str) and (value[:1] in ("/", "~") or "://" in value)
