"""Concurrent targets that fetch an image which no instance serves yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

from rfork.image.chunks import MIB, ChunkState
from rfork.image.memory import Image
from rfork.receiver.report import TransferStats
from rfork.schema import Plan
from rfork.settings import InstanceSettings
from rfork.source.seed import Seed
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import (
    CHUNKS,
    NEVER_S,
    Files,
    Fleet,
    Script,
    Target,
    image,
    plan,
    reads,
    settings,
)

ALL = (0, CHUNKS)
ORIGIN = "a" * 32
X, Y = "c" * 32, "d" * 32


def verified_by_source(target: Target) -> dict[str, int]:
    """Return the number of verified chunks by source."""
    return {share.source_id: share.verified_chunks for share in target.transfer.stats.shares}


def planner_script(*responses: Plan | Callable[[], Plan]) -> Script:
    return Script([response if callable(response) else partial(copy, response) for response in responses])


class RelayTarget:
    """A target that also serves its chunks to others."""

    def __init__(
        self,
        fleet: Fleet,
        name: str,
        script: Script,
        files: Sequence[Files] = (),
        *,
        faults: FaultInjection | None = None,
        chosen: InstanceSettings | None = None,
    ) -> None:
        self.image = image()
        chunk_state = ChunkState(self.image.layout.chunks)
        self.relay = fleet.source(name, self.image, faults, chunk_state=chunk_state, knows_manifest=False)
        self.target = Target(
            fleet,
            script,
            chosen or settings(max_inflight_chunks=1),
            target_image=self.image,
            chunk_state=chunk_state,
            serving_state=self.relay,
            files=files,
        )

    @property
    def weights_id(self) -> str | None:
        return self.relay.report().weights_id


def wait_for_chunks(chunk_state: ChunkState, count: int) -> bool:
    """Wait until the chunk state has this many verified chunks."""
    reached = threading.Event()
    unsubscribe = chunk_state.subscribe(lambda: reached.set() if len(chunk_state) >= count else None)
    if len(chunk_state) >= count:
        reached.set()
    try:
        return reached.wait(NEVER_S)
    finally:
        unsubscribe()


def run_concurrently(*members: RelayTarget) -> list[TransferStats | BaseException]:
    """Run all functions concurrently and return the result of each."""
    results: dict[RelayTarget, TransferStats | BaseException] = {}

    def run(member: RelayTarget) -> None:
        try:
            results[member] = member.target.run()
        except BaseException as error:
            results[member] = error

    threads = [threading.Thread(target=run, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[member] for member in members]


def failing_leader(fleet: Fleet, source_image: Image) -> RelayTarget:
    """Return a leader that dies after it has served three chunks, before it has read all of them."""
    files = Files(source_image, fails_at=4 * MIB)
    script = planner_script(plan(storage=[reads(files, ALL)]), plan(reason="no other source"))
    return RelayTarget(fleet, "leader", script, [files], faults=FaultInjection(dies_after_bytes=3 * MIB))


def provisional_relay(fleet: Fleet, name: str, source_image: Image, provisional_id: str, chunks: Sequence[int]) -> Seed:
    """Return a relay of a provisional image that has these chunks and receives no more."""
    digests = source_image.manifest().digests
    chunk_state = ChunkState(source_image.layout.chunks)
    chunk_state.set_provisional_id(provisional_id)
    for chunk in chunks:
        chunk_state.mark_verified(chunk, digests[chunk])
    return fleet.source(name, source_image, chunk_state=chunk_state, knows_manifest=False)
