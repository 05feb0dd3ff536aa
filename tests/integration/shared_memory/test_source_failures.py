"""shared_memory sources in another process that die, stop or change their weights."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from rfork.errors import SourceTimeout, SourceUnavailable, SourceWeightsChanged
from rfork.image.chunks import MIB
from rfork.settings import InstanceSettings
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import Message, close_all
from rfork.transport.shared_memory.exporter import SharedMemoryExporter
from rfork.transport.shared_memory.sealed_chunk import SealedChunkCache
from tests.integration.shared_memory.pairs import fork_of, open_reader, pair, receive_reply
from tests.integration.shared_memory_node import NEW, OLD, SIZES, SharedMemoryNode
from tests.transport_contract import TOKEN, FakeGate, content, image_of, soon


def test_a_killed_source_is_unavailable() -> None:
    """A waiting reader gets SourceUnavailable; chunks that are already mapped stay correct."""
    expected, target = image_of(SIZES, seed=OLD), image_of(SIZES)
    with (
        SharedMemoryNode() as source,
        open_reader(source.endpoint, target) as reader,
        ThreadPoolExecutor() as pool,
    ):
        reader.read(0, MIB, soon())
        source.request("block")
        waits = pool.submit(reader.read, MIB, 2 * MIB, soon())
        source.wait_until_blocked()
        source.signal(signal.SIGKILL)
        assert SourceUnavailable is type(waits.exception())
        with pytest.raises(SourceUnavailable):
            reader.read(MIB, 2 * MIB, soon())
    assert content(expected, 0, MIB) + bytes(MIB) == content(target, 0, 2 * MIB)


def test_a_stopped_source_times_out() -> None:
    """Its reader fails at the deadline."""
    with SharedMemoryNode() as source, open_reader(source.endpoint, image_of(SIZES)) as reader:
        reader.read(0, MIB, soon())
        source.signal(signal.SIGSTOP)
        with pytest.raises(SourceTimeout):
            reader.read(MIB, 2 * MIB, soon(0.3))


def test_readers_keep_their_weights_across_an_update() -> None:
    """A target that has forked keeps its weights; later targets get the new ones."""
    with SharedMemoryNode() as source:
        old = fork_of(source.endpoint)
        source.request("update")
        new = fork_of(source.endpoint)
    assert content(image_of(SIZES, seed=OLD)) == content(old)
    assert content(image_of(SIZES, seed=NEW)) == content(new)


def test_weights_that_change_while_a_chunk_waits_for_its_turn() -> None:
    """A chunk that was prepared before the change is not served after it."""
    with pair() as made:
        made.connect().read(0, MIB, soon())

        def change(nbytes: int) -> None:
            made.gate.weights_changed = True

        made.gate.before_slice = change
        with pytest.raises(SourceWeightsChanged):
            made.connect().read(0, MIB, soon())


def test_a_reader_waiting_for_a_chunk_in_progress_is_kept_alive() -> None:
    """Allocating memory may be slow: a source that is preparing a chunk does not count as stopped."""
    chunk_cache, image = SealedChunkCache(), image_of((MIB,), seed=OLD)
    exporter = SharedMemoryExporter(image, FakeGate(), chunk_cache, InstanceSettings())
    connections = ConnectionPool(exporter.endpoint().parameters, 30)
    request: Message = {"token": TOKEN, "begin": 0, "end": MIB, "alignment": []}
    with (
        contextlib.closing(exporter),
        contextlib.closing(connections),
        connections.lease(soon()) as connection,
    ):
        with chunk_cache.building(0, lambda: None):
            connection.send(request, deadline=soon())
            assert ({"wait": 0}, []) == connection.receive(soon())
        message, descriptors = receive_reply(connection)
        close_all(descriptors)
    assert [0, 0] == message["sealed"]
    assert 1 == len(descriptors)
