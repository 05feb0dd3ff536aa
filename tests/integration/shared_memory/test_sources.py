"""Sources of shared_memory in another process: they die, stand still, change."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from rfork.errors import SourceChanged, SourceGone, SourceStalled
from rfork.image.chunks import MIB
from tests.integration.shared_memory.pairs import fork_of, pair, reading
from tests.integration.shared_memory_source import NEW, OLD, SIZES, Source
from tests.transport_contract import content, image_of, soon


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
