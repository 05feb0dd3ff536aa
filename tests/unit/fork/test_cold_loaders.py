"""Images that only the engine's own loader can fill."""

from __future__ import annotations

import threading
import time

from rfork.image.board import ChunkBoard
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.seed.seed import Seed
from rfork.wire import StorageRead
from tests.unit.fork.cold import ALL, Member, X, drafting, given, planned
from tests.unit.fork.fleet import CHUNKS, NEVER_S, Fleet, Target, content, image, plan, route


def is_relayed(seed: Seed) -> bool:
    reading = seed.news(()).reading
    return reading is not None and reading.relayed


def test_a_relay_passes_on_that_its_source_loads(fleet: Fleet) -> None:
    """Whoever waits behind one that waits behind the leader is told so too."""
    held = image(1)
    leader = fleet.source("leader", held, board=ChunkBoard(held.layout.chunks), knows=False)
    leader.say_reading(time.monotonic)
    relay = Member(fleet, "relay", planned(plan(route(leader, ALL))))
    told = threading.Event()
    with relay.relay.on_change(lambda: told.set() if is_relayed(relay.relay) else None):
        running = threading.Thread(target=relay.target.run)
        running.start()
        heard = told.wait(NEVER_S)
        manifest = held.manifest()
        leader.learn(manifest)
        for chunk, digest in enumerate(manifest.digests):
            leader.board.mark(chunk, digest)
        running.join()
    assert (True, False, content(held)) == (heard, is_relayed(relay.relay), content(relay.image))


LOADER = StorageRead(kind="loader", uri="", chunks=(ALL,))


def test_the_elected_runs_its_loader(fleet: Fleet) -> None:
    """It fills the whole image on the caller's thread, and every byte counts as read from storage."""
    held = image(1)
    threads: list[str] = []
    target = Target(fleet, planned(plan(storage=[LOADER])), load_whole=lambda read: load(read))

    def load(read: StorageRead) -> Manifest:
        threads.append(threading.current_thread().name)
        for own, right in zip(target.image.regions, held.regions, strict=True):
            own.copy_(right)
        return target.image.manifest()

    pulled = target.run()
    assert ([threading.current_thread().name], [True, False]) == (threads, target.relay.reading)
    assert ([held.manifest()], {"loader:": CHUNKS}, CHUNKS * MIB, 0, ALL) == (
        target.relay.learnt,
        given(target),
        pulled.bytes_read,
        target.puller.bytes_timed,  # no rate is told of what came all at once
        target.board.verified[0],
    )


def test_a_loader_that_fails_is_told_and_another_source_asked(fleet: Fleet) -> None:
    """The planner hears of a fault of storage; a seed that came up meanwhile gives everything."""
    held = image(1)
    seed = fleet.source("seed", held)
    script = planned(plan(storage=[LOADER]), plan(route(seed, ALL)))
    target = Target(fleet, script)
    target.run()
    assert ([("target", "storage", "StorageError")], content(held)) == (script.faults, content(target.image))


def test_a_loader_starts_from_nothing(fleet: Fleet) -> None:
    """What was verified is dropped before a loader writes over it, and nothing else is read meanwhile."""
    held = image(1)
    first = drafting(fleet, "first", image(2), X, [0, 1])
    script = planned(plan(route(first, (0, 2))), plan(storage=[LOADER]))
    verified: list[int] = []
    target = Target(fleet, script, load_whole=lambda read: load(read))

    def load(read: StorageRead) -> Manifest:
        verified.append(len(target.board))
        for own, right in zip(target.image.regions, held.regions, strict=True):
            own.copy_(right)
        return target.image.manifest()

    target.run()
    assert ([0], [(0, 1)], content(held), ()) == (
        verified,
        target.relay.dropped,
        content(target.image),
        first.report().readers,
    )
