"""What a process leaves that died, and forks that find it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rfork.fork.fallback import Fallback
from rfork.fork.keeper import name_of
from rfork.fork.report import ForkReport
from rfork.fork.resume import Resume
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.storage.claim import claim
from rfork.storage.spool import Spool
from rfork.transport.memory import Faults
from tests.unit.fork.fleet import Fleet, Target, plan, route, settings
from tests.unit.fork.planner import FakePlanner
from tests.unit.fork.sessions import planning, session

CHUNKS = 6
ALL = (0, CHUNKS)
IDENTITY = Identity("org/model", instance_id="target")


class Model(torch.nn.Module):
    """Six chunks of weights."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        whole = torch.zeros(CHUNKS * MIB, dtype=torch.uint8)
        if seed is not None:
            whole.random_(generator=torch.Generator().manual_seed(seed))
        self.register_buffer("whole", whole)

    @property
    def bytes(self) -> bytes:
        return self.get_buffer("whole").numpy().tobytes()


def with_folder(folder: Path, **changed: float | int) -> Settings:
    return settings(**changed).model_copy(update={"resume": folder})


def left(folder: Path, held: Image, chunks: Sequence[int]) -> Path:
    """What a process leaves that died when it had these chunks of an image; its path."""
    spool = claim(folder, name_of(IDENTITY), held.layout)
    for chunk in chunks:
        begin, end = held.layout.chunks[chunk]
        with held.readable(begin, end) as views:
            spool.write(begin, views)
        spool.record(chunk, held.digest(chunk))
    spool.close()
    return spool.path


def forked(
    fleet: Fleet, module: torch.nn.Module, planner: FakePlanner, chosen: Settings, *ways: Fallback
) -> ForkReport:
    """The report of one fork, its giving side closed."""
    report = session(fleet, module, planner, *ways, chosen=chosen, identity=IDENTITY).run()
    if report.seed is not None:
        report.seed.close()
    return report


def load_zeros(module: torch.nn.Module) -> None:
    module.get_buffer("whole").zero_()


def from_seed(fleet: Fleet, source: Model, faults: Faults | None = None) -> tuple[Seed, FakePlanner]:
    """A seed of this model, and a planner that sends everybody there."""
    seed = fleet.source("a", capture(source), faults)
    return seed, planning(lambda: plan(route(seed, ALL)))


def resume(target: Target, spool: Spool) -> Resume:
    """Have a target's pull take from this spool."""
    puller = target.puller
    taken = Resume(
        spool, target.image, target.board, settings(), puller._schedule, puller._digests, puller._changed
    )
    puller._resume = puller._intake._resume = taken
    return taken
