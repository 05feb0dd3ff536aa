"""Estimates how much memory this process can still allocate safely. Runs on the source.

Memory files count as memory of their creator and cannot be freed while a process maps them. A seed must not
be killed for lack of memory because it serves, so it creates files only if enough memory is free.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

RESERVE: Final = 256 << 20
"""Minimum bytes that stay free."""
RESERVE_DIVISOR: Final = 16
"""1/n of the total memory stays free as well."""


class MemoryBudget:
    """Memory reserved for files that are being created. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reserved = 0

    @contextlib.contextmanager
    def reserve(self, nbytes: int, has_capacity: Callable[[int], bool]) -> Iterator[bool]:
        """Reserve memory within the context; yields False if `has_capacity` denies it, including earlier
        reservations.
        """
        with self._lock:
            is_reserved = has_capacity(self._reserved + nbytes)
            self._reserved += nbytes if is_reserved else 0
        try:
            yield is_reserved
        finally:
            with self._lock:
                self._reserved -= nbytes if is_reserved else 0


def fits_in_memory(nbytes: int, root: Path = Path("/")) -> bool:
    """Return True if enough memory stays free after `nbytes` more, on this machine and in each of its control
    groups.

    `root` is the parent of /proc and /sys.
    """
    return all(
        free - nbytes >= max(RESERVE, limit // RESERVE_DIVISOR)
        for limit, free in (_system_memory(root), *_cgroup_memory(root))
    )


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still use, on this machine and in each of its control groups."""
    return max(0, min(free for _, free in (_system_memory(root), *_cgroup_memory(root))))


def _system_memory(root: Path) -> tuple[int, int]:
    """Return total and available memory in bytes."""
    values: dict[str, int] = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        if parts and parts[0].isdecimal():
            values[name] = int(parts[0]) << 10
    return values.get("MemTotal", 0), values.get("MemAvailable", 0)


def _cgroup_memory(root: Path) -> list[tuple[int, int]]:
    """Return limit and free bytes of each control group with a limit, version 2 or 1."""
    limits: list[tuple[int, int]] = []
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
        # In a container the path may exist only on the host; the container's own group is then the top.
        for folder in (group, *group.parents):
            limits += _group(folder, *names)
            if folder == top:
                break
    return limits


def _group(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> list[tuple[int, int]]:
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= 1 << 60:
        return []
    # Unused file cache is freed on demand.
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
