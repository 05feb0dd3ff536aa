"""Targets that pull at once an image which nobody holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

from rfork.fork.report import Pulled
from rfork.image.board import ChunkBoard
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.seed.seed import Seed
from rfork.settings import Settings
from rfork.transport.memory import Faults
from rfork.wire import Plan
from tests.unit.fork.fleet import (
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


def given(target: Target) -> dict[str, int]:
    """Verified chunks by source."""
    return {share.source_id: share.verified_chunks for share in target.puller.shares}


def planned(*answers: Plan | Callable[[], Plan]) -> Script:
    return Script([answer if callable(answer) else partial(copy, answer) for answer in answers])


class Member:
    """A target whose giving side others can read from."""

    def __init__(
        self,
        fleet: Fleet,
        name: str,
        script: Script,
        files: Sequence[Files] = (),
        *,
        faults: Faults | None = None,
        chosen: Settings | None = None,
    ) -> None:
        self.image = image()
        board = ChunkBoard(self.image.layout.chunks)
        self.relay = fleet.source(name, self.image, faults, board=board, knows=False)
        self.target = Target(
            fleet,
            script,
            chosen or settings(window=1),
            held=self.image,
            board=board,
            giving=self.relay,
            files=files,
        )

    @property
    def weights_id(self) -> str | None:
        return self.relay.report().weights_id


def wait_for(board: ChunkBoard, count: int) -> bool:
    """Until the board holds so many chunks."""
    enough = threading.Event()
    leave = board.subscribe(lambda: enough.set() if len(board) >= count else None)
    if len(board) >= count:
        enough.set()
    try:
        return enough.wait(NEVER_S)
    finally:
        leave()


def at_once(*members: Member) -> list[Pulled | BaseException]:
    """Run all of them side by side; what each ended with."""
    ended: dict[Member, Pulled | BaseException] = {}

    def run(member: Member) -> None:
        try:
            ended[member] = member.target.run()
        except BaseException as error:
            ended[member] = error

    threads = [threading.Thread(target=run, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ended[member] for member in members]


def leader_that_dies(fleet: Fleet, held: Image) -> Member:
    """A leader that dies once it gave three chunks, before it read all."""
    files = Files(held, fails_at=4 * MIB)
    script = planned(plan(storage=[reads(files, ALL)]), plan(reason="nobody else"))
    return Member(fleet, "leader", script, [files], faults=Faults(dies_after=3 * MIB))


def drafting(fleet: Fleet, name: str, held: Image, draft: str, chunks: Sequence[int]) -> Seed:
    """A relay of a draft that holds these chunks, and gets no more."""
    digests = held.manifest().digests
    board = ChunkBoard(held.layout.chunks)
    board.begin(draft)
    for chunk in chunks:
        board.mark(chunk, digests[chunk])
    return fleet.source(name, held, board=board, knows=False)
