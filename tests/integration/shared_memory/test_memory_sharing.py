"""The shared_memory transport within this process: the contract, and memory that is shared or copied."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from collections.abc import Callable

import pytest
import torch

from rfork.errors import SourceWeightsChanged
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.transport.shared_memory import exporter, remap
from rfork.transport.shared_memory.remap import PageRemapper
from rfork.transport.unix_socket.connection import close_all
from rfork.transport.unix_socket.messages import Message
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


@pytest.mark.parametrize("shm_mode", ["map", "copy"])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[TransportPair], None], shm_mode: str) -> None:
    """What every transport promises."""
    made = TransportPair.create(transport(shm_mode=shm_mode))
    try:
        check(made)
    finally:
        made.close()


def test_two_targets_have_the_bytes_in_memory_once() -> None:
    """Both map the same pages; neither has a copy of its own."""
    with pair() as made:
        targets = [fork_of(made.exporter.endpoint(), LARGE) for _ in range(2)]
        size, known = made.source.layout.image_bytes, mapped_chunk_bytes()
        assert [content(made.source)] * 2 == [content(target) for target in targets]
        assert (True, True, 0) == (
            known["Rss"] > 2 * 0.9 * size,
            known["Pss"] < 1.1 * size,
            known["Anonymous"],
        )


def test_a_target_that_is_told_to_copy_maps_nothing() -> None:
    """With `copy`, its memory stays its own, and the source makes no copy of the image."""
    before = mapped_chunk_bytes()
    with pair(shm_mode="copy") as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert before == mapped_chunk_bytes()


def test_a_source_short_of_memory_gives_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no file of a chunk then, and the bytes are right."""
    monkeypatch.setattr(exporter, "fits_in_memory", lambda nbytes: False)
    before = mapped_chunk_bytes()
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert before == mapped_chunk_bytes()


def test_what_cannot_be_mapped_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that refuses costs time, and no byte."""

    def refuse(*arguments: object) -> None:
        raise OSError(12, "no")

    monkeypatch.setattr(PageRemapper, "replace", refuse)
    before = mapped_chunk_bytes()
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert before == mapped_chunk_bytes()


def test_memory_that_is_not_an_allocation_of_its_own_is_copied() -> None:
    """Files and shared memory are not mapped over: others see what is written to them."""
    with pair() as made:
        shared = mmap.mmap(-1, LARGE[0])
        regions = [torch.frombuffer(shared, dtype=torch.uint8), *image_of(LARGE[1:]).regions]
        target = Image(made.source.layout, regions)
        with open_reader(made.exporter.endpoint(), target) as reader:
            reader.read(0, LARGE[0], soon())
        assert content(made.source, 0, LARGE[0]) == shared[:]


def test_a_write_of_a_target_is_its_own() -> None:
    """Neither the source nor another target sees it."""
    with pair() as made:
        one, other = (fork_of(made.exporter.endpoint(), LARGE) for _ in range(2))
        one.regions[0].fill_(7)
        assert [content(made.source)] * 2 == [
            content(other),
            content(fork_of(made.exporter.endpoint(), LARGE)),
        ]


def test_a_relay_gives_the_memory_that_it_mapped() -> None:
    """The file that its reader gets is the one that it got itself."""
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


def test_a_relay_whose_memory_is_other_than_what_it_received_gives_its_memory() -> None:
    """What came with a source that was wrong is not given onwards after it was mended."""
    with pair() as made:
        relay = made.transport.export(made.target, FakeGate())
        with contextlib.closing(relay):
            made.connect().read(0, made.source.layout.image_bytes, soon())
            made.target.regions[0][5000] ^= 0xFF
            assert content(made.target) == content(fork_of(relay.endpoint(), LARGE))


def test_a_relay_compares_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of its weights waits for a slice at most, and what was compared across it is not given."""
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


def test_a_kernel_that_brings_no_pages_in_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.14 chunks are mapped all the same."""
    monkeypatch.setattr(remap, "MADV_POPULATE_READ", 222)
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert mapped_chunk_bytes()["Rss"] > 0.9 * LARGE[0]


def test_nothing_is_left_open() -> None:
    """Once both sides are closed and the images are gone, so are the descriptors and the mappings."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), mapped_chunk_bytes()["Rss"]
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
    del made
    gc.collect()
    assert before == (len(os.listdir("/proc/self/fd")), mapped_chunk_bytes()["Rss"])
