"""How sizes, rates, times and names are said on a terminal: short, and in the same words everywhere."""

from __future__ import annotations

import re
from typing import Final

from rfork import weights_version
from rfork.schema import source_kind

_uuid: Final = re.compile(r"[0-9a-f]{32}")
_rank_key: Final = re.compile(r"(target|draft)-tp(\d+)of(\d+)-pp(\d+)of(\d+)-ep(\d+)of(\d+)")


def size(count: float) -> str:
    """Bytes, in powers of 1000, with three or four digits: ``269.0 MB``."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= power:
            scaled = count / power
            return f"{scaled:.2f} {unit}" if abs(scaled) < 100 else f"{scaled:.1f} {unit}"
    return f"{count:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Bytes a second: ``1.25 GB/s``."""
    return f"{size(bytes_per_s)}/s"


def duration(seconds: float) -> str:
    """Seconds: ``0.42 s``, ``12.3 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole_s = round(seconds)
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02} s"
    minutes = whole_s // 60
    if minutes < 2880:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} days"


def format_age(seconds: float) -> str:
    """How long something lies back, roughly: ``12 s``, ``4 min``, ``3 h``."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def short(instance_id: str) -> str:
    """An id made by rfork by its first 8 characters; one that somebody chose stays whole."""
    return instance_id[:8] if _uuid.fullmatch(instance_id) else instance_id


def format_source(name: str) -> str:
    """A source as people are told it: an instance by its short id, storage by its kind and URI."""
    return short(name) if source_kind(name) == "peer" else name


def version(name: str | None) -> str:
    """Return a version as tables show it: shortened, empty where it is not settled."""
    return weights_version.short(name) if name else ""


def rank(key: str) -> str:
    """A rank key without what there is but one of: ``tp 3/8``, ``draft``; ``-``: the only rank there is."""
    match = _rank_key.fullmatch(key)
    if match is None:
        return key
    role, *numbers = match.groups()
    parts = ["speculative"] if role == "speculative" else []
    for name, index, count in zip(("tp", "pp", "ep"), numbers[::2], numbers[1::2], strict=True):
        if count != "1":
            parts.append(f"{name} {index}/{count}")
    return " ".join(parts) or "-"


def plural(count: int, noun: str) -> str:
    """``1 fork``, ``2 forks``, ``1,000 forks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
