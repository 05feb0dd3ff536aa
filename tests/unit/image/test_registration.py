"""Memory regions to register: literal runs and allocator segments in, literal regions out."""

from __future__ import annotations

import pytest
import torch

from rfork.image.capture import image_from_tensors
from rfork.image.registration import (
    AllocatorSegment,
    ContiguousRun,
    Region,
    merge_host_regions,
    merge_regions,
    regions_to_register,
    uses_expandable_segments,
)

MIB = 1 << 20


def on_host(address: int, length: int) -> ContiguousRun:
    return ContiguousRun(address, length, 0, True)


def on_device(address: int, length: int, storage: int | None = None) -> ContiguousRun:
    return ContiguousRun(address, length, address if storage is None else storage, False)


CASES: dict[str, tuple[list[ContiguousRun], list[AllocatorSegment], list[Region]]] = {
    "empty image": ([], [], []),
    "host, less than a page apart": ([on_host(0, 10), on_host(10 + 4095, 5)], [], [(0, 4110)]),
    "host, a page apart": ([on_host(0, 10), on_host(10 + 4096, 5)], [], [(0, 10), (4106, 5)]),
    "host, unsorted": ([on_host(9000, 5), on_host(0, 10), on_host(8998, 2)], [], [(0, 10), (8998, 7)]),
    "empty runs": ([on_host(0, 0), on_host(50_000, 1)], [], [(50_000, 1)]),
    "one segment, from the first image byte to the last": (
        [on_device(20 * MIB, MIB), on_device(30 * MIB, MIB), on_device(39 * MIB, 512)],
        [AllocatorSegment(20 * MIB, 20 * MIB, False)],
        [(20 * MIB, 19 * MIB + 512)],
    ),
    "adjacent segments are two allocations": (
        [on_device(39 * MIB, MIB), on_device(40 * MIB, MIB)],
        [AllocatorSegment(40 * MIB, 20 * MIB, False), AllocatorSegment(20 * MIB, 20 * MIB, False)],
        [(39 * MIB, MIB), (40 * MIB, MIB)],
    ),
    "an expandable segment": (
        [on_device(at * 100 * MIB, 90 * MIB) for at in range(1, 11)],
        [AllocatorSegment(100 * MIB, 2000 * MIB, True)],
        [(100 * MIB, 990 * MIB)],
    ),
    "an expandable segment with an unmapped hole": (
        [on_device(100 * MIB, MIB), on_device(300 * MIB, MIB)],
        [AllocatorSegment(100 * MIB, 2 * MIB, True), AllocatorSegment(300 * MIB, 2 * MIB, True)],
        [(100 * MIB, MIB), (300 * MIB, MIB)],
    ),
    "an arena": (
        [on_device(512, 8000 * MIB, storage=512)],
        [AllocatorSegment(0, 9000 * MIB, False)],
        [(512, 8000 * MIB)],
    ),
    "a pool unknown to torch, one storage per tensor": (
        [on_device(2 * MIB, 2 * MIB), on_device(4 * MIB, 2 * MIB)],
        [],
        [(2 * MIB, 2 * MIB), (4 * MIB, 2 * MIB)],
    ),
    "an arena unknown to torch": (
        [on_device(2 * MIB, 100, storage=2 * MIB), on_device(2 * MIB + 256, 100, storage=2 * MIB)],
        [],
        [(2 * MIB, 356)],
    ),
    "adjacent known and unknown memory": (
        [on_device(2 * MIB, 2 * MIB), on_device(4 * MIB, 100)],
        [AllocatorSegment(2 * MIB, 2 * MIB, False)],
        [(2 * MIB, 2 * MIB), (4 * MIB, 100)],
    ),
    "memory that extends beyond its segment": (
        [on_device(3 * MIB, 2 * MIB)],
        [AllocatorSegment(2 * MIB, 2 * MIB, False)],
        [(3 * MIB, 2 * MIB)],
    ),
    "host and device": (
        [on_host(100, 10), on_device(112, 10), on_host(130, 5)],
        [AllocatorSegment(112, 16, False)],
        [(100, 10), (112, 10), (130, 5)],
    ),
    "a mixture of experts: 20,000 tensors in 500 segments": (
        [on_device(20 * MIB * (at // 40) + at % 40 * 500_000, 400_000) for at in range(20_000)],
        [AllocatorSegment(20 * MIB * at, 20 * MIB, False) for at in range(500)],
        [(20 * MIB * at, 39 * 500_000 + 400_000) for at in range(500)],
    ),
}


@pytest.mark.parametrize(("runs", "segments", "expected"), CASES.values(), ids=CASES)
def test_regions_lie_inside_one_allocation(
    runs: list[ContiguousRun], segments: list[AllocatorSegment], expected: list[Region]
) -> None:
    """They are few, sorted, and each inside one allocation as far as the allocator reports."""
    assert expected == merge_regions(runs, segments)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("host, ", "empty", "no "))])
def test_the_shortcut_for_host_memory_has_the_same_result(name: str) -> None:
    """The shortcut for host memory has the same result."""
    runs, _, expected = CASES[name]
    assert expected == merge_host_regions([run.address for run in runs], [run.length for run in runs])


def test_tensors_less_than_a_page_apart_are_one_region() -> None:
    """Tensors of one buffer less than a page apart are one region, those a page apart are two."""
    buffer = torch.zeros(16384, dtype=torch.uint8)
    address = buffer.data_ptr()
    image = image_from_tensors({"a": buffer[:10], "b": buffer[10 + 4095 : 4200], "c": buffer[4200 + 4096 : 9000]})
    assert [(address, 4200), (address + 8296, 704)] == regions_to_register(image)
    assert not uses_expandable_segments(image)
