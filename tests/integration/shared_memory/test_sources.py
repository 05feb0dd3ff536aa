"""Sources of shared_memory in another process: they die, stand still, change."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from rfork.errors import SourceChanged, SourceGone, SourceStalled
from rfork.image.chunks import MIB
from rfork.settings import Settings
from rfork.transport.same_host.connection import close_all
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.messages import Message
from rfork.transport.shared_memory.exporter import SharedMemoryExporter
from rfork.transport.shared_memory.shelf import Shelf
from tests.integration.shared_memory.pairs import answer_on, fork_of, pair, reading
from tests.integration.shared_memory_source import NEW, OLD, SIZES, Source
from tests.transport_contract import TOKEN, FakeGate, content, image_of, soon


def test_a_source_that_is_killed() -> None:
    """Who waits for it gets SourceGone; what was mapped is still right."""
    expected, target = image_of(SIZES, seed=OLD), image_of(SIZES)
    with Source() as source, reading(source.endpoint, target) as reader, ThreadPoolExecutor() as pool:
        reader.read(0, MIB, soon())
        source.ask("hold")
        waits = pool.submit(reader.read, MIB, 2 * MIB, soon())
        source.wait_until_held()
        source.signal(signal.SIGKILL)
        assert SourceGone is type(waits.exception())
        with pytest.raises(SourceGone):
            reader.read(MIB, 2 * MIB, soon())
    assert content(expected, 0, MIB) + bytes(MIB) == content(target, 0, 2 * MIB)


def test_a_source_that_stands_still() -> None:
    """Its reader gives up at the deadline."""
    with Source() as source, reading(source.endpoint, image_of(SIZES)) as reader:
        reader.read(0, MIB, soon())
        source.signal(signal.SIGSTOP)
        with pytest.raises(SourceStalled):
            reader.read(MIB, 2 * MIB, soon(0.3))


def test_an_update_in_place() -> None:
    """Who has forked keeps the weights that it has; who comes later gets the new ones."""
    with Source() as source:
        old = fork_of(source.endpoint)
        source.ask("update")
        new = fork_of(source.endpoint)
    assert content(image_of(SIZES, seed=OLD)) == content(old)
    assert content(image_of(SIZES, seed=NEW)) == content(new)


def test_weights_that_change_while_a_chunk_waits_for_its_turn() -> None:
    """A chunk that was made before the change is not given after it."""
    with pair() as made:
        made.connect().read(0, MIB, soon())

        def change(nbytes: int) -> None:
            made.gate.changed = True

        made.gate.before_slice = change
        with pytest.raises(SourceChanged):
            made.connect().read(0, MIB, soon())


def test_who_waits_for_a_chunk_that_another_has_made_hears_so() -> None:
    """Memory may be found slowly: a source that makes a chunk is not taken for one that stands still."""
    shelf, image = Shelf(), image_of((MIB,), seed=OLD)
    exporter = SharedMemoryExporter(image, FakeGate(), shelf, Settings())
    connections = Connections(exporter.endpoint().parameters, 30)
    request: Message = {"token": TOKEN, "begin": 0, "end": MIB, "wishes": []}
    with (
        contextlib.closing(exporter),
        contextlib.closing(connections),
        connections.borrowed(soon()) as connection,
    ):
        with shelf.making(0, lambda: None):
            connection.send(request, deadline=soon())
            assert ({"wait": 0}, []) == connection.receive(soon())
        message, descriptors = answer_on(connection)
        close_all(descriptors)
    assert ([0, 0], 1) == (message["sealed"], len(descriptors))
