"""The shared_memory transport within this process: the transport contract, and shared or copied memory."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rfork.errors import SourceWeightsChanged
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.transport.same_host.connection import Message, close_all
from rfork.transport.shared_memory import exporter, page_remapper
from rfork.transport.shared_memory.page_remapper import PageRemapper
from tests.integration.shared_memory.pairs import (
    LARGE,
    fork_of,
    mapped_chunk_bytes,
    open_reader,
    pair,
    send_request,
    transport,
)
from tests.transport_contract import CONTRACT, TOKEN, FakeGate, TransportPair, content, image_of, soon

M_MMAP_THRESHOLD = -3
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("shm_mode", ["map", "copy"])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[TransportPair], None], shm_mode: str) -> None:
    """The guarantees of every transport."""
    made = TransportPair.create(transport(shm_mode=shm_mode))
    try:
        check(made)
    finally:
        made.close()


def test_two_targets_have_the_bytes_in_memory_once() -> None:
    """Both map the same pages; neither has its own copy."""
    with pair() as made:
        targets = [fork_of(made.exporter.endpoint(), LARGE) for _ in range(2)]
        size, known = made.source.layout.image_bytes, mapped_chunk_bytes()
        assert [content(made.source)] * 2 == [content(target) for target in targets]
        assert known["Rss"] > 2 * 0.9 * size
        assert known["Pss"] < 1.1 * size
        assert 0 == known["Anonymous"]


def test_a_target_in_copy_mode_maps_nothing() -> None:
    """With `copy` the target's memory stays private, and the source makes no copy of the image."""
    before = mapped_chunk_bytes()
    with pair(shm_mode="copy") as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert before == mapped_chunk_bytes()


def test_a_source_low_on_memory_serves_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """It creates no chunk file, and the bytes are correct."""
    monkeypatch.setattr(exporter, "fits_in_memory", lambda nbytes: False)
    before = mapped_chunk_bytes()
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert before == mapped_chunk_bytes()


def test_chunks_are_copied_if_the_kernel_refuses_to_map_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads take longer, and the bytes are correct."""

    def refuse(*arguments: object) -> None:
        raise OSError(12, "no")

    monkeypatch.setattr(PageRemapper, "replace", refuse)
    before = mapped_chunk_bytes()
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert before == mapped_chunk_bytes()


def test_file_backed_and_shared_memory_is_copied() -> None:
    """Files and shared memory are never mapped over, because other processes see what is written to them."""
    with pair() as made:
        shared = mmap.mmap(-1, LARGE[0])
        regions = [torch.frombuffer(shared, dtype=torch.uint8), *image_of(LARGE[1:]).regions]
        target = Image(made.source.layout, regions)
        with open_reader(made.exporter.endpoint(), target) as reader:
            reader.read(0, LARGE[0], soon())
        assert content(made.source, 0, LARGE[0]) == shared[:]


FREED_BLOCKS = f"""
import ctypes, torch
from rfork.image.host_memory import separate_mappings
from rfork.image.memory import Image
from rfork.transport.shared_memory.page_remapper import ReplaceableMemory
from tests.transport_contract import image_of
layout = image_of(({4 * MIB},)).layout
ctypes.CDLL(None).mallopt({M_MMAP_THRESHOLD}, {32 * MIB})
images = [Image(layout, [torch.zeros({4 * MIB}, dtype=torch.uint8)])]
with separate_mappings():
    images.append(Image(layout, [torch.zeros({4 * MIB}, dtype=torch.uint8)]))
print([sum(run.length for run in ReplaceableMemory(image).remappable_ranges(0, {4 * MIB})) for image in images])
"""


def test_memory_of_an_engine_that_has_freed_large_blocks_can_be_mapped() -> None:
    """glibc then keeps new tensors in the heap, whose pages cannot be replaced, unless rfork changes that."""
    # In a new process: free blocks of the heap are used first.
    command = [sys.executable, "-c", FREED_BLOCKS]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert f"[0, {4 * MIB}]" == found.stdout.strip()


def test_a_targets_writes_are_private() -> None:
    """Neither the source nor another target sees them."""
    with pair() as made:
        one, other = (fork_of(made.exporter.endpoint(), LARGE) for _ in range(2))
        one.regions[0].fill_(7)
        assert [content(made.source)] * 2 == [
            content(other),
            content(fork_of(made.exporter.endpoint(), LARGE)),
        ]


def test_a_relay_serves_the_memory_that_it_mapped() -> None:
    """Its reader receives the same file that the relay received."""
    with pair() as made:
        relay = made.transport.export(made.target, FakeGate())
        request: Message = {"token": TOKEN, "begin": 0, "end": MIB, "alignment": []}
        with contextlib.closing(relay):
            made.connect().read(0, made.source.layout.image_bytes, soon())
            files = []
            for endpoint in (made.exporter.endpoint(), relay.endpoint()):
                _, descriptors = send_request(endpoint, request)
                files.append(os.fstat(descriptors[0]).st_ino)
                close_all(descriptors)
            assert files[0] == files[1]


def test_a_relay_serves_its_own_memory_if_it_differs_from_the_received_file() -> None:
    """A file from a faulty source is not forwarded after the relay has repaired the chunk."""
    with pair() as made:
        relay = made.transport.export(made.target, FakeGate())
        with contextlib.closing(relay):
            made.connect().read(0, made.source.layout.image_bytes, soon())
            made.target.regions[0][5000] ^= 0xFF
            assert content(made.target) == content(fork_of(relay.endpoint(), LARGE))


def test_a_relay_compares_in_short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of its weights waits for at most one slice, and a chunk that changed during the comparison is
    not served.
    """
    monkeypatch.setattr(exporter, "SLICE_BYTES", MIB // 4)
    with pair() as made:
        gate = FakeGate()
        relay = made.transport.export(made.target, gate)
        with contextlib.closing(relay):
            made.connect().read(0, 2 * MIB, soon())
            close_all(send_request(relay.endpoint(), {"token": TOKEN, "begin": 0, "end": MIB, "alignment": []})[1])
            slices = {(begin, end) for begin, end in gate.admitted if end - begin < MIB}
            assert {(at, at + MIB // 4) for at in range(0, MIB, MIB // 4)} == slices
            reading = gate.read_guard

            def change(*arguments: object) -> contextlib.AbstractContextManager[None]:
                gate.generation += 1
                return reading(*arguments)  # type: ignore[arg-type]

            monkeypatch.setattr(gate, "read_guard", change)
            with pytest.raises(SourceWeightsChanged):
                fork_of(relay.endpoint(), LARGE)


def test_a_kernel_without_madvise_populate_maps_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are mapped on kernels before Linux 5.14 too."""
    monkeypatch.setattr(page_remapper, "MADV_POPULATE_READ", 222)
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert mapped_chunk_bytes()["Rss"] > 0.9 * LARGE[0]


def test_nothing_is_left_open() -> None:
    """Once both sides are closed and the images are freed, no descriptor or mapping remains."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), mapped_chunk_bytes()["Rss"]
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
    del made
    gc.collect()
    assert before == (len(os.listdir("/proc/self/fd")), mapped_chunk_bytes()["Rss"])
