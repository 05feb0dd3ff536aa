"""Detects target memory that cannot be written, such as a tensor over a read-only mapped file.

A write there would end the process (SIGSEGV), or look like corrupt data from the source.
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
    """Raise TargetError with the tensor's name if host memory of the image is mapped read-only.

    Does nothing on systems without a list of mappings.
    """
    runs = image.runs
    host = [
        (address, address + length)
        for storage, address, length in zip(runs.storages, runs.addresses, runs.lengths, strict=True)
        if storage.device.type == "cpu"
    ]
    read_only_address = first_overlap(ranges.normalise(host), read_only_mappings())
    if read_only_address is None:
        return
    segment = next(
        segment
        for segment in image.segments(0, image.layout.image_bytes)
        if segment.address <= read_only_address < segment.address + segment.length
    )
    offset = segment.begin + read_only_address - segment.address
    specs = image.layout.tensors
    name = specs[bisect_right([spec.offset for spec in specs], offset) - 1].name
    raise_read_only(name)


def raise_read_only(name: str) -> None:
    """Raise the TargetError for a tensor in read-only memory."""
    raise TargetError(
        f"tensor {name!r} is in read-only memory and cannot be filled",
        hint="clone it, map its file copy-on-write (mmap_mode='c', ACCESS_COPY), or add it to exclude=",
    )


def read_only_mappings() -> tuple[ranges.Range, ...]:
    """Return the address ranges that this process may not write; none if the system lists no mappings."""
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
    """Return the first address of the extents that lies within one of the merged ranges."""
    ends = [end for _, end in merged]
    for begin, end in extents:
        index = bisect_right(ends, begin)
        if index < len(merged) and merged[index][0] < end:
            return max(begin, merged[index][0])
    return None
