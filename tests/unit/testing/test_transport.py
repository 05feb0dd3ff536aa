"""The in-memory transport fulfils the contract and injects faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest

from rfork.errors import LeaseRejected, SourceTimeout, SourceUnavailable
from rfork.image.chunks import MIB
from rfork.testing import transport
from rfork.testing.transport import FaultInjection, InMemoryExporter, InMemoryNetwork, InMemoryTransport
from tests.transport_contract import CONTRACT, TransportPair, content, soon


@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_the_memory_transport_fulfils_the_contract(check: Callable[[TransportPair], None]) -> None:
    """Every check of the transport contract passes."""
    pair = TransportPair.create(InMemoryTransport(InMemoryNetwork()))
    check(pair)
    pair.close()


def faulty(faults: FaultInjection) -> TransportPair:
    """Return a pair of a source with these faults and a target."""
    return TransportPair.create(InMemoryTransport(InMemoryNetwork(), faults), sizes=(3 * MIB, 100))


def test_a_corrupt_chunk_differs_in_one_byte() -> None:
    """Only the first byte of a corrupt chunk is inverted."""
    pair = faulty(FaultInjection(corrupt_chunks={1}))
    pair.connect().read(0, pair.source.layout.image_bytes, soon())
    source_bytes, target_bytes = content(pair.source), content(pair.target)
    assert [(MIB, source_bytes[MIB] ^ 0xFF)] == [
        (at, target_bytes[at]) for at in range(len(target_bytes)) if target_bytes[at] != source_bytes[at]
    ]


def test_a_dying_source_serves_the_given_number_of_bytes() -> None:
    """A source that dies after 2 MiB has served exactly 2 MiB and stays unavailable."""
    pair = faulty(FaultInjection(dies_after_bytes=2 * MIB))
    reader = pair.connect()
    with pytest.raises(SourceUnavailable):
        reader.read(0, 3 * MIB, soon())
    with pytest.raises(SourceUnavailable):
        pair.connect()
    assert content(pair.source, 0, 2 * MIB) + bytes(MIB) == content(pair.target, 0, 3 * MIB)


def test_a_stalled_source_times_out_at_the_deadline() -> None:
    """A stalled source raises SourceTimeout, not before the deadline."""
    pair = faulty(FaultInjection(stalls_after_bytes=MIB))
    reader = pair.connect()
    reader.read(0, MIB, soon())  # arrives before the stall
    deadline = time.monotonic() + 0.1
    with pytest.raises(SourceTimeout):
        reader.read(MIB, 3 * MIB, deadline)
    assert time.monotonic() >= deadline
    assert content(pair.source, 0, MIB) + bytes(2 * MIB) == content(pair.target, 0, 3 * MIB)


def test_concurrent_readers_share_the_stall_limit() -> None:
    """The bytes of the first reader are counted before the second is checked."""
    pair = faulty(FaultInjection(stalls_after_bytes=MIB))
    assert isinstance(pair.exporter, InMemoryExporter)
    assert pair.exporter.admit(MIB)
    assert not pair.exporter.admit(MIB)


def test_a_rejecting_source_serves_nothing() -> None:
    """With the fault, every read raises LeaseRejected, even if the gate authorizes it."""
    pair = faulty(FaultInjection(rejects_leases=True))
    with pytest.raises(LeaseRejected):
        pair.connect().read(0, 100, soon())
    assert bytes(100) == content(pair.target, 0, 100)


def test_faults_can_be_removed() -> None:
    """A removed fault no longer applies to the next slice."""
    faults = FaultInjection(rejects_leases=True)
    pair = faulty(faults)
    faults.rejects_leases = False
    pair.connect().read(0, 100, soon())
    assert content(pair.source, 0, 100) == content(pair.target, 0, 100)


def test_a_throttled_reader_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first slice, no bytes arrive until the rate allows it: here not before the deadline."""
    pair = faulty(FaultInjection())
    reader = pair.connect()
    reader.set_rate_limit(1)
    clock_reads = count()  # each read of the clock advances it by a second
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: next(clock_reads)))
    with pytest.raises(SourceTimeout, match="throttled"):
        reader.read(0, 3 * MIB, 3.0)
    assert content(pair.source, 0, MIB) + bytes(2 * MIB) == content(pair.target, 0, 3 * MIB)


def test_a_higher_rate_applies_to_a_running_read() -> None:
    """A read that would take a month at the old rate ends when the limit is removed."""
    pair = faulty(FaultInjection())
    reader = pair.connect()
    reader.set_rate_limit(1)
    thread = threading.Thread(target=reader.read, args=(0, 3 * MIB, soon()))
    thread.start()
    reader.set_rate_limit(None)
    thread.join(30)
    assert content(pair.source, 0, 3 * MIB) == content(pair.target, 0, 3 * MIB)


def test_a_one_sided_export_acquires_no_budget() -> None:
    """Like a transport whose reads run no code of the source."""
    pair = TransportPair.create(InMemoryTransport(InMemoryNetwork(), one_sided=True))
    acquired: list[int] = []
    pair.gate.before_slice = acquired.append
    pair.connect().read(0, 100, soon())
    assert [] == acquired


def test_networks_are_separate() -> None:
    """An export of one network is not reachable from another."""
    pair = faulty(FaultInjection())
    with pytest.raises(SourceUnavailable):
        InMemoryTransport(InMemoryNetwork()).connect(pair.exporter.endpoint(), pair.target, lambda: "", soon())
