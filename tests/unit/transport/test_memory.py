"""The memory transport keeps the contract, and fails as it is told."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rfork.errors import LeaseRefused, SourceGone, SourceStalled
from rfork.image.chunks import MIB
from rfork.transport.memory import Faults, MemoryNetwork, MemoryTransport
from tests.transport_contract import CONTRACT, Pair, content, soon


@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_memory_keeps_the_contract(check: Callable[[Pair], None]) -> None:
    """Every check of the contract holds over memory."""
    pair = Pair.over(MemoryTransport(MemoryNetwork()))
    check(pair)
    pair.close()


def faulty(faults: Faults) -> Pair:
    return Pair.over(MemoryTransport(MemoryNetwork(), faults), sizes=(3 * MIB, 100))


def test_a_corrupt_chunk_differs_in_one_byte() -> None:
    """The first byte of a corrupt chunk is flipped; all others are right."""
    pair = faulty(Faults(corrupt_chunks={1}))
    pair.connect().read(0, pair.source.layout.image_bytes, soon())
    given, got = content(pair.source), content(pair.target)
    assert [(MIB, given[MIB] ^ 0xFF)] == [(at, got[at]) for at in range(len(got)) if got[at] != given[at]]


def test_a_dying_source_gives_so_many_bytes_and_no_more() -> None:
    """A source that dies after 2 MiB has given exactly those, and is gone for good."""
    pair = faulty(Faults(dies_after=2 * MIB))
    reader = pair.connect()
    with pytest.raises(SourceGone):
        reader.read(0, 3 * MIB, soon())
    with pytest.raises(SourceGone):
        pair.connect()
    assert content(pair.source, 0, 2 * MIB) + bytes(MIB) == content(pair.target, 0, 3 * MIB)


def test_a_stalled_source_holds_the_reader_to_its_deadline() -> None:
    """A source that stalls gives SourceStalled, not before the deadline."""
    pair = faulty(Faults(stalls_after=MIB))
    deadline = time.monotonic() + 0.1
    with pytest.raises(SourceStalled):
        pair.connect().read(0, 3 * MIB, deadline)
    assert time.monotonic() >= deadline
    assert content(pair.source, 0, MIB) + bytes(2 * MIB) == content(pair.target, 0, 3 * MIB)


def test_a_refusing_source_gives_nothing() -> None:
    """A source that refuses gives LeaseRefused though its gate would not."""
    pair = faulty(Faults(refuses=True))
    with pytest.raises(LeaseRefused):
        pair.connect().read(0, 100, soon())
    assert bytes(100) == content(pair.target, 0, 100)


def test_faults_can_be_mended() -> None:
    """A fault that is taken away no longer holds for the next slice."""
    faults = Faults(refuses=True)
    pair = faulty(faults)
    faults.refuses = False
    pair.connect().read(0, 100, soon())
    assert content(pair.source, 0, 100) == content(pair.target, 0, 100)


def test_networks_are_apart() -> None:
    """An export of one network cannot be reached from another."""
    pair = faulty(Faults())
    with pytest.raises(SourceGone):
        MemoryTransport(MemoryNetwork()).connect(pair.exporter.endpoint(), pair.target, lambda: "", soon())
