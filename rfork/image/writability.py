"""Detects target memory that cannot be written: a tensor over a file that is mapped read-only.

A write there would end the process (SIGSEGV), or fail as if the source had sent something wrong.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

from rfork.errors import TargetError
from rfork.image import ranges
from rfork.image.memory import Image

MAPS = Path("/proc/self/maps")


def check_writable(image: Image) -> None:
    """Raise TargetError, naming a tensor, where memory of the image on the host is mapped read-only.

    Checks nothing where the system has no list of mappings.
    """
    runs = image.runs
    host = [
        (address, address + length)
        for storage, address, length in zip(runs.storages, runs.addresses, runs.lengths, strict=True)
        if storage.device.type == "cpu"
    ]
    wrong = first_overlap(ranges.normalise(host), read_only_mappings())
    if wrong is None:
        return
    segment = next(
        segment
        for segment in image.segments(0, image.layout.image_bytes)
        if segment.address <= wrong < segment.address + segment.length
    )
    offset = segment.begin + wrong - segment.address
    specs = image.layout.tensors
    name = specs[bisect_right([spec.offset for spec in specs], offset) - 1].name
    raise_read_only(name)


def raise_read_only(name: str) -> None:
    """Raise the TargetError of a tensor in read-only memory."""
    raise TargetError(
        f"tensor {name!r} lies in read-only memory, so it cannot be filled",
        hint="clone it, map its file copy-on-write (mmap_mode='c', ACCESS_COPY), or name it in exclude=",
    )


def read_only_mappings() -> tuple[ranges.Range, ...]:
    """The address ranges that this process may not write to; none where the system lists no mappings."""
    try:
        text = MAPS.read_text()
    except OSError:
        return ()
    found: list[ranges.Range] = []
    for line in text.splitlines():
        addresses, permissions, _ = line.split(" ", 2)
        if permissions[1] != "w":
            begin, _, end = addresses.partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return ranges.normalise(found)


def first_overlap(extents: Iterable[ranges.Range], merged: tuple[ranges.Range, ...]) -> int | None:
    """The first address of the extents that lies within one of the merged ranges."""
    ends = [end for _, end in merged]
    for begin, end in extents:
        index = bisect_right(ends, begin)
        if index < len(merged) and merged[index][0] < end:
            return max(begin, merged[index][0])
    return None
