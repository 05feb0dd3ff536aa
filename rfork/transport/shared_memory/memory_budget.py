"""How much memory this process may still take, before something has to be ended for it. Runs on the source.

Memory files count as the memory of who wrote them, and cannot be given back while somebody maps them. A
seed must not be ended for what it gives, so it makes them only where there is room.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

RESERVE: Final = 256 << 20
"""Bytes that are left to others, at least."""
RESERVE_DIVISOR: Final = 16
"""And of all there is, one part in so many."""


class MemoryBudget:
    """Memory that is promised to files which are being made. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised = 0

    @contextlib.contextmanager
    def reserve(self, nbytes: int, enough: Callable[[int], bool]) -> Iterator[bool]:
        """Whether there is `enough` for so many bytes, beside what is promised; until the block ends."""
        with self._lock:
            has = enough(self._promised + nbytes)
            self._promised += nbytes if has else 0
        try:
            yield has
        finally:
            with self._lock:
                self._promised -= nbytes if has else 0


def fits_in_memory(nbytes: int, root: Path = Path("/")) -> bool:
    """Whether so many bytes more leave enough: on this machine, and in each control group of this process.

    `root` is where /proc and /sys are.
    """
    return all(
        free - nbytes >= max(RESERVE, limit // RESERVE_DIVISOR)
        for limit, free in (_system_memory(root), *_cgroup_memory(root))
    )


def _system_memory(root: Path) -> tuple[int, int]:
    """Bytes of memory, and those that can still be had."""
    known: dict[str, int] = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            known[name] = int(words[0]) << 10
    return known.get("MemTotal", 0), known.get("MemAvailable", 0)


def _cgroup_memory(root: Path) -> list[tuple[int, int]]:
    """Limit and free bytes of each control group that has a limit, version 2 or 1."""
    found: list[tuple[int, int]] = []
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            top, names = base, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = base / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        # In a container the path may be one that only the host sees: its own group is then the top.
        for folder in (group, *group.parents):
            found += _group(folder, *names)
            if folder == top:
                break
    return found


def _group(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> list[tuple[int, int]]:
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= 1 << 60:
        return []
    # Cache of files that nobody uses is given back when memory is wanted.
    cached = dict.fromkeys((cache_name,), 0)
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in cached and value.isdecimal():
            cached[name] = int(value)
    return [(int(limit), int(limit) - int(usage) + cached[cache_name])]


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""
